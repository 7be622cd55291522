"""Gate in Triton: scores to top-k ids and weights for any fused routing rule, in one launch.

Strategy: each program has a block of tokens, with all scores of a token in registers as 64-bit keys: the order-preserving bits of the float
above the complement of the expert's id, so that one maximum finds the best expert, of equal ones the lowest id, in k rounds.
Compulsory bytes: T * E * itemsize + 8 * T * k; floor: reading the scores (see cute_gate).

Invariant: keys are unique, so a round removes exactly one expert. A token with a NaN among its scores gets ids -1 and NaN weights.
"""

import functools
from collections.abc import Callable

import triton
import triton.language as tl
from torch import Tensor

from moe_routing_kernels.gate import Gate, rule_of, unsupported
from moe_routing_kernels.routers import formulas
from moe_routing_kernels.target import Target

__all__ = ["bind", "unsupported"]

ELEMENTS = 1024  # scores per program
ENOUGH_PROGRAMS = 8  # per multiprocessor
TAIL, GUARD, MOST_SCORE = (tl.constexpr(value) for value in (formulas.TAIL, formulas.GUARD, formulas.MOST_SCORE))


@triton.jit
def score(logit, KIND: tl.constexpr):
    """The score of a logit."""
    if KIND == "sigmoid":
        return 1.0 / (1.0 + tl.exp(-logit))
    if KIND == "sqrtsoftplus":
        # log(1 + e^x) = max(x, 0) + log(1 + e^-|x|), and log(1 + u) = u * log(w) / (w - 1) with w = 1 + u keeps small u
        u = tl.exp(-tl.abs(logit))
        w = 1.0 + u
        small = tl.where(w == 1.0, u, tl.log(w) * (u / tl.where(w == 1.0, 1.0, w - 1.0)))
        root = tl.sqrt(tl.maximum(logit, 0.0) + small)
        return tl.where(logit < TAIL, tl.exp(0.5 * logit), root)
    return logit


@triton.jit
def choose(
    logit,
    expert,
    real,
    bias_ptr,
    K: tl.constexpr,
    SPAN: tl.constexpr,
    SELECT: tl.constexpr,
    BIASED: tl.constexpr,
    GROUPS: tl.constexpr,
    KEEP: tl.constexpr,
    BEST: tl.constexpr,
):
    """The k winners' keys (TOKENS, SPAN), largest first, and which tokens have a NaN (TOKENS,).

    Column j of logit (TOKENS, GROUPS * WIDE) belongs to expert[j] if real[j], else to no expert.
    """
    TOKENS: tl.constexpr = logit.shape[0]
    WIDE: tl.constexpr = logit.shape[1] // GROUPS
    chosen_by = score(logit, SELECT) + 0.0  # -0.0 and 0.0 are one score
    if BIASED:
        chosen_by += tl.load(bias_ptr + expert, mask=real, other=0.0)[None, :]
    has_nan = tl.max((real[None, :] & (chosen_by != chosen_by)).to(tl.int32), 1) > 0

    bits = chosen_by.to(tl.uint32, bitcast=True)
    flip = tl.where(bits >= 0x80000000, 0xFFFFFFFF, 0x80000000).to(tl.uint32)
    low = (0xFFFF - expert).to(tl.uint64)[None, :]
    keys = tl.where(real[None, :], ((bits ^ flip).to(tl.uint64) << 32) | low, 0)
    if GROUPS > 1:
        grouped = tl.reshape(tl.where(real[None, :], chosen_by, -float("inf")), [TOKENS, GROUPS, WIDE])
        best = tl.max(grouped, 2)
        if BEST == 2:  # the two best of a group: leave out one that is the largest
            top = tl.argmax(grouped, 2, tie_break_left=True)
            best += tl.max(tl.where(tl.arange(0, WIDE)[None, None, :] == top[:, :, None], -float("inf"), grouped), 2)
        number = tl.arange(0, GROUPS)
        ahead = (best[:, None, :] > best[:, :, None]) | (
            (best[:, None, :] == best[:, :, None]) & (number[None, None, :] < number[None, :, None])
        )
        kept = tl.sum(ahead.to(tl.int32), 2) < KEEP
        kept = tl.broadcast_to(kept[:, :, None], [TOKENS, GROUPS, WIDE])
        keys = tl.where(tl.reshape(kept, [TOKENS, GROUPS * WIDE]), keys, 0)

    place = tl.arange(0, SPAN)[None, :]
    winners = tl.zeros([TOKENS, SPAN], tl.uint64)
    for j in tl.static_range(K):
        top = tl.max(keys, 1)
        winners = tl.where(place == j, top[:, None], winners)
        keys = tl.where(keys == top[:, None], 0, keys)
    return winners, has_nan


@triton.jit
def expert_of(winners):
    """The ids that keys hold."""
    return 0xFFFF - (winners & 0xFFFF).to(tl.int32)


@triton.jit
def share(logit, largest):
    """exp(logit - largest): 1 for the largest, which may be infinite."""
    return tl.where(logit == largest, 1.0, tl.exp(logit - largest))


@triton.jit
def weigh(
    winners,
    raw,
    logit,
    real,
    scale,
    K: tl.constexpr,
    SELECT: tl.constexpr,
    WEIGH: tl.constexpr,
    RENORMALIZE: tl.constexpr,
    BIASED: tl.constexpr,
):
    """The weights (TOKENS, SPAN) of winners. `raw` are their logits where BIASED: their keys hold scores plus bias."""
    place = tl.arange(0, winners.shape[1])[None, :]
    high = (winners >> 32).to(tl.uint32)
    flip = tl.where(high >= 0x80000000, 0x80000000, 0xFFFFFFFF).to(tl.uint32)
    weight = (high ^ flip).to(tl.float32, bitcast=True)
    if WEIGH == "softmax_chosen":
        weight = tl.where(place < K, weight, -float("inf"))
        weight = tl.where(place < K, share(weight, tl.max(weight, 1)[:, None]), 0.0)
        weight = weight / tl.sum(weight, 1)[:, None]
    elif WEIGH == "softmax_all":
        largest = tl.max(tl.where(real[None, :], logit, -float("inf")), 1)[:, None]
        mass = tl.sum(tl.where(real[None, :], share(logit, largest), 0.0), 1)
        weight = share(weight, largest) / mass[:, None]
    else:
        if BIASED:  # the bias chooses, it does not weigh
            weight = score(raw, WEIGH)
        elif SELECT == "logit":
            weight = score(weight, WEIGH)
    if RENORMALIZE:
        weight = tl.minimum(weight, MOST_SCORE)
        weight = weight / (tl.sum(tl.where(place < K, weight, 0.0), 1)[:, None] + GUARD)
    return weight * scale


@triton.jit
def store_choice(ids_ptr, weights_ptr, token, tokens, winners, weight, has_nan, K: tl.constexpr):
    """Write the first k ids and weights of each token below `tokens`; -1 and NaN where has_nan."""
    place = tl.arange(0, winners.shape[1])[None, :]
    inside = (place < K) & (token < tokens)[:, None]
    out = token.to(tl.int64)[:, None] * K + place
    tl.store(ids_ptr + out, tl.where(has_nan[:, None], -1, expert_of(winners)), mask=inside)
    tl.store(weights_ptr + out, tl.where(has_nan[:, None], float("nan"), weight), mask=inside)


@triton.jit
def gate_kernel(
    logits_ptr,
    bias_ptr,
    ids_ptr,
    weights_ptr,
    tokens,
    scale,
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
    """One program: TOKENS tokens. Scores lie as (TOKENS, GROUPS, WIDE): WIDE is a group's experts, rounded up."""
    token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    members: tl.constexpr = E // GROUPS
    inner = tl.arange(0, GROUPS * WIDE) % WIDE
    expert = tl.arange(0, GROUPS * WIDE) // WIDE * members + inner
    real = inner < members
    valid = (token < tokens)[:, None]
    at = token.to(tl.int64)[:, None] * E + expert[None, :]
    logit = tl.load(logits_ptr + at, mask=valid & real[None, :], other=-float("inf")).to(tl.float32)
    winners, has_nan = choose(logit, expert, real, bias_ptr, K, SPAN, SELECT, BIASED, GROUPS, KEEP, BEST)
    raw = winners
    if BIASED:
        ids = expert_of(winners)
        logit_at = token.to(tl.int64)[:, None] * E + ids
        inside = (tl.arange(0, SPAN)[None, :] < K) & valid & (ids >= 0) & (ids < E)
        raw = tl.load(logits_ptr + logit_at, mask=inside, other=0.0).to(tl.float32)
    weight = weigh(winners, raw, logit, real, scale, K, SELECT, WEIGH, RENORMALIZE, BIASED)
    store_choice(ids_ptr, weights_ptr, token, tokens, winners, weight, has_nan, K)


def bind(
    problem: Gate, *, logits: Tensor, topk_ids: Tensor, topk_weights: Tensor, bias: Tensor | None = None
) -> Callable[[], None]:
    """Bind logits (T, E), bias (E,) for rules that have one -> topk_ids (T, k), topk_weights (T, k)."""
    rule, top_k = rule_of(problem.router), problem.top_k
    tokens, experts = logits.shape
    wide = triton.next_power_of_2(experts // rule.groups)
    block = max(1, ELEMENTS // (wide * rule.groups))
    enough = ENOUGH_PROGRAMS * Target.here(logits.device).multiprocessors
    while block > 1 and triton.cdiv(tokens, block) < enough:
        block //= 2
    arguments = (
        logits,
        logits if bias is None else bias,
        topk_ids,
        topk_weights,
        tokens,
        rule.scale,
        experts,
        wide,
        top_k,
        triton.next_power_of_2(top_k),
        block,
        rule.select,
        rule.weigh,
        rule.renormalize,
        rule.biased,
        rule.groups,
        rule.keep_groups,
        rule.group_best,
    )
    grid, warps = (triton.cdiv(tokens, block),), max(1, min(4, wide * rule.groups * block // 256))
    if not triton.knobs.runtime.interpret:
        # Compile and load now: neither may happen while a CUDA graph is captured.
        _ = gate_kernel.warmup(*arguments, grid=grid, num_warps=warps).run
    return functools.partial(gate_kernel[grid], *arguments, num_warps=warps)
