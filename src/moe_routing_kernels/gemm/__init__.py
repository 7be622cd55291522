"""gemm: grouped GEMMs of experts, out[r] = f(W[e] x[r]) for the packed rows r of each expert e, one package per GPU architecture.

In an architecture's package, `tile` says what a thread block computes and what it costs, `schedule` assigns tiles to blocks,
`pipeline`, `loads`, `mainloop` and `epilogue` are the parts of `grouped_gemm`, and every other kernel is a variant that overrides
some of them.
"""
