"""The threshold form of the CuTe gate: logits of any format that choose by themselves, many experts, k up to 16.

A warp works on a token. Its scores go straight from global memory to registers, and those of the next token are under way
meanwhile. The k-th largest of the lanes' largest scores is a threshold that at least k scores reach, and seldom many more.
First the vectors of VECTOR neighbouring scores that reach it are gathered, one per lane, and then the scores, one per lane
too: the candidates. Each lane counts the candidates that come before its own. So nothing is sorted, and the code is short.

Invariant: of equal scores the lowest id wins: scores are compared in full, and candidates are in the order of ids. A token
with more candidates than lanes, because many scores are equal, or with an infinity or a NaN in sight, takes k rounds over all
scores instead. A token with a NaN among its scores gets ids -1 and NaN weights.
"""

import functools
import math

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Int64, Uint32

from moe_routing_bench.kernels.cute import WARP
from moe_routing_bench.kernels.gate.cute_primitives import (
    bitcast,
    bits_of,
    fmax,
    key_of,
    score,
    select,
    warp_tensor,
)
from moe_routing_bench.kernels.gate.cute_staging import VECTOR

INFINITY = 0xFF800000  # the key of the infinite score; those of NaNs are above
NOBODY = 0x7FFFFFFF  # above every expert's id


def vectors_of(experts: int) -> int:
    """Vectors of scores that a lane holds."""
    return -(-experts // (WARP * VECTOR))


@cute.jit
def threshold_warp(
    logits: cute.Tensor,
    ids: cute.Tensor,
    weights: cute.Tensor,
    first_token: Int32,
    rule: cutlass.Constexpr,
    tokens: cutlass.Constexpr,
):
    """A warp of a block of THREADS: `tokens` tokens from `first_token` on, one after the other."""
    vectors = cutlass.const_expr(vectors_of(logits.shape[1]))
    # Of the warp: the vectors that reach the threshold and their numbers; the scores that do and their experts.
    gathered = (warp_tensor(Float32, (VECTOR, WARP)), warp_tensor(Int32, (WARP,)))
    candidates = (warp_tensor(Float32, (VECTOR, WARP // VECTOR)), warp_tensor(Int32, (WARP,)))
    raw = cute.make_rmem_tensor((VECTOR, vectors), logits.element_type)
    load_scores(logits, first_token, raw)
    if cutlass.const_expr(tokens == 1):
        choose_for_token(as_floats(raw), ids, weights, first_token, rule, gathered, candidates)
    else:
        for i in cutlass.range(tokens, unroll=1):
            scores = as_floats(raw)
            if i + 1 < tokens:
                load_scores(logits, first_token + i + 1, raw)
            choose_for_token(scores, ids, weights, first_token + i, rule, gathered, candidates)


@cute.jit
def load_scores(logits: cute.Tensor, token: Int32, raw: cute.Tensor):
    """Load a token's scores -> raw (VECTOR, vectors): vector n of a lane is vector n * WARP + lane of the token.

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
    row = Int64(cutlass.min(token, logits.shape[0] - 1)) * logits.shape[1]
    start = logits.iterator + cute.assume(row + Int64(lane * VECTOR), divby=VECTOR)
    layout = cute.make_layout((VECTOR,))
    for n in cutlass.range_constexpr(cute.size(raw, mode=[1])):
        source = cute.make_tensor(start + n * WARP * VECTOR, layout)
        if cutlass.const_expr((n + 1) * WARP <= groups):
            cute.copy(atom, source, raw[None, n])
        else:
            for v in cutlass.range_constexpr(VECTOR):
                raw[v, n] = logits.element_type(-math.inf)
            if n * WARP + lane < groups:
                cute.copy(atom, source, raw[None, n])


@cute.jit
def as_floats(raw: cute.Tensor) -> cute.Tensor:
    """The scores in float32."""
    scores = cute.make_rmem_tensor(raw.shape, Float32)
    for i in cutlass.range_constexpr(cute.size(raw)):
        scores[i] = raw[i].to(Float32)
    return scores


@cute.jit
def choose_for_token(
    scores: cute.Tensor,
    ids: cute.Tensor,
    weights: cute.Tensor,
    token: Int32,
    rule: cutlass.Constexpr,
    gathered: tuple[cute.Tensor, cute.Tensor],
    candidates: tuple[cute.Tensor, cute.Tensor],
):
    """Write the choices of a token with the scores (VECTOR, vectors) of each lane; none for a token past the last one."""
    top_k = cutlass.const_expr(ids.shape[1])
    lane = cute.arch.lane_idx()
    best = best_of_vectors(scores)
    highest, threshold = find_threshold(functools.reduce(lambda a, b: fmax(a, b, nan=True), best), top_k)
    count = gather_vectors(scores, best, threshold, gathered)
    found = gather_candidates(threshold, count, gathered, candidates)
    value, expert, place = rank_candidates(found, top_k, candidates)
    chosen = Boolean((lane < found) & (place < top_k))
    if (highest >= INFINITY) | (count > WARP) | (found > WARP) | (found < top_k):
        value, expert = choose_in_rounds(scores, top_k)
        place, chosen = lane, Boolean(lane < top_k)
        if highest > INFINITY:
            value, expert = Float32(math.nan), Int32(-1)

    largest = bitcast(bits_of(highest), Float32)
    if cutlass.const_expr(rule.weigh.startswith("softmax")):
        weight = exp(value - largest)
    else:
        weight = score(rule.weigh, value)
    total = select(chosen, weight, Float32(0.0))
    if cutlass.const_expr(rule.weigh == "softmax_all"):
        total = Float32(0.0)
        for i in cutlass.range_constexpr(cute.size(scores)):
            total += exp(scores[i] - largest)
    factor = Float32(rule.scale)
    if cutlass.const_expr(rule.renormalize or rule.weigh.startswith("softmax")):
        factor = cute.arch.rcp_approx(cute.arch.warp_reduction_sum(total)) * rule.scale
    if chosen & (token < ids.shape[0]):
        ids[token, place] = expert
        weights[token, place] = weight * factor


def exp(value: Float32) -> Float32:
    """e to the power of a value."""
    return cute.math.exp2(value * math.log2(math.e), fastmath=True)


def best_of_vectors(scores: cute.Tensor) -> list[Float32]:
    """The largest score of each of a lane's vectors; NaN where one of its scores is."""
    found = []
    for n in range(cute.size(scores, mode=[1])):
        a, b, c, d = (scores[v, n] for v in range(VECTOR))
        found.append(fmax(fmax(a, b, nan=True), fmax(c, d, nan=True), nan=True))
    return found


def find_threshold(best_of_lane: Float32, top_k: int) -> tuple[Uint32, Float32]:
    """The key of the largest score of all lanes, and a score that at least top_k lanes' best ones reach.

    The latter is the top_k-th largest of different scores among the lanes' best. Where these are fewer it is NaN.
    """
    key = key_of(bitcast(best_of_lane, Uint32))
    highest = top = cute.arch.warp_redux_sync(key, "umax")
    for _ in range(1, top_k):
        key = Uint32(cutlass.select_(key == top, Uint32(0), key))
        top = cute.arch.warp_redux_sync(key, "umax")
    return highest, bitcast(bits_of(top), Float32)


@cute.jit
def gather_vectors(
    scores: cute.Tensor,
    best: list[Float32],
    threshold: Float32,
    gathered: tuple[cute.Tensor, cute.Tensor],
) -> Int32:
    """Write the vectors (VECTOR, WARP) whose `best` score reaches the threshold, and their numbers (WARP,), in rising order.

    Returns how many there are. Those past the WARP-th are not written.
    """
    lane = cute.arch.lane_idx()
    vectors, numbers = gathered
    slots, count = slots_of([one >= threshold for one in best])
    for n in cutlass.range_constexpr(len(best)):
        if (best[n] >= threshold) & (count <= WARP):
            cute.autovec_copy(scores[None, n], vectors[None, slots[n]])
            numbers[slots[n]] = n * WARP + lane
    cute.arch.sync_warp()
    return count


def slots_of(taken: list[Boolean]) -> tuple[list[Int32], Int32]:
    """Slots for what lanes take, one after the other and, of a number, in the order of lanes; and how many are taken."""
    lower_lanes = Uint32(cute.arch.lanemask_lt())
    slots, count = [], Int32(0)
    for one in taken:
        lanes = Uint32(cute.arch.vote_ballot_sync(one))
        slots.append(count + Int32(cute.arch.popc(lanes & lower_lanes)))
        count = count + Int32(cute.arch.popc(lanes))
    return slots, count


@cute.jit
def gather_candidates(
    threshold: Float32,
    count: Int32,
    gathered: tuple[cute.Tensor, cute.Tensor],
    candidates: tuple[cute.Tensor, cute.Tensor],
) -> Int32:
    """Of `count` vectors, write the scores that reach the threshold, and then -inf, (VECTOR, WARP / VECTOR), and their
    experts (WARP,), in the order of experts.

    Returns how many reach it. Those past the WARP-th are not written.
    """
    lane = cute.arch.lane_idx()
    vectors, numbers = gathered
    values, experts = candidates
    values = cute.make_tensor(values.iterator, cute.make_layout((WARP,)))
    own = cute.make_rmem_tensor((VECTOR,), Float32)
    cute.autovec_copy(vectors[None, lane], own)
    first = numbers[lane] * VECTOR
    slots, found = slots_of([(lane < count) & (own[v] >= threshold) for v in range(VECTOR)])
    for v in cutlass.range_constexpr(VECTOR):
        if (lane < count) & (own[v] >= threshold) & (found <= WARP):
            values[slots[v]] = own[v]
            experts[slots[v]] = first + v
    if lane >= found:
        values[lane] = Float32(-math.inf)
    cute.arch.sync_warp()
    return found


@cute.jit
def rank_candidates(
    found: Int32, top_k: cutlass.Constexpr, candidates: tuple[cute.Tensor, cute.Tensor]
) -> tuple[Float32, Int32, Int32]:
    """A lane's candidate, its expert, and how many of the `found` candidates come before it; undefined past the last one."""
    lane = cute.arch.lane_idx()
    values, experts = candidates
    expected = cutlass.const_expr(min(WARP, -(-3 * top_k // (2 * VECTOR)) * VECTOR))  # seldom are there more
    value, expert = values[lane % VECTOR, lane // VECTOR], experts[lane]
    others = cute.make_rmem_tensor((VECTOR, expected // VECTOR), Float32)
    cute.autovec_copy(cute.make_tensor(values.iterator, cute.make_layout((VECTOR, expected // VECTOR))), others)
    ahead = is_above(others[0], value)
    for i in cutlass.range_constexpr(1, expected):
        ahead += is_above(others[i], value)
    for n in cutlass.range(expected // VECTOR, (found + (VECTOR - 1)) // VECTOR, unroll=1):
        more = cute.make_rmem_tensor((VECTOR,), Float32)
        cute.autovec_copy(values[None, n], more)
        for v in cutlass.range_constexpr(VECTOR):
            ahead += is_above(more[v], value)

    place = Int32(ahead)
    taken = Uint32(cutlass.select_(lane < found, Uint32(1) << Uint32(place), Uint32(0)))
    if Int32(cute.arch.popc(cute.arch.warp_redux_sync(taken, "or"))) != found:  # equal scores: the lowest id first
        for i in cutlass.range(cutlass.min(found, WARP), unroll=1):
            tied = values[i % VECTOR, i // VECTOR] == value
            place += Int32(tied & (experts[i] < expert))
    return value, expert, place


def is_above(a: Float32, b: Float32) -> Float32:
    """1 where a > b, else 0: one instruction, and the sum of such numbers needs no integer unit, which is the busy one."""
    return cute.arch.inline_ptx(
        "set.gt.f32.f32 {$w0}, {$r0}, {$r1};", write_only_types=[Float32], read_only_args=[a, b]
    )


@cute.jit
def choose_in_rounds(scores: cute.Tensor, top_k: cutlass.Constexpr) -> tuple[Float32, Int32]:
    """The choice of the lane's number and its expert, for whatever scores without a NaN; undefined from lane top_k on.

    Each round finds the largest score after the one before, in order of falling scores and rising ids.
    """
    lane = cute.arch.lane_idx()
    value, expert = Float32(0.0), Int32(0)
    last, last_expert = Uint32(0xFFFFFFFF), Int32(-1)
    for choice in cutlass.range(top_k, unroll=1):
        key, number = Uint32(0), Int32(0)
        after = last_expert - lane * VECTOR
        for n in cutlass.range_constexpr(cute.size(scores, mode=[1])):
            for v in cutlass.range_constexpr(VECTOR):
                other = key_of(bitcast(scores[v, n] + 0.0, Uint32))  # -0.0 and 0.0 are one score
                other_number = Int32(n * WARP * VECTOR + v)  # counted from the lane's first expert
                left = (other < last) | ((other == last) & (other_number > after))
                better = left & (other > key)
                key = Uint32(cutlass.select_(better, other, key))
                number = Int32(cutlass.select_(better, other_number, number))
        last = cute.arch.warp_redux_sync(key, "umax")
        number = Int32(cutlass.select_(key == last, lane * VECTOR + number, Int32(NOBODY)))
        last_expert = cute.arch.warp_redux_sync(number, "min")
        value = select(lane == choice, bitcast(bits_of(last), Float32), value)
        expert = Int32(cutlass.select_(lane == choice, last_expert, expert))
    return value, expert
