"""Experts in CuTe DSL for Hopper: two grouped GEMMs with swapped operands, tokens on the N side (`gemm.sm90.grouped_gemm`).

Strategy: the first GEMM applies the activation to its accumulators and writes `activated` (R, I), rounded once; the second
reads it. The tile depends on the mean of rows per expert. With few rows it is low and narrow, and the second GEMM starts before the
first ends. With more, it has variants of fewer tokens, so that few lanes idle for any spread of rows. With many, two thread
blocks load weights for both, or, where rows lie in order and K is short, two warpgroups take tiles in turn.

Each GEMM of a model has at most eight kernels for 1 to 16384 tokens, because each takes seconds to compile (`ops.prepare`).

FLOPs: 6 R H I for R rows. Floor: weights of every expert that has a row, once, and 4 R (H + I) bytes of 16-bit rows, `activated`
written and read, and results, at the bandwidth of a copy; or the FLOPs at the rate of a large GEMM, whichever takes longer.

Invariant: a row is written by the tiles of its own expert alone; rows of no expert are read, but never written.

`gather` is pack and experts fused: the first GEMM gathers token rows as it loads them; no packed copy is written or read. Its rows come by asynchronous copies of a whole warpgroup
(`loads.load_gathered`), since a box of a tensor map holds neighbouring rows. Saves 2 R H elements of traffic, at T=16384, k=8,
H=2048 in bf16 1.07 GB, 0.25 ms at 4.25 TB/s; each tile of weights gathers its rows anew, mostly from the L2 cache.
"""

import functools
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from moe_routing_kernels.cute.cache import current_arch, per_problem
from moe_routing_kernels.experts import Experts
from moe_routing_kernels.experts.common import mixed_formats, other_rows, unaligned
from moe_routing_kernels.gemm.sm90 import ARCH
from moe_routing_kernels.gemm.sm90.grouped_gemm import compile_for
from moe_routing_kernels.gemm.sm90.tile import MMA_M, VECTOR, GroupedGemm, Tile
from moe_routing_kernels.layer import Layer
from moe_routing_kernels.target import MEASURED, Target, written_for

_LEAST = 2 * VECTOR
MOST_EXPERTS = 1024  # a warp counts them, 32 per lane
FEW_ROWS = 40  # per expert, up to which weights' bytes set the time and tiles are low
LOW_SIZES = {7: 8, 26: 24, FEW_ROWS: 48}  # most rows per expert, and tokens of a low tile
SHARED_SIZES = {112: 40, 144: 72, 176: 88}  # tokens of a tile with variants, and of its narrowest one
# Standard deviations, sqrt(mean) with uniform routing, by which an expert's rows may exceed the mean and still have room in a tile
# (results/nvidia-h200.layers/spread.csv); fewer in the widest one, because a second tile costs more than it saves while few experts need it.
SPREAD, LEAST_SPREAD = 1.7, 0.3
MANY_ROWS = 192  # per expert, from which two warpgroups take tiles in turn, or two thread blocks load weights for both
# K from which two warpgroups gain less by taking turns than two blocks do by loading weights for both; an activation makes the epilogue
# longer.
LONG_K, LONG_ACTIVATED_K = 2048, 2560
CLUSTER = 2  # thread blocks
MORE_ROWS = 1024  # per expert, from which blocks load weights for both where warpgroups take turns, too
PINGPONG_SIZE = 176
PAIR_SIZE = 160  # of a cluster's tiles, unless rows are more and lie in order: two hold the 320 rows that a mean of 256 rarely exceeds
OVERLAP_ROWS = 4096  # in all, from which the second GEMM gains little by starting before the first is over


def choose_low(mean: float) -> int:
    """Tokens of a low tile, which has one variant, for up to FEW_ROWS rows per expert."""
    return next(tokens for most, tokens in LOW_SIZES.items() if mean <= most)


def choose_shared(mean: float) -> Tile:
    """A tile with variants: the smallest with room for the rows of an expert, or for an equal share where these are several tiles."""
    widest, spread = max(SHARED_SIZES), math.sqrt(mean)
    fits = mean + LEAST_SPREAD * spread <= widest
    tiles = 1 if fits else math.ceil((mean + SPREAD * spread) / widest)
    share = (mean + SPREAD * spread) / tiles
    tokens = next((tokens for tokens in SHARED_SIZES if share <= tokens), widest)
    return Tile(2, 2, tokens, narrowest=SHARED_SIZES[tokens])


def overlaps(rows: float, experts: int) -> bool:
    """Whether the second GEMM starts before the first ends: with low tiles, and with shared tiles where few rows use them.

    All rows that take the same tile have the same answer, which the kernel is compiled for.
    """
    if rows <= FEW_ROWS * experts:
        return True
    return FEW_ROWS * experts <= OVERLAP_ROWS and (rows < MANY_ROWS * experts or rows <= OVERLAP_ROWS)


def choose_tile(
    rows: float,
    experts: int,
    wide: int,
    gathers: bool = False,
    long: bool = False,
    clusters: bool = False,
    overlap: bool = False,
    multiprocessors: int = MEASURED.multiprocessors,
) -> Tile:
    """The tile for `rows` rows and `wide` rows of weights per expert; `long` where K is, `clusters` where blocks may form them.

    GEMMs that `overlap` use the tiles for fewer rows: the tiles for many rows are for GEMMs that do not overlap.

    Ping-pong tiles have half as many rows of weights, so that token rows are loaded twice as often: too often where a
    warpgroup gathers them, and where K is so long that storing a tile takes little of its time.
    """
    mean = max(1.0, rows / experts)
    if mean >= MANY_ROWS and not (overlap or gathers or long):
        cluster = CLUSTER if clusters and mean >= MORE_ROWS else 1
        return Tile(2, 2, PINGPONG_SIZE, pingpong=True, narrowest=PINGPONG_SIZE // 2, cluster=cluster)
    if mean >= MANY_ROWS and clusters and not overlap:
        tokens = PAIR_SIZE if gathers or mean < MORE_ROWS else PINGPONG_SIZE
        return Tile(2, 2, tokens, narrowest=tokens // 2, cluster=CLUSTER)
    if mean > FEW_ROWS:
        return choose_shared(mean)
    tokens = choose_low(mean)
    # So few that with two warpgroups some multiprocessors would have no tile.
    few = experts * wide < 4 * 2 * MMA_M * multiprocessors
    return Tile(1, 1 if few and tokens == min(LOW_SIZES.values()) else 2, tokens)


def unsupported(problem: Experts, target: Target | None = None) -> str | None:
    """Why this problem cannot run on a target (None: on any), or None."""
    if reason := other_rows(problem) or unaligned(problem, "the kernel"):
        return reason
    if min(problem.hidden, problem.intermediate) < _LEAST or problem.experts < 2:
        return (
            f"needs 2 experts, and hidden and intermediate of {_LEAST}, at least: tensor maps have no dimensions of 1"
        )
    if problem.experts > MOST_EXPERTS:
        return f"takes at most {MOST_EXPERTS} experts"
    return written_for(ARCH, target) or mixed_formats(problem)


def gemms(
    problem: Experts,
    up: Tile | None = None,
    down: Tile | None = None,
    top_k: int = 0,
    overlap: bool | None = None,
    waits: bool = False,
    signals: bool = False,
    target: Target = MEASURED,
) -> tuple[GroupedGemm, GroupedGemm]:
    """Both GEMMs of a problem for a target. Tiles, and whether the GEMMs overlap, are selected where they are None.

    With `top_k` above 0 the first gathers its rows: row r is the token order[r] // top_k. GEMMs that overlap may do so with
    their neighbours too: the first `waits` for the kernel before it, and the second `signals` to the kernel after it.
    """
    hidden, inner, experts = problem.hidden, problem.intermediate, problem.experts
    wide = inner * (2 if problem.gated else 1)
    overlap = overlaps(problem.mean_rows, experts) if overlap is None else overlap
    assert overlap or not (waits or signals), "GEMMs that do not overlap have no overlapping neighbours"
    shared = {"clusters": True, "overlap": overlap, "multiprocessors": target.multiprocessors}
    long = hidden >= (LONG_ACTIVATED_K if problem.gated else LONG_K)
    up = up or choose_tile(problem.mean_rows, experts, wide, top_k > 0, long, **shared)
    down = down or choose_tile(problem.mean_rows, experts, hidden, long=inner >= LONG_K, **shared)
    first = {"waits": "offsets" if waits else "", "signals": "early" if overlap else ""}
    second = {"waits": "rows" if overlap else "", "signals": "late" if signals else ""}
    return (
        GroupedGemm(inner, hidden, experts, problem.activation, up, top_k, problem.biased, **first),
        GroupedGemm(hidden, inner, experts, "", down, biased=problem.biased, **second),
    )


def precompile(problem: Experts, arch: str, top_k: int = 0, waits: bool = False, signals: bool = False) -> None:
    """Put the kernels of a problem into the cache; needs no GPU."""
    _compiled(problem, arch, top_k, waits, signals)


@per_problem
def _compiled(problem: Experts, arch: str, top_k: int, waits: bool, signals: bool) -> list[tuple[GroupedGemm, Any]]:
    chosen = gemms(problem, top_k=top_k, waits=waits, signals=signals, target=Target.named(arch))
    return [(gemm, compile_for(arch, problem.dtype, gemm)) for gemm in chosen]


def launch(
    gemm: GroupedGemm,
    kernel: Any,
    x: Tensor,
    order: Tensor | None,
    offsets: Tensor,
    w: Tensor,
    biases: Tensor | None,
    out: Tensor,
) -> Callable[[], object]:
    """The launch of one GEMM: x (R, inner), offsets (E + 1,) int32, w (E, N, inner), biases (E, N) -> out (R, columns).

    A GEMM that gathers reads x (T, inner) through order (R,) int32.
    """
    multiprocessors = torch.cuda.get_device_properties(out.device).multi_processor_count
    blocks = blocks_of(gemm, len(out), multiprocessors)
    return functools.partial(kernel, x, order, offsets, w, biases, out, blocks)


def blocks_of(gemm: GroupedGemm, rows: int, multiprocessors: int) -> int:
    """How many thread blocks a GEMM of so many rows takes: whole clusters, at most one block per multiprocessor."""
    clusters = min(multiprocessors, gemm.most_tiles(rows)) // gemm.tile.cluster
    return max(1, clusters) * gemm.tile.cluster


def launches(
    problem: Experts,
    x: Tensor,
    order: Tensor | None,
    top_k: int,
    offsets: Tensor,
    w13: Tensor,
    w2: Tensor,
    b13: Tensor | None,
    b2: Tensor | None,
    y: Tensor,
    waits: bool = False,
    signals: bool = False,
) -> Callable[[], None]:
    """Both GEMMs -> y (R, H). Row r is x[r], or x[order[r] // top_k] with `top_k` above 0; the rest is as for `gemms`."""
    (first, up_kernel), (second, down_kernel) = _compiled(problem, current_arch(), top_k, waits, signals)
    activated = torch.empty((len(y), problem.intermediate), dtype=y.dtype, device=y.device)
    up = launch(first, up_kernel, x, order, offsets, w13, b13, activated)
    down = launch(second, down_kernel, activated, None, offsets, w2, b2, y)

    def run() -> None:
        up()
        down()

    return run


def bind(
    problem: Experts,
    *,
    packed: Tensor,
    offsets: Tensor,
    w13: Tensor,
    w2: Tensor,
    y: Tensor,
    b13: Tensor | None = None,
    b2: Tensor | None = None,
) -> Callable[[], None]:
    """Bind packed (R, H), offsets (E + 1,) int32, w13 (E, N, H), w2 (E, H, I), biases b13 (E, N) and b2 (E, H) of activations that
    have them, all contiguous -> y (R, H)."""
    return launches(problem, packed, None, 0, offsets, w13, w2, b13, b2, y)


def unsupported_gather(problem: Layer, target: Target | None = None) -> str | None:
    """Why it cannot run on a target (None: on any), or None."""
    return problem.repacked or unsupported(problem.experts, target)


def precompile_gather(problem: Layer, arch: str) -> None:
    """Put the kernels of a problem into the cache; needs no GPU."""
    precompile(problem.experts, arch, problem.layout.top_k)


def bind_gather(
    problem: Layer,
    *,
    x: Tensor,
    order: Tensor,
    inverse: Tensor,
    offsets: Tensor,
    w13: Tensor,
    w2: Tensor,
    y: Tensor,
    b13: Tensor | None = None,
    b2: Tensor | None = None,
) -> Callable[[], None]:
    """Bind x (T, H), order (R,) int32, offsets (E + 1,) int32, w13 (E, N, H), w2 (E, H, I), biases b13 (E, N) and b2 (E, H) of
    activations that have them -> y (R, H)."""
    return launches(problem.experts, x, order, problem.layout.top_k, offsets, w13, w2, b13, b2, y)
