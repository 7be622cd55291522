"""Shared by the kernels in the CuTe DSL: row access, compilation without a GPU, a cache of compiled kernels."""

WARP = 32  # threads
VECTOR_BYTES = 16  # of the widest memory instruction of a thread


def power_of_2(n: int) -> int:
    """The smallest power of two that is at least n."""
    return 1 << (n - 1).bit_length()
