"""Adapters to kernels of other packages: a module per package, with an entry (`bind_<entry>`) per operation where it does several. Each package is optional."""
