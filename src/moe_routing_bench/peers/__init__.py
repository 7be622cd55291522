"""Adapters to kernels of other packages: one folder per operation, with the contract of `moe_routing_kernels`. Each package is optional."""
