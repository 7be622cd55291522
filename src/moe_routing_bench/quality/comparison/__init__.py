"""What stored rows say over seeds: the ranking, specialisation, and adapters. Without torch."""
