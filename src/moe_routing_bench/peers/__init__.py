"""Adapters to kernels of other packages: one file per package and operation, with the contract of `moe_routing_kernels`. Each package is optional."""
