"""The language model: its MoE layers, their adapters, and the clock that their stages report to."""
