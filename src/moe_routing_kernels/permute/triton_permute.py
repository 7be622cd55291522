"""Permute in Triton: expert ids to counts, offsets, stable order and its inverse, in one or two launches.

Strategy: as in cute_permute, the assignments are cut into contiguous chunks; launch 1 counts each chunk's experts (and
clears `order`), launch 2 adds up the chunks before its own and places its assignments. Inside a chunk, sorting the
expert ids with the positions below them gives the stable ranks. Few assignments fit one program and one launch.
Compulsory bytes: 4 * (2 * T * k + R); latency rules (see cute_permute).

Invariant: ranks follow from positions alone; there are no atomics. Ids outside 0 .. E-1 take no row: their inverse is -1.
"""

import functools
from collections.abc import Callable

import triton
import triton.language as tl
from torch import Tensor

from moe_routing_kernels.permute import Permute

MAX_EXPERTS = 1024
ONE_PROGRAM = 1024
BLOCK = 1024
MAX_PROGRAMS = 264


@triton.jit
def expert_ids(ids_ptr, at, n, E: tl.constexpr):
    """Ids at these positions; E beyond n and where the id is out of range."""
    expert = tl.load(ids_ptr + at, mask=at < n, other=E)
    return tl.where((expert >= 0) & (expert < E), expert, E).to(tl.int32)


@triton.jit
def count_kernel(
    ids_ptr, partial_ptr, order_ptr, n, rows, tiles, E: tl.constexpr, BINS: tl.constexpr, BLOCK: tl.constexpr
):
    """One program: how often each expert occurs in its chunk; clears its share of `order`."""
    program = tl.program_id(0)
    bins = tl.arange(0, BINS)
    counts = tl.zeros([BINS], tl.int32)
    for tile in range(tiles):
        at = (program * tiles + tile) * BLOCK + tl.arange(0, BLOCK)
        counts += tl.histogram(expert_ids(ids_ptr, at, n, E), BINS)
    tl.store(partial_ptr + program * E + bins, counts, mask=bins < E)
    for start in range(program * BLOCK, rows, tl.num_programs(0) * BLOCK):
        row = start + tl.arange(0, BLOCK)
        tl.store(order_ptr + row, tl.full([BLOCK], -1, tl.int32), mask=row < rows)


@triton.jit
def add_chunks(partial_ptr, program, programs, E: tl.constexpr, BINS: tl.constexpr):
    """Each expert's assignments in the chunks before the program's, and in total."""
    bins = tl.arange(0, BINS)
    before = tl.zeros([BINS], tl.int32)
    loads = tl.zeros([BINS], tl.int32)
    for start in range(0, programs, 16):
        chunk = start + tl.arange(0, 16)[:, None]
        inside = (chunk < programs) & (bins[None, :] < E)
        counts = tl.load(partial_ptr + chunk * E + bins[None, :], mask=inside, other=0)
        loads += tl.sum(counts, 0)
        before += tl.sum(tl.where(chunk < program, counts, 0), 0)
    return before, loads


@triton.jit
def place_kernel(
    ids_ptr,
    partial_ptr,
    counts_ptr,
    offsets_ptr,
    order_ptr,
    inverse_ptr,
    n,
    rows,
    tiles,
    programs,
    limit,
    E: tl.constexpr,
    BINS: tl.constexpr,
    BLOCK: tl.constexpr,
    SINGLE: tl.constexpr,
    PADDED: tl.constexpr,
    ALIGN: tl.constexpr,
):
    """One program: the rows of its chunk's assignments. SINGLE: it is the only program, with one tile."""
    program = tl.program_id(0)
    bins = tl.arange(0, BINS)
    if SINGLE:
        before = tl.zeros([BINS], tl.int32)
        loads = tl.histogram(expert_ids(ids_ptr, tl.arange(0, BLOCK), n, E), BINS)
        for start in range(0, rows, BLOCK):
            row = start + tl.arange(0, BLOCK)
            tl.store(order_ptr + row, tl.full([BLOCK], -1, tl.int32), mask=row < rows)
        tl.debug_barrier()
    else:
        before, loads = add_chunks(partial_ptr, program, programs, E, BINS)
    loads = tl.where(bins < E, loads, 0)
    kept = tl.minimum(loads, limit)
    if PADDED:
        sizes = tl.where(bins < E, limit, 0)
    else:
        sizes = (kept + ALIGN - 1) // ALIGN * ALIGN
    starts = tl.cumsum(sizes, 0) - sizes
    if program == 0:
        tl.store(counts_ptr + bins, kept, mask=bins < E)
        tl.store(offsets_ptr + bins, starts, mask=bins <= E)

    for tile in range(tiles):
        first = (program * tiles + tile) * BLOCK
        expert = expert_ids(ids_ptr, first + tl.arange(0, BLOCK), n, E)
        ordered = tl.sort((expert << 16) | tl.arange(0, BLOCK))
        expert = ordered >> 16
        here = tl.histogram(expert, BINS)
        rank = tl.gather(before - (tl.cumsum(here, 0) - here), expert, 0) + tl.arange(0, BLOCK)
        row = tl.gather(starts, expert, 0) + rank
        valid = (expert < E) & (rank < limit)
        at = first + (ordered & 0xFFFF)
        tl.store(order_ptr + row, at, mask=valid)
        tl.store(inverse_ptr + at, tl.where(valid, row, -1), mask=at < n)
        before += here


def choose(n: int) -> tuple[int, int, int]:
    """(assignments per tile, tiles per program, programs) for n assignments."""
    if n <= ONE_PROGRAM:
        return max(32, triton.next_power_of_2(n)), 1, 1
    tiles = triton.cdiv(n, BLOCK * MAX_PROGRAMS)
    return BLOCK, tiles, triton.cdiv(n, BLOCK * tiles)


def unsupported(problem: Permute) -> str | None:
    """Why the kernels cannot run a problem, or None."""
    return None if problem.experts <= MAX_EXPERTS else f"the triton permute takes up to {MAX_EXPERTS} experts"


def bind(
    problem: Permute, *, topk_ids: Tensor, counts: Tensor, offsets: Tensor, order: Tensor, inverse: Tensor
) -> Callable[[], None]:
    """Bind topk_ids (T, k) of `problem.ids` -> counts (E,), offsets (E + 1,), order (rows,), inverse (T, k), all int32."""
    n, rows, experts = topk_ids.numel(), len(order), problem.experts
    block, tiles, programs = choose(n)
    bins = triton.next_power_of_2(experts + 1)  # one more for ids out of range
    partial = counts.new_empty(programs, experts)
    limit = n if problem.limit is None else problem.limit
    count = (topk_ids, partial, order, n, rows, tiles, experts, bins, block)
    place = (
        topk_ids,
        partial,
        counts,
        offsets,
        order,
        inverse,
        n,
        rows,
        tiles,
        programs,
        limit,
        experts,
        bins,
        block,
        programs == 1,
        problem.padded,
        problem.align,
    )
    launches = [(place_kernel, place)] if programs == 1 else [(count_kernel, count), (place_kernel, place)]
    calls = []
    for kernel, arguments in launches:
        if not triton.knobs.runtime.interpret:
            # Compile and load now: neither may happen while a CUDA graph is captured.
            _ = kernel.warmup(*arguments, grid=(programs,), num_warps=8).run
        calls.append(functools.partial(kernel[(programs,)], *arguments, num_warps=8))

    def run() -> None:
        for call in calls:
            call()

    return run
