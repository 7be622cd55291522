"""Router in Triton: projection, top-k and weights in one launch.

Strategy: a program multiplies a tile of tokens by all experts' weights over one split of K = H, on tensor cores with float32
accumulators. With enough tiles to fill the GPU a program takes all of H and selects from its registers. With few (decode), it is
split-K, so that many SMs read the weight: a program writes its partial scores to a workspace and increments the tile's count; the
last program of a tile adds the partials up, always in the order of the splits, so that every run gives the same bits, and selects.
It resets the count to zero, so that the launch can be repeated.
Compulsory bytes: x + weight + 8 * T * k; floor at T=64, E=128, H=2048: 0.8 MB, 0.2 us at 4.25 TB/s; at T=16384: 68.7 MB,
16 us, and 8.6 GFLOP, 12 us at 700 TFLOP/s.

Invariant: a partial is written before its count is raised (release), and read after the last count was seen (acquire).
"""

import functools
from collections.abc import Callable

import torch
import triton
import triton.language as tl
from torch import Tensor

from moe_routing_kernels.gate import rule_of
from moe_routing_kernels.gate.triton_gate import choose, expert_of, store_choice, weigh
from moe_routing_kernels.router import Router, splits_of, unsupported
from moe_routing_kernels.target import Target

__all__ = ["bind", "unsupported"]

SCORES = 8192  # most per program: keys of 64 bits are in registers
WEIGHT_TILE = 32768  # most bytes of the weight's tile in shared memory, of which the pipeline holds STAGES
STAGES = 4


@triton.jit
def multiply(
    x_ptr, w_ptr, token, expert, valid, real, split_index, H: tl.constexpr, STEP: tl.constexpr, STEPS: tl.constexpr
):
    """Accumulators (tokens, columns) of the tokens and the experts' weights over one split of H."""
    acc = tl.zeros([token.shape[0], expert.shape[0]], tl.float32)
    for step in range(STEPS):
        h = (split_index * STEPS + step) * STEP + tl.arange(0, STEP)
        x = tl.load(x_ptr + token.to(tl.int64)[:, None] * H + h[None, :], mask=valid & (h < H)[None, :], other=0.0)
        w = tl.load(w_ptr + expert[None, :] * H + h[:, None], mask=real[None, :] & (h < H)[:, None], other=0.0)
        acc = tl.dot(x, w, acc)
    return acc


@triton.jit
def add_partials(partial_ptr, tile, at, valid, SPLITS: tl.constexpr):
    """The sum of a tile's partial accumulators, always in the order of the splits; `at` (tokens, columns) are offsets in one of them."""
    size: tl.constexpr = at.shape[0] * at.shape[1]
    acc = tl.zeros([at.shape[0], at.shape[1]], tl.float32)
    for i in tl.static_range(SPLITS):
        start = (tile * SPLITS + i).to(tl.int64) * size
        acc += tl.load(partial_ptr + start + at, mask=valid, other=0.0, cache_modifier=".cg")
    return acc


@triton.jit
def router_kernel(
    x_ptr,
    w_ptr,
    bias_ptr,
    partial_ptr,
    count_ptr,
    ids_ptr,
    weights_ptr,
    tokens,
    scale,
    H: tl.constexpr,
    STEP: tl.constexpr,
    STEPS: tl.constexpr,
    SPLITS: tl.constexpr,
    E: tl.constexpr,
    WIDE: tl.constexpr,
    K: tl.constexpr,
    SPAN: tl.constexpr,
    TOKENS: tl.constexpr,
    SELECT: tl.constexpr,
    WEIGH: tl.constexpr,
    RENORMALIZE: tl.constexpr,
    BIASED: tl.constexpr,
    GROUPS: tl.constexpr,
    KEEP: tl.constexpr,
    BEST: tl.constexpr,
):
    """One program: TOKENS tokens, STEPS steps of STEP along H. Scores lie as (TOKENS, GROUPS * WIDE), see `gate_kernel`."""
    tile, split_index = tl.program_id(0), tl.program_id(1)
    token = tile * TOKENS + tl.arange(0, TOKENS)
    members: tl.constexpr = E // GROUPS
    COLUMNS: tl.constexpr = GROUPS * WIDE
    column = tl.arange(0, COLUMNS)
    expert = column // WIDE * members + column % WIDE
    real = column % WIDE < members
    valid = (token < tokens)[:, None]

    # main loop
    acc = multiply(x_ptr, w_ptr, token, expert, valid, real, split_index, H, STEP, STEPS)

    # split-K
    last = True
    at = tl.arange(0, TOKENS)[:, None] * COLUMNS + column[None, :]
    if SPLITS > 1:
        tl.store(partial_ptr + (tile * SPLITS + split_index).to(tl.int64) * (TOKENS * COLUMNS) + at, acc, mask=valid)
        tl.debug_barrier()  # all threads' partials precede the single thread's count
        last = tl.atomic_add(count_ptr + tile, 1, sem="acq_rel", scope="gpu") == SPLITS - 1
    # epilogue
    if last:
        if SPLITS > 1:
            tl.store(count_ptr + tile, 0)
            acc = add_partials(partial_ptr, tile, at, valid, SPLITS)
        winners, has_nan = choose(acc, expert, real, bias_ptr, K, SPAN, SELECT, BIASED, GROUPS, KEEP, BEST)
        raw = winners
        if BIASED:
            ids = expert_of(winners)
            column_of = ids // members * WIDE + ids % members
            raw = tl.gather(acc, tl.where((column_of >= 0) & (column_of < COLUMNS), column_of, 0), 1)
        weight = weigh(winners, raw, acc, real, scale, K, SELECT, WEIGH, RENORMALIZE, BIASED)
        store_choice(ids_ptr, weights_ptr, token, tokens, winners, weight, has_nan, K)


def choose_tiling(tokens: int, hidden: int, columns: int, multiprocessors: int) -> tuple[int, int]:
    """(tokens per tile, splits of H)."""
    tile = 16  # the fewest rows that tensor cores take
    while tile < 64 and tokens > tile * multiprocessors and 2 * tile * columns <= SCORES:
        tile *= 2
    return tile, splits_of(tokens, hidden, tile, multiprocessors)


def bind(
    problem: Router,
    *,
    x: Tensor,
    router_weight: Tensor,
    topk_ids: Tensor,
    topk_weights: Tensor,
    bias: Tensor | None = None,
) -> Callable[[], None]:
    """Bind x (T, H), router_weight (E, H), bias (E,) for rules that have one -> topk_ids (T, k), topk_weights (T, k)."""
    rule, top_k, (tokens, hidden), experts = rule_of(problem.router), problem.top_k, x.shape, len(router_weight)
    wide = triton.next_power_of_2(experts // rule.groups)
    columns = wide * rule.groups
    tile, splits = choose_tiling(tokens, hidden, columns, Target.here(x.device).multiprocessors)
    step = max(16, min(64, WEIGHT_TILE // (2 * columns), triton.next_power_of_2(-(-hidden // splits))))
    steps = -(-hidden // (step * splits))
    splits = -(-hidden // (step * steps))
    tiles = triton.cdiv(tokens, tile)
    partials = torch.empty(tiles * splits * tile * columns if splits > 1 else 1, device=x.device)
    count = torch.zeros(tiles, dtype=torch.int32, device=x.device)
    arguments = (
        x,
        router_weight,
        x if bias is None else bias,
        partials,
        count,
        topk_ids,
        topk_weights,
        tokens,
        rule.scale,
        hidden,
        step,
        steps,
        splits,
        experts,
        wide,
        top_k,
        triton.next_power_of_2(top_k),
        tile,
        rule.select,
        rule.weigh,
        rule.renormalize,
        rule.biased,
        rule.groups,
        rule.keep_groups,
        rule.group_best,
    )
    options = {
        "num_warps": 4 if tile * columns <= 2048 else 8 if tile * columns <= SCORES else 16,
        "num_stages": STAGES,
    }
    if not triton.knobs.runtime.interpret:
        # Compile and load now: neither may happen while a CUDA graph is captured.
        _ = router_kernel.warmup(*arguments, grid=(tiles, splits), **options).run
    return functools.partial(router_kernel[tiles, splits], *arguments, **options)
