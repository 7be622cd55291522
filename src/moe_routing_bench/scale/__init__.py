"""A model of the time of one MoE layer on N GPUs."""
