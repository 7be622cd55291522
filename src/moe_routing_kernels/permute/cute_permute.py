"""Permute in CuTe DSL: expert ids to counts, offsets, stable order and its inverse, in one or two launches.

Strategy: the assignments are cut into contiguous chunks, one per thread block. Launch 1 counts each chunk's experts (and
clears `order`); launch 2 lets every block add up the chunks before its own, which gives the first rank of each expert in
it, and places its assignments. Inside a chunk, ballots over the bits of the expert's id find the lanes of a warp that hold
the same expert, and per-warp counters in shared memory, scanned over the warps, make the ranks stable. Few assignments fit
one block, which needs a single launch.
Compulsory bytes: 4 * (2 * T * k + R); floor at 131,072 assignments: 1.5 MB, 0.4 us at 4 TB/s, so latency rules: two
launches and about four dependent trips to L2. Predicted 6 to 8 us.

Invariant: ranks follow from positions alone, never from the order in which blocks or atomics arrive; every atomic adds
integers. Ids outside 0 .. E-1 (a token that the gate could not route) take no row: their inverse is -1.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64
from torch import Tensor

from moe_routing_kernels.cute import WARP, power_of_2
from moe_routing_kernels.cute.cache import cached, compile_kernel, current_arch, fake_tensor, per_problem
from moe_routing_kernels.permute import Permute
from moe_routing_kernels.permute.cute_chunks import count_kernel, groups_of
from moe_routing_kernels.permute.cute_place import place_kernel
from moe_routing_kernels.target import MEASURED, Target

MAX_EXPERTS = 1024  # per-warp counters of 32 warps then take 128 KB of shared memory
MOST_ITEMS = 8  # per thread and tile: registers and shared memory
# Chunks per thread in one batch of loads. 16 need more registers than a tile leaves, and take 1.7 to 5.8 % longer on an H200; 4 take up to
# 39 % longer.
MOST_CHUNKS = 8
IDS = {"int32": Int32, "int64": Int64}


@dataclass(frozen=True)
class Config:
    """Compile-time constants of the kernels. A tile is the assignments that a block sorts at once."""

    threads: int  # of a block
    items_per_thread: int  # assignments of a tile
    single_block: bool  # one block has all assignments in one tile, and one launch does all
    overlap: bool  # the second launch starts before the first has ended (programmatic dependent launch, sm_90 on)
    padded: bool  # every expert has the same number of rows
    align: int  # not padded: rows of an expert are rounded up to a multiple
    few_chunks: bool = False  # a block has a thread per chunk and expert
    chunks_at_once: int = 1  # not few_chunks: chunks per batch of a thread's loads
    signals: bool = False  # the kernel launched after the last one may start before the last one ends


@cute.jit
def permute_host(
    ids: cute.Tensor,
    partial: cute.Tensor,
    counts: cute.Tensor,
    offsets: cute.Tensor,
    order: cute.Tensor,
    inverse: cute.Tensor,
    limit: Int32,
    config: cutlass.Constexpr,
    stream: Any,
):
    grid, block = (partial.shape[0], 1, 1), (config.threads, 1, 1)
    if cutlass.const_expr(not config.single_block):
        count_kernel(ids, partial, order, config).launch(grid=grid, block=block, stream=stream)
    place_kernel(ids, partial, counts, offsets, order, inverse, limit, config).launch(
        grid=grid, block=block, stream=stream, use_pdl=config.overlap
    )


@cached
def compile_for(arch: str, experts: int, config: Config, ids: str = "int32", keep: bool = False) -> Any:
    """Compile permute for one architecture and shape class (no GPU needed).

    The result is called with ids (N,) of that dtype, partial (blocks, E), counts (E,), offsets (E + 1,), order (R,),
    inverse (N,), all int32, and the most rows an expert may have.
    """
    n, rows, blocks = cute.sym_int(), cute.sym_int(), cute.sym_int()
    arguments = [
        fake_tensor(IDS[ids], n),
        fake_tensor(Int32, blocks, experts),
        fake_tensor(Int32, experts),
        fake_tensor(Int32, experts + 1),
        fake_tensor(Int32, rows),
        fake_tensor(Int32, n),
        Int32(1),
        config,
    ]
    return compile_kernel(permute_host, arguments, arch, keep)


def choose(n: int, multiprocessors: int = MEASURED.multiprocessors) -> tuple[int, int, int]:
    """(threads, assignments per thread of a tile, blocks) for n assignments, after measurements on an H200.

    Few assignments are spread over more blocks. Many are cut into no more chunks than there are
    multiprocessors: a block's registers
    and shared memory fill an SM, and every block adds up all chunks.
    """
    if n <= 1024:
        threads = WARP << (-(-n // WARP) - 1).bit_length()
        return threads, 1, 1
    if n <= 65536:
        threads = 512 if n <= 8192 else 1024
        return threads, 1, -(-n // threads)
    rounds = -(-n // (MOST_ITEMS * 1024 * multiprocessors))  # tiles of a block
    items = max(2, -(-n // (rounds * 1024 * multiprocessors)))
    return 1024, items, -(-n // (rounds * items * 1024))


def unsupported(problem: Permute) -> str | None:
    """Why the kernels cannot run a problem, or None."""
    return None if problem.experts <= MAX_EXPERTS else f"the cute permute takes up to {MAX_EXPERTS} experts"


def config_of(problem: Permute, arch: str) -> tuple[Config, int]:
    """The configuration of the kernels for a problem, and their number of blocks."""
    threads, items, blocks = choose(problem.tokens * problem.top_k, Target.named(arch).multiprocessors)
    single_block = blocks == 1
    overlap = not single_block and not arch.startswith("sm_8")
    few_chunks = not single_block and blocks * problem.experts <= threads
    at_once = min(MOST_CHUNKS, power_of_2(-(-blocks // groups_of(problem.experts, threads))))
    at_once = 1 if single_block or few_chunks else at_once
    return Config(threads, items, single_block, overlap, problem.padded, problem.align, few_chunks, at_once), blocks


@per_problem
def _compiled(problem: Permute, arch: str, signals: bool) -> tuple[Any, int]:
    """The kernels of a problem, and their number of blocks."""
    config, blocks = config_of(problem, arch)
    return compile_for(arch, problem.experts, replace(config, signals=signals), problem.ids), blocks


def precompile(problem: Permute, arch: str, signals: bool = False) -> None:
    """Put the kernels of a problem into the cache; needs no GPU."""
    _compiled(problem, arch, signals)


def bind(
    problem: Permute,
    *,
    topk_ids: Tensor,
    counts: Tensor,
    offsets: Tensor,
    order: Tensor,
    inverse: Tensor,
    signals: bool = False,
) -> Callable[[], None]:
    """Bind topk_ids (T, k) of `problem.ids` -> counts (E,), offsets (E + 1,), order (rows,), inverse (T, k), all int32.

    With `signals` the next kernel may start before this one ends (programmatic dependent launch, sm_90 on).
    """
    ids = topk_ids.view(-1)
    kernel, blocks = _compiled(problem, current_arch(), signals)
    partial = counts.new_empty(blocks, problem.experts)
    limit = len(ids) if problem.limit is None else problem.limit
    return functools.partial(kernel, ids, partial, counts, offsets, order, inverse.view(-1), limit)
