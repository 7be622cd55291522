"""What the CuTe DSL kernels share: how a row is cut among threads, row access, and compilation.

A row of `hidden` elements is a sequence of vectors of at most 16 bytes, cut into `tiles`. A group of `lanes`
neighbouring threads handles one tile of one row; each thread holds `vectors` of its vectors, `lanes` apart, so that a
warp touches consecutive addresses. Neighbouring groups take neighbouring tiles, and then the next row. Compilation
uses fake tensors, so it needs no GPU; extents are symbolic, so one compiled kernel serves every number of tokens.

Invariant: row offsets are 64-bit, because rows * hidden may pass 2**31 elements while layout algebra is 32-bit.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass.cute import nvgpu

DTYPES = {"bf16": cutlass.BFloat16, "fp16": cutlass.Float16, "fp32": cutlass.Float32}
VECTOR_BYTES = 16
WARP = 32


@dataclass(frozen=True)
class RowTiling:
    """How a block of `threads` threads covers rows of `hidden` elements; all counts are compile-time constants."""

    hidden: int  # elements of a row
    width: int  # elements of a vector: one memory instruction
    vectors: int  # vectors a thread holds
    lanes: int  # threads of a group, which handles one tile of one row
    threads: int  # threads of a block
    streaming: bool  # mark row data as read once / written once in the caches

    @property
    def row_vectors(self) -> int:
        return self.hidden // self.width

    @property
    def tiles(self) -> int:
        """Column tiles of a row."""
        return math.ceil(self.row_vectors / (self.lanes * self.vectors))

    def blocks(self, rows: Any) -> Any:
        """Thread blocks that cover `rows` rows, a Python or a DSL integer."""
        groups = self.threads // self.lanes
        return (rows * self.tiles + groups - 1) // groups

    @property
    def exact(self) -> bool:
        """True when the tiles cover the row without a remainder, so no column has to be checked."""
        return self.row_vectors == self.lanes * self.vectors * self.tiles


def row_tiling(
    hidden: int, dtype: str, vectors: int, threads: int, streaming: bool = True, vector_bytes: int = VECTOR_BYTES
) -> RowTiling:
    """Choose the tiling of a row of `hidden` elements with at most `vectors` vectors of `vector_bytes` a thread.

    Preferred are tiles that cover the row exactly, with as many vectors a thread as allowed and whole warps a group.
    Where there are none (rows that are short, or odd), the row is divided evenly and columns are checked.
    """
    width = math.gcd(hidden, vector_bytes * 8 // DTYPES[dtype].width)
    count = hidden // width
    for held in range(vectors, 0, -1):
        lanes = math.gcd(count // held, threads) if count % held == 0 else 0
        if lanes >= WARP:
            return RowTiling(hidden, width, held, lanes, threads, streaming)
    lanes = max(min(WARP, power_of_2(count)), min(threads, power_of_2(math.ceil(count / vectors))))
    tiles = math.ceil(count / (lanes * vectors))
    return RowTiling(hidden, width, math.ceil(count / (lanes * tiles)), lanes, threads, streaming)


def power_of_2(n: int) -> int:
    """The smallest power of two that is at least n."""
    return 1 << (n - 1).bit_length()


def slabs(tokens: Any, rows: Any, slab: int) -> Any:
    """Of pack: how many take a token each, and `slab` output rows to check for padding, until both are through."""
    return cutlass.max(tokens, cute.ceil_div(rows, slab)) if slab else tokens


def position(tiling: RowTiling) -> tuple[cutlass.Int32, cutlass.Int32]:
    """Of the calling thread: the row that its group handles, and its first vector in that row."""
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
    """Global memory -> registers, one vector; rows are read once, so L1 need not keep them."""
    element = matrix.element_type
    priority = nvgpu.CacheEvictionPriority
    return cute.make_copy_atom(
        nvgpu.CopyG2ROp(),
        element,
        num_bits_per_copy=tiling.width * element.width,
        l1c_evict_priority=priority.NO_ALLOCATE if tiling.streaming else priority.EVICT_NORMAL,
    )


def store_atom(matrix: cute.Tensor, tiling: RowTiling) -> cute.CopyAtom:
    """Registers -> global memory, one vector, with the streaming policy when the tiling asks for it."""
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
    """Issue the loads of this thread's vectors of a row into `fragment` (width, vectors); columns past it are left."""
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


def matrix(dtype: Any, rows: Any, columns: int | None = None) -> Any:
    """A fake contiguous tensor for compilation: (rows,) or (rows, columns), 16-byte aligned base."""
    shape = (rows,) if columns is None else (rows, columns)
    order = tuple(reversed(range(len(shape))))
    return cute.runtime.make_fake_compact_tensor(dtype, shape, stride_order=order, assumed_align=VECTOR_BYTES)


def current_arch() -> str:
    """The DSL's name of the current CUDA device's architecture, such as sm_80 or sm_90a."""
    import torch

    major, minor = torch.cuda.get_device_capability()
    return f"sm_{major}{minor}{'a' if major >= 9 else ''}"


def compile_kernel(host: Callable, arguments: Sequence[Any], arch: str, keep: bool = False) -> Any:
    """Compile a `@cute.jit` host function for `arch`; the last parameter of `host` is the stream.

    The result takes torch tensors and launches on torch's current stream. `keep` also stores PTX and cubin on it
    (`__ptx__`, `__cubin__`), for tests.
    """
    stream = cute.runtime.make_fake_stream(use_tvm_ffi_env_stream=True)
    options = f"--gpu-arch {arch} --enable-tvm-ffi" + (" --keep-ptx --keep-cubin" if keep else "")
    return cute.compile(host, *arguments, stream, options=options)
