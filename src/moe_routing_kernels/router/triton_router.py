"""Router in Triton: projection, top-k and weights in one launch.

Strategy: a program multiplies a tile of tokens by all experts' weights over its part of H, on tensor cores with float32
sums. With enough tiles to fill the GPU a program takes all of H and chooses from its registers. With few (decode), H is
split, so that many SMs read the weight: a program writes its partial scores to a workspace and counts itself; the last one
of a tile adds the partials up, always in the order of the parts, so that every run gives the same bits, and chooses.
It sets the count back to zero, so that the launch can be repeated.
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

from moe_routing_kernels.gate.rules import rule_of
from moe_routing_kernels.gate.triton_gate import choose, expert_of, store_choice, weigh
from moe_routing_kernels.router import Router, split
from moe_routing_kernels.router.split import unsupported
from moe_routing_kernels.target import Target

__all__ = ["bind", "unsupported"]

SCORES = 8192  # at most per program: keys of 64 bits are in registers
WEIGHT_TILE = 32768  # most bytes of the weight's tile in shared memory, of which the pipeline holds STAGES
STAGES = 4


@triton.jit
def multiply(x_ptr, w_ptr, token, expert, valid, real, part, H: tl.constexpr, STEP: tl.constexpr, STEPS: tl.constexpr):
    """Products of the tokens and the experts' weights over one part of H: (tokens, columns)."""
    sums = tl.zeros([token.shape[0], expert.shape[0]], tl.float32)
    for step in range(STEPS):
        h = (part * STEPS + step) * STEP + tl.arange(0, STEP)
        x = tl.load(x_ptr + token.to(tl.int64)[:, None] * H + h[None, :], mask=valid & (h < H)[None, :], other=0.0)
        w = tl.load(w_ptr + expert[None, :] * H + h[:, None], mask=real[None, :] & (h < H)[:, None], other=0.0)
        sums = tl.dot(x, w, sums)
    return sums


@triton.jit
def add_partials(partial_ptr, tile, at, valid, PARTS: tl.constexpr):
    """The sum of a tile's partial products, always in the order of the parts; `at` (tokens, columns) are places in one."""
    size: tl.constexpr = at.shape[0] * at.shape[1]
    sums = tl.zeros([at.shape[0], at.shape[1]], tl.float32)
    for i in tl.static_range(PARTS):
        start = (tile * PARTS + i).to(tl.int64) * size
        sums += tl.load(partial_ptr + start + at, mask=valid, other=0.0, cache_modifier=".cg")
    return sums


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
    PARTS: tl.constexpr,
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
    tile, part = tl.program_id(0), tl.program_id(1)
    token = tile * TOKENS + tl.arange(0, TOKENS)
    members: tl.constexpr = E // GROUPS
    COLUMNS: tl.constexpr = GROUPS * WIDE
    column = tl.arange(0, COLUMNS)
    expert = column // WIDE * members + column % WIDE
    real = column % WIDE < members
    valid = (token < tokens)[:, None]

    sums = multiply(x_ptr, w_ptr, token, expert, valid, real, part, H, STEP, STEPS)

    last = True
    at = tl.arange(0, TOKENS)[:, None] * COLUMNS + column[None, :]
    if PARTS > 1:
        tl.store(partial_ptr + (tile * PARTS + part).to(tl.int64) * (TOKENS * COLUMNS) + at, sums, mask=valid)
        tl.debug_barrier()  # all threads' partials before the one thread's count
        last = tl.atomic_add(count_ptr + tile, 1, sem="acq_rel", scope="gpu") == PARTS - 1
    if last:
        if PARTS > 1:
            tl.store(count_ptr + tile, 0)
            sums = add_partials(partial_ptr, tile, at, valid, PARTS)
        winners, has_nan = choose(sums, expert, real, bias_ptr, K, SPAN, SELECT, BIASED, GROUPS, KEEP, BEST)
        own = winners
        if BIASED:
            ids = expert_of(winners)
            found = ids // members * WIDE + ids % members
            own = tl.gather(sums, tl.where((found >= 0) & (found < COLUMNS), found, 0), 1)
        weight = weigh(winners, own, sums, real, scale, K, SELECT, WEIGH, RENORMALIZE, BIASED)
        store_choice(ids_ptr, weights_ptr, token, tokens, winners, weight, has_nan, K)


def choose_tiling(tokens: int, hidden: int, columns: int, multiprocessors: int) -> tuple[int, int]:
    """(tokens per tile, parts that H is cut into)."""
    tile = 16  # the fewest rows that tensor cores take
    while tile < 64 and tokens > tile * multiprocessors and 2 * tile * columns <= SCORES:
        tile *= 2
    return tile, split.parts(tokens, hidden, tile, multiprocessors)


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
    tile, parts = choose_tiling(tokens, hidden, columns, Target.here(x.device).multiprocessors)
    step = max(16, min(64, WEIGHT_TILE // (2 * columns), triton.next_power_of_2(-(-hidden // parts))))
    steps = -(-hidden // (step * parts))
    parts = -(-hidden // (step * steps))
    tiles = triton.cdiv(tokens, tile)
    partials = torch.empty(tiles * parts * tile * columns if parts > 1 else 1, device=x.device)
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
        parts,
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
        _ = router_kernel.warmup(*arguments, grid=(tiles, parts), **options).run
    return functools.partial(router_kernel[tiles, parts], *arguments, **options)
