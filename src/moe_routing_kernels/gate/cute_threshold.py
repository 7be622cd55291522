"""The threshold variant of the CuTe gate: rules that select by raw logits of any format, many experts, k up to 16.

A warp works on one token or a few at a time. Scores go straight from global memory to registers, and the next tokens' scores
are loaded meanwhile. The k-th largest of the lanes' largest scores is a threshold that at least k scores reach, and
seldom many more: the candidates (`cute_candidates`), one per lane. Each lane counts the candidates that come before its own.
So nothing is sorted, and the code is short. Tokens of a warp at the same time share its lanes from the candidates on.

Invariant: of equal scores the lowest id wins, because scores are compared in full. A token with more candidates than lanes,
because many scores are equal, or with an infinite or NaN score, takes k rounds over all scores instead. A token with a
NaN among its scores gets ids -1 and NaN weights.
"""

import functools
import math

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Int64, Uint32

from moe_routing_kernels.cute import WARP
from moe_routing_kernels.gate import FusedRule
from moe_routing_kernels.gate.cute_candidates import (
    INFINITY,
    Segment,
    choose_in_rounds,
    find_threshold,
    gather_candidates,
    gather_vectors,
    rank_candidates,
)
from moe_routing_kernels.gate.cute_primitives import (
    below,
    bitcast,
    bits_of,
    fmax,
    mass,
    row_index,
    score,
    select,
    warp_tensor,
)
from moe_routing_kernels.gate.cute_staging import VECTOR


@cute.jit
def threshold_warp(
    logits: cute.Tensor,
    ids: cute.Tensor,
    weights: cute.Tensor,
    first_token: Int32,
    rule: cutlass.Constexpr,
    tokens: cutlass.Constexpr,
    together: cutlass.Constexpr,
    wide: cutlass.Constexpr,
):
    """A warp of a block of THREADS: `tokens` tokens from `first_token` on, `together` of them at a time."""
    experts = cutlass.const_expr(logits.shape[1])
    vectors = cutlass.const_expr(-(-experts // (WARP * VECTOR)))  # of a lane
    # per warp: the vectors that reach the threshold and their numbers; the scores that reach it and their experts
    gathered = (warp_tensor(Float32, (VECTOR, WARP)), warp_tensor(Int32, (WARP,)))
    candidates = (warp_tensor(Float32, (WARP,)), warp_tensor(Int32, (WARP,)))
    raw = cute.make_rmem_tensor((VECTOR, vectors, together), logits.element_type)
    load_scores(logits, first_token, raw)
    if cutlass.const_expr(tokens == together):
        choose_for_tokens(as_floats(raw), ids, weights, first_token, rule, experts, gathered, candidates, wide)
    else:
        for i in cutlass.range(0, tokens, together, unroll=1):
            scores = as_floats(raw)
            if i + together < tokens:
                load_scores(logits, first_token + i + together, raw)
            choose_for_tokens(scores, ids, weights, first_token + i, rule, experts, gathered, candidates, wide)


@cute.jit
def load_scores(logits: cute.Tensor, first_token: Int32, raw: cute.Tensor):
    """Load tokens' scores -> raw (VECTOR, vectors, tokens): vector n of a lane is vector n * WARP + lane of the token.

    Where there is no expert, the score is -inf. A token past the last one has the scores of the last.
    """
    groups = cutlass.const_expr(logits.shape[1] // VECTOR)
    lane = cute.arch.lane_idx()
    atom = cute.make_copy_atom(
        cute.nvgpu.CopyG2ROp(),
        logits.element_type,
        num_bits_per_copy=VECTOR * logits.element_type.width,
        l1c_evict_priority=cute.nvgpu.CacheEvictionPriority.NO_ALLOCATE,
    )
    layout = cute.make_layout((VECTOR,))
    for i in cutlass.range_constexpr(cute.size(raw, mode=[2])):
        row = Int64(cutlass.min(first_token + i, logits.shape[0] - 1)) * logits.shape[1]
        start = logits.iterator + cute.assume(row + Int64(lane * VECTOR), divby=VECTOR)
        for n in cutlass.range_constexpr(cute.size(raw, mode=[1])):
            source = cute.make_tensor(start + n * WARP * VECTOR, layout)
            if cutlass.const_expr((n + 1) * WARP <= groups):
                cute.copy(atom, source, raw[None, n, i])
            else:
                for v in cutlass.range_constexpr(VECTOR):
                    raw[v, n, i] = logits.element_type(-math.inf)
                if n * WARP + lane < groups:
                    cute.copy(atom, source, raw[None, n, i])


@cute.jit
def as_floats(raw: cute.Tensor) -> cute.Tensor:
    """Scores converted to float32."""
    scores = cute.make_rmem_tensor(raw.shape, Float32)
    for i in cutlass.range_constexpr(cute.size(raw)):
        scores[i] = raw[i].to(Float32)
    return scores


@cute.jit
def choose_for_tokens(
    scores: cute.Tensor,
    ids: cute.Tensor,
    weights: cute.Tensor,
    first_token: Int32,
    rule: cutlass.Constexpr,
    experts: cutlass.Constexpr,
    gathered: tuple[cute.Tensor, cute.Tensor],
    candidates: tuple[cute.Tensor, cute.Tensor],
    wide: cutlass.Constexpr,
):
    """Write the choices of tokens with the scores (VECTOR, vectors, tokens) of each lane; none past the last token."""
    top_k, together = cutlass.const_expr(ids.shape[1]), cutlass.const_expr(cute.size(scores, mode=[2]))
    segment = Segment(together)
    # threshold
    best = [best_of_vectors(scores[None, None, i]) for i in range(together)]
    highest, threshold = find_threshold(
        [functools.reduce(lambda a, b: fmax(a, b, nan=True), vectors) for vectors in best], top_k
    )
    # candidates
    counts = gather_vectors(scores, best, threshold, gathered, segment)
    candidate_count = gather_candidates(
        segment.of_token(threshold), segment.of_token(counts), gathered, candidates, segment
    )
    value, expert, place = rank_candidates(candidate_count, top_k, candidates, segment)
    chosen = Boolean((segment.slot < candidate_count) & (place < top_k))
    top, count = segment.of_token(highest), segment.of_token(counts)
    # rounds, where candidates do not decide
    needs_rounds = (
        (top >= INFINITY) | (count > segment.slots) | (candidate_count > segment.slots) | (candidate_count < top_k)
    )
    lanes = Uint32(cute.arch.vote_ballot_sync(needs_rounds))
    for i in cutlass.range_constexpr(together):
        if (lanes >> Uint32(i * segment.slots)) & 1 != 0:
            other_value, other_expert = choose_in_rounds(scores[None, None, i], top_k, segment)
            if segment.token == i:
                value, expert, place, chosen = other_value, other_expert, segment.slot, Boolean(segment.slot < top_k)
                if top > INFINITY:
                    expert = Int32(-1)

    # weights
    weight = weigh(scores, value, chosen, bitcast(bits_of(top), Float32), highest, rule, segment, experts)
    weight = select(expert < 0, Float32(math.nan), weight)  # a token with a NaN, whose shares are numbers
    token = first_token + segment.token
    if chosen & (token < ids.shape[0]):
        ids[row_index(token, wide), place] = expert
        weights[row_index(token, wide), place] = weight


def best_of_vectors(scores: cute.Tensor) -> list[Float32]:
    """The largest score of each of a lane's vectors (VECTOR, vectors); NaN where one of its scores is."""
    best = []
    for n in range(cute.size(scores, mode=[1])):
        a, b, c, d = (scores[v, n] for v in range(VECTOR))
        best.append(fmax(fmax(a, b, nan=True), fmax(c, d, nan=True), nan=True))
    return best


def exp(value: Float32) -> Float32:
    """e to the power of a value."""
    return cute.math.exp2(value * math.log2(math.e), fastmath=True)


def weigh(
    scores: cute.Tensor,
    value: Float32,
    chosen: Boolean,
    largest: Float32,
    highest: list[Uint32],
    rule: FusedRule,
    segment: Segment,
    experts: int,
) -> Float32:
    """The weight of a lane's choice with the score `value`; `highest` are the keys of the tokens' largest scores."""
    softmax = rule.weigh.startswith("softmax")
    weight = exp(below(value, largest)) if softmax else score(rule.weigh, value)
    if rule.weigh == "softmax_all":
        totals = []
        for i, key in enumerate(highest):
            top, total, values = bitcast(bits_of(key), Float32), Float32(0.0), scores[None, None, i]
            for v in range(cute.size(values)):
                total = total + exp(values[v] - top)
            totals.append(mass(cute.arch.warp_reduction_sum(total), values, top, experts, WARP))
        return weight * cute.arch.rcp_approx(segment.of_token(totals)) * rule.scale
    if rule.renormalize or softmax:
        total = cute.arch.warp_reduction_sum(select(chosen, weight, Float32(0.0)), threads_in_group=segment.slots)
        return weight * cute.arch.rcp_approx(total) * rule.scale
    return weight * rule.scale
