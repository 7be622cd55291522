"""Shared by the CuTe DSL pack kernels: the number of thread groups, and a group's loads of its token."""

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from moe_routing_kernels.cute import rows as cute_rows


def token_groups(tokens: Any, rows: Any, checked_rows: int) -> Any:
    """How many groups of threads handle every token, and check every output row where each checks `checked_rows`."""
    return cutlass.max(tokens, cute.ceil_div(rows, checked_rows)) if checked_rows else tokens


@cute.jit
def load_token(
    x: cute.Tensor,
    order: cute.Tensor,
    inverse: cute.Tensor,
    token: Any,
    column: Any,
    fragment: cute.Tensor,
    tiling: cutlass.Constexpr,
    checked_rows: cutlass.Constexpr,
):
    """Issue all loads of a group: its token's part of a row into `fragment` (width, vectors), and indices, int32.

    Returns the token's output rows (k,), -1 where dropped or past the last token, and the order (checked_rows,) of the
    output rows that the group checks for padding, 0 past the last row.
    """
    rows = cute.make_rmem_tensor((inverse.shape[1],), Int32)
    sources = cute.make_rmem_tensor((max(checked_rows, 1),), Int32)
    rows.fill(-1)
    sources.fill(0)
    if token < x.shape[0]:
        cute.autovec_copy(inverse[token, None], rows)
        cute_rows.load_row(x, token, column, fragment, tiling)
    for i in cutlass.range_constexpr(checked_rows):
        if token * checked_rows + i < order.shape[0]:
            sources[i] = order[token * checked_rows + i]
    return rows, sources
