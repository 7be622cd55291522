"""Pack in CuTe DSL: copy every token's row to the output rows of its k assignments, in one launch.

Strategy: token-major. A group of threads reads its token's row once into registers and writes it k times, so reads
stay at the compulsory T * H elements (gathering row by row reads up to k times that). Where padding rows are
possible, the group of token t also looks at `slab` consecutive output rows and writes zeros to those whose order is
-1; all loads, indices included, are issued before the first store. With k = 1 a group is of an output row instead: it
reads no more, and writes lie in sequence. Long copies go through shared memory (`cute_pack_bulk`).
Compulsory bytes: (T + R) * H * itemsize + 4 * T * k, and 4 * R more with padding; floor: a stream of that mix.

Invariant: every output row is written by exactly one group: `inverse` names the kept rows, `order` < 0 the others.
"""

import functools
import math
from collections.abc import Callable
from typing import Any

import cutlass
import cutlass.cute as cute
import torch
from cutlass import Int32

from moe_routing_bench import cute_cache
from moe_routing_bench import cute_support as support
from moe_routing_bench.benches.pack import cute_pack_bulk, cute_pack_fp8
from moe_routing_bench.benches.pack.cute_pack_bulk import BulkForm, bulk_form
from moe_routing_bench.cute_support import RowTiling
from moe_routing_bench.grid import FP8

MAX_SLAB = 16
ENOUGH_BLOCKS = 132 * 12  # fewer leave a large GPU partly idle: threads then take fewer vectors each
MANY_BLOCKS = 132 * 32
MANY_BYTES = 1 << 27  # written: for less, bulk copies take too long to begin


@cute.kernel
def pack_kernel(
    x: cute.Tensor,
    order: cute.Tensor,
    inverse: cute.Tensor,
    packed: cute.Tensor,
    tiling: cutlass.Constexpr,
    slab: cutlass.Constexpr,
):
    """A group of `tiling.lanes` threads: a column tile of one token, and of the `slab` rows it checks for padding."""
    token, column = support.position(tiling)
    top_k = cutlass.const_expr(inverse.shape[1])

    fragment = cute.make_rmem_tensor((tiling.width, tiling.vectors), x.element_type)
    rows = cute.make_rmem_tensor((top_k,), Int32)
    sources = cute.make_rmem_tensor((max(slab, 1),), Int32)
    rows.fill(-1)
    sources.fill(0)
    if token < x.shape[0]:
        cute.autovec_copy(inverse[token, None], rows)
        support.load_row(x, token, column, fragment, tiling)
    for i in cutlass.range_constexpr(slab):
        if token * slab + i < order.shape[0]:
            sources[i] = order[token * slab + i]

    for j in cutlass.range_constexpr(top_k):
        if rows[j] >= 0:
            support.store_row(fragment, packed, rows[j], column, tiling)
    if cutlass.const_expr(slab > 0):
        fragment.fill(0)
        for i in cutlass.range_constexpr(slab):
            if sources[i] < 0:
                support.store_row(fragment, packed, token * slab + i, column, tiling)


@cute.kernel
def single_choice_kernel(x: cute.Tensor, order: cute.Tensor, packed: cute.Tensor, tiling: cutlass.Constexpr):
    """Row-major, for k = 1: a group reads a column tile of one output row from where `order` says, or writes zeros."""
    row, column = support.position(tiling)
    fragment = cute.make_rmem_tensor((tiling.width, tiling.vectors), x.element_type)
    fragment.fill(0)
    if row < order.shape[0]:
        token = order[row]
        if token >= 0:
            support.load_row(x, token, column, fragment, tiling)
        support.store_row(fragment, packed, row, column, tiling)


@cute.jit
def pack_host(
    x: cute.Tensor,
    order: cute.Tensor,
    inverse: cute.Tensor,
    packed: cute.Tensor,
    tiling: cutlass.Constexpr,
    slab: cutlass.Constexpr,
    stream: Any,
):
    if cutlass.const_expr(inverse.shape[1] == 1):
        single_choice_kernel(x, order, packed, tiling).launch(
            grid=(tiling.blocks(order.shape[0]), 1, 1), block=(tiling.threads, 1, 1), stream=stream
        )
    else:
        steps = support.slabs(x.shape[0], order.shape[0], slab)
        pack_kernel(x, order, inverse, packed, tiling, slab).launch(
            grid=(tiling.blocks(steps), 1, 1), block=(tiling.threads, 1, 1), stream=stream
        )


@functools.partial(cute_cache.cached, also=(cute_pack_bulk.__file__,))
def compile_for(arch: str, dtype: str, top_k: int, form: RowTiling | BulkForm, slab: int, keep: bool = False) -> Any:
    """Compile pack, in one of its forms, for one architecture and shape class (no GPU needed).

    `slab` is the number of output rows that each group checks for padding; 0 promises that no row is padding.
    The result is called with x (T, H), order (R,), inverse (T, k), packed (R, H).
    """
    element = support.DTYPES[dtype]
    tokens, rows = cute.sym_int(), cute.sym_int()
    arguments = [
        support.matrix(element, tokens, form.hidden),
        support.matrix(Int32, rows),
        support.matrix(Int32, tokens, top_k),
        support.matrix(element, rows, form.hidden),
        form,
        slab,
    ]
    host = cute_pack_bulk.pack_host if isinstance(form, BulkForm) else pack_host
    return support.compile_kernel(host, arguments, arch, keep)


def choose(arch: str, tokens: int, hidden: int, dtype: str, top_k: int) -> RowTiling | BulkForm:
    """How rows are copied: by bulk copies where each is written often and all are long, else through registers."""
    written = tokens * top_k * hidden * support.DTYPES[dtype].width // 8
    bulk = bulk_form(arch, hidden, dtype, top_k) if top_k > 2 and written >= MANY_BYTES else None
    return bulk or choose_tiling(tokens, hidden, dtype, top_k)


def choose_tiling(tokens: int, hidden: int, dtype: str, top_k: int) -> RowTiling:
    """The row tiling for `tokens` rows: few rows are cut finer, so that they still occupy the whole GPU.

    Many rows are cut finer too: blocks that end sooner overlap better (docs/kernels.md).
    """
    vectors = 4
    tiling = support.row_tiling(hidden, dtype, vectors, threads=128)
    if top_k == 1 or tiling.blocks(tokens) >= MANY_BLOCKS:
        vectors = 2
        tiling = support.row_tiling(hidden, dtype, vectors, threads=128)
    while vectors > 1 and tiling.blocks(tokens) < ENOUGH_BLOCKS:
        vectors //= 2
        tiling = support.row_tiling(hidden, dtype, vectors, threads=128)
    return tiling


def choose_slab(cell: Any, tokens: int, rows: int) -> int:
    """Output rows that a group checks for padding: an even share, 0 where no row can be padding."""
    if cell.layout == "compact" and cell.capacity_factor is None and rows == tokens * cell.top_k:
        return 0
    return min(MAX_SLAB, math.ceil(rows / tokens))


def supports(cell: Any) -> str | None:
    """Why this cell cannot run, or None."""
    return cute_pack_fp8.supports(cell) if cell.dtype in FP8 else None


def precompile(cell: Any, arch: str) -> None:
    """Put the kernel of a cell, with buffers at its layout's row limit, into the cache; needs no GPU."""
    slab = choose_slab(cell, cell.tokens, cell.row_limit)
    if cell.dtype in FP8:
        cute_pack_fp8.precompile(cell, arch, slab)
    else:
        _compiled(cell, arch, slab)


def _compiled(cell: Any, arch: str, slab: int) -> Any:
    form = choose(arch, cell.tokens, cell.hidden, cell.dtype, cell.top_k)
    return compile_for(arch, cell.dtype, cell.top_k, form, slab)


def prepare(cell: Any, inputs: dict[str, torch.Tensor], outputs: dict[str, torch.Tensor]) -> Callable[[], None]:
    """Bind pack: x (T, H), order (R,) int32, inverse (T, k) int32 -> packed (R, H), of x's dtype or quantised."""
    x, order, inverse = inputs["x"], inputs["order"], inputs["inverse"]
    slab = choose_slab(cell, len(x), len(order))
    if cell.dtype in FP8:
        return cute_pack_fp8.prepare(cell, inputs, outputs, slab)
    return functools.partial(_compiled(cell, support.current_arch(), slab), x, order, inverse, outputs["packed"])
