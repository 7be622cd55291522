"""Rows of a matrix cut among threads, and the row access of CuTe DSL kernels.

A row of `hidden` elements is a sequence of vectors of at most 16 bytes, cut into `tiles`. A group of `lanes`
neighbouring threads handles one tile of one row; each thread holds `vectors` of its vectors, `lanes` apart, so that a
warp touches consecutive addresses. Neighbouring groups take neighbouring tiles, and then the next row.

Invariant: row offsets are 64-bit, because rows * hidden may pass 2**31 elements while layout algebra is 32-bit.

Kernels of pack share the number of thread groups and a group's loads of its token.
"""

import math
from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int32
from cutlass.cute import nvgpu

from moe_routing_kernels.cute import VECTOR_BYTES, WARP, power_of_2
from moe_routing_kernels.cute.cache import DTYPES

MOST_IDLE = 0.15  # vectors past the end of a row, as a share of the row, up to which fewer lanes do not pay


@dataclass(frozen=True)
class RowTiling:
    """How a block of `threads` threads covers rows of `hidden` elements; all counts are compile-time constants."""

    hidden: int  # elements of a row
    width: int  # elements of a vector: one memory instruction
    vectors: int  # vectors that a thread holds
    lanes: int  # threads of a group, which handles one tile of one row
    threads: int  # threads of a block
    streaming: bool  # mark row data as read once / written once in the caches

    @property
    def row_vectors(self) -> int:
        """Vectors of a row."""
        return self.hidden // self.width

    @property
    def tiles(self) -> int:
        """Column tiles of a row."""
        return math.ceil(self.row_vectors / (self.lanes * self.vectors))

    @property
    def covered(self) -> int:
        """Vectors that the tiles of a row cover, those past its end included."""
        return self.lanes * self.vectors * self.tiles

    def blocks(self, rows: Any) -> Any:
        """Thread blocks that cover `rows` rows, a Python or a DSL integer."""
        groups = self.threads // self.lanes
        return (rows * self.tiles + groups - 1) // groups

    @property
    def exact(self) -> bool:
        """True when the tiles cover the row without a remainder, so no column has to be checked."""
        return self.row_vectors == self.covered


def row_tiling(hidden: int, dtype: str, vectors: int, threads: int, streaming: bool = True) -> RowTiling:
    """Choose the tiling of rows: at most `vectors` vectors per thread, about `threads` threads per block.

    Tiles that cover the row exactly are preferred, with as many vectors per thread as allowed and whole warps per
    group. Where no tile does (short or odd rows), tiles are filled evenly and columns are checked: with the most
    lanes that leave few of them idle, or else with the most lanes.
    """
    width = math.gcd(hidden, VECTOR_BYTES * 8 // DTYPES[dtype].width)
    count = hidden // width
    for per_thread in range(vectors, 0, -1):
        lanes = math.gcd(count // per_thread, threads) if count % per_thread == 0 else 0
        if lanes >= WARP:
            return RowTiling(hidden, width, per_thread, lanes, threads, streaming)
    fewest = min(WARP, power_of_2(count))
    most = max(fewest, min(threads, power_of_2(math.ceil(count / vectors))))
    even = [
        _even_tiling(hidden, width, vectors, most >> n, threads, streaming)
        for n in range((most // fewest).bit_length())
    ]
    busy = (tiling for tiling in even if tiling.covered <= (1 + MOST_IDLE) * count and tiling.threads >= threads // 2)
    return next(busy, even[0])


def _even_tiling(hidden: int, width: int, vectors: int, lanes: int, threads: int, streaming: bool) -> RowTiling:
    """Tiles of `lanes` lanes and at most `vectors` vectors per thread that are filled evenly.

    The groups of a block divide a row's tiles, or the tiles divide them: addresses are then a layout (docs/layouts.md).
    """
    count = hidden // width
    tiles = math.ceil(count / (lanes * vectors))
    fitting = [n for n in range(1, 2 * threads // lanes + 1) if tiles % n == 0 or n % tiles == 0]
    groups = min(fitting, key=lambda n: (abs(n * lanes - threads), -n))
    return RowTiling(hidden, width, math.ceil(count / (lanes * tiles)), lanes, groups * lanes, streaming)


def position(tiling: RowTiling) -> tuple[cutlass.Int32, cutlass.Int32]:
    """The row that the calling thread's group handles, and the thread's first vector in that row."""
    groups = tiling.threads // tiling.lanes
    thread = cute.arch.thread_idx()[0]
    tile = cute.arch.block_idx()[0] * groups + thread // tiling.lanes
    column = tile % tiling.tiles * (tiling.lanes * tiling.vectors) + thread % tiling.lanes
    return tile // tiling.tiles, column


def row_vectors(matrix: cute.Tensor, row: Any, tiling: cutlass.Constexpr) -> cute.Tensor:
    """One row of a (rows, hidden) tensor as (width, vectors of the row), addressed with 64 bits."""
    offset = cute.assume(cutlass.Int64(row) * tiling.hidden, divby=tiling.width)
    layout = cute.make_layout((tiling.width, tiling.row_vectors))
    return cute.make_tensor(matrix.iterator + offset, layout)


def load_atom(matrix: cute.Tensor, tiling: RowTiling) -> cute.CopyAtom:
    """Copies one vector from global memory to registers; rows are read once, so L1 need not keep them."""
    element = matrix.element_type
    priority = nvgpu.CacheEvictionPriority
    return cute.make_copy_atom(
        nvgpu.CopyG2ROp(),
        element,
        num_bits_per_copy=tiling.width * element.width,
        l1c_evict_priority=priority.NO_ALLOCATE if tiling.streaming else priority.EVICT_NORMAL,
    )


def store_atom(matrix: cute.Tensor, tiling: RowTiling) -> cute.CopyAtom:
    """Copies one vector from registers to global memory, with the streaming policy where the tiling asks for it."""
    element = matrix.element_type
    mode = nvgpu.StoreCacheMode
    return cute.make_copy_atom(
        nvgpu.CopyR2GOp(),
        element,
        num_bits_per_copy=tiling.width * element.width,
        store_cache_mode=mode.STREAMING if tiling.streaming else mode.WRITE_BACK,
    )


@cute.jit
def load_row(matrix: cute.Tensor, row: Any, column: Any, fragment: cute.Tensor, tiling: cutlass.Constexpr):
    """Issue the loads of this thread's vectors of a row into `fragment` (width, vectors); elements past the row are left as they are."""
    source = row_vectors(matrix, row, tiling)
    atom = load_atom(matrix, tiling)
    for v in cutlass.range_constexpr(tiling.vectors):
        c = column + v * tiling.lanes
        if cutlass.const_expr(tiling.exact):
            cute.copy(atom, source[None, c], fragment[None, v])
        else:
            if c < tiling.row_vectors:
                cute.copy(atom, source[None, c], fragment[None, v])


@cute.jit
def store_row(fragment: cute.Tensor, matrix: cute.Tensor, row: Any, column: Any, tiling: cutlass.Constexpr):
    """Write `fragment` (width, vectors) to this thread's vectors of a row."""
    target = row_vectors(matrix, row, tiling)
    atom = store_atom(matrix, tiling)
    for v in cutlass.range_constexpr(tiling.vectors):
        c = column + v * tiling.lanes
        if cutlass.const_expr(tiling.exact):
            cute.copy(atom, fragment[None, v], target[None, c])
        else:
            if c < tiling.row_vectors:
                cute.copy(atom, fragment[None, v], target[None, c])


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
        load_row(x, token, column, fragment, tiling)
    for i in cutlass.range_constexpr(checked_rows):
        if token * checked_rows + i < order.shape[0]:
            sources[i] = order[token * checked_rows + i]
    return rows, sources
