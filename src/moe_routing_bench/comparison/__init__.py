"""Which differences count: noise floors from equal implementations, verdicts on pairs, and one run against another."""
