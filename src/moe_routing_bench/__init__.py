"""Benchmark of Mixture-of-Experts routing: gate, permute, pack, experts, combine."""
