"""The steps of the threshold variant of the CuTe gate: a threshold, the candidates that reach it, and their order.

A warp holds the scores of a few tokens, VECTOR neighbours at a time. The vectors that reach their token's threshold are
gathered in shared memory, one per lane, and from these vectors the scores that reach it.
"""

import math
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Uint32

from moe_routing_kernels.cute import WARP
from moe_routing_kernels.gate.cute_primitives import bitcast, bits_of, key_of, select
from moe_routing_kernels.gate.cute_staging import VECTOR

INFINITY = 0xFF800000  # the key of the infinite score; those of NaNs are above
NO_EXPERT = 0x7FFFFFFF  # above every expert's id


class Segment:
    """The lanes, and slots in shared memory, of each of the `tokens` tokens that a warp works on at a time."""

    def __init__(self, tokens: int) -> None:
        lane = cute.arch.lane_idx()
        self.slots = WARP // tokens
        self.token, self.slot = lane // self.slots, lane % self.slots  # of this lane
        self.start = self.token * self.slots
        self.mask = Uint32((1 << self.slots) - 1) << Uint32(self.start)

    def of_token(self, values: list[Any]) -> Any:
        """The value of the lane's token, from a list of one value per token."""
        selected = values[0]
        for i, value in enumerate(values[1:], start=1):
            selected = type(selected)(cutlass.select_(self.token == i, value, selected))
        return selected


def find_threshold(best_of_lane: list[Float32], top_k: int) -> tuple[list[Uint32], list[Float32]]:
    """The key of each token's largest score, and a threshold that the best scores of at least top_k lanes reach.

    The threshold is the top_k-th largest of the distinct scores among the lanes' best. With fewer distinct scores it is NaN.
    """
    keys = [key_of(bitcast(best, Uint32)) for best in best_of_lane]
    highest = top = [cute.arch.warp_redux_sync(key, "umax") for key in keys]
    for _ in range(1, top_k):
        keys = [Uint32(cutlass.select_(key == best, Uint32(0), key)) for key, best in zip(keys, top, strict=True)]
        top = [cute.arch.warp_redux_sync(key, "umax") for key in keys]
    return highest, [bitcast(bits_of(key), Float32) for key in top]


def slots_of(taken: list[Boolean], lanes: Uint32) -> tuple[list[Int32], Int32]:
    """Consecutive slots for the elements that lanes take, element by element and then by lane, and how many are taken.

    `taken[n]` says whether the lane takes its n-th element.
    """
    lower_lanes = Uint32(cute.arch.lanemask_lt()) & lanes
    slots, count = [], Int32(0)
    for takes in taken:
        takers = Uint32(cute.arch.vote_ballot_sync(takes))
        slots.append(count + Int32(cute.arch.popc(takers & lower_lanes)))
        count = count + Int32(cute.arch.popc(takers & lanes))
    return slots, count


@cute.jit
def gather_vectors(
    scores: cute.Tensor,
    best: list[list[Float32]],
    threshold: list[Float32],
    gathered: tuple[cute.Tensor, cute.Tensor],
    segment: cutlass.Constexpr,
) -> list[Int32]:
    """Write the vectors (VECTOR, WARP) whose `best` score reaches their token's threshold, and their numbers (WARP,).

    Returns how many there are per token. None are written for a token with more vectors than slots.
    """
    lane = cute.arch.lane_idx()
    vectors, numbers = gathered
    counts = []
    for i in cutlass.range_constexpr(len(best)):
        slots, count = slots_of([score >= threshold[i] for score in best[i]], Uint32(0xFFFFFFFF))
        for n in cutlass.range_constexpr(len(slots)):
            if (best[i][n] >= threshold[i]) & (count <= segment.slots):
                slot = i * segment.slots + slots[n]
                cute.autovec_copy(scores[None, n, i], vectors[None, slot])
                numbers[slot] = n * WARP + lane
        counts.append(count)
    cute.arch.sync_warp()
    return counts


@cute.jit
def gather_candidates(
    threshold: Float32,
    vector_count: Int32,
    gathered: tuple[cute.Tensor, cute.Tensor],
    candidates: tuple[cute.Tensor, cute.Tensor],
    segment: cutlass.Constexpr,
) -> Int32:
    """Write the scores of `vector_count` vectors that reach the threshold, then -inf (WARP,), and their experts (WARP,).

    Returns how many scores of the lane's token reach it. None are written for a token with more candidates than slots.
    """
    lane = cute.arch.lane_idx()
    vectors, numbers = gathered
    values, experts = candidates
    vector = cute.make_rmem_tensor((VECTOR,), Float32)
    cute.autovec_copy(vectors[None, lane], vector)
    first = numbers[lane] * VECTOR
    slots, count = slots_of(
        [(segment.slot < vector_count) & (vector[v] >= threshold) for v in range(VECTOR)], segment.mask
    )
    for v in cutlass.range_constexpr(VECTOR):
        if (segment.slot < vector_count) & (vector[v] >= threshold) & (count <= segment.slots):
            values[segment.start + slots[v]] = vector[v]
            experts[segment.start + slots[v]] = first + v
    if segment.slot >= count:
        values[lane] = Float32(-math.inf)
    cute.arch.sync_warp()
    return count


@cute.jit
def rank_candidates(
    count: Int32, top_k: cutlass.Constexpr, candidates: tuple[cute.Tensor, cute.Tensor], segment: cutlass.Constexpr
) -> tuple[Float32, Int32, Int32]:
    """A lane's candidate, its expert, and how many of the `count` candidates come before it; undefined past the last one."""
    lane = cute.arch.lane_idx()
    values, experts = candidates
    value, expert = values[lane], experts[lane]
    expected = cutlass.const_expr(min(segment.slots, -(-3 * top_k // (2 * VECTOR)) * VECTOR))  # there are seldom more
    others, last = first_slots(values, segment, expected), cutlass.min(count, segment.slots)
    ahead = is_above(others[0], value)
    for i in cutlass.range_constexpr(1, expected):
        ahead += is_above(others[i], value)
    for i in cutlass.range(expected, last, unroll=1):
        ahead += is_above(values[segment.start + i], value)

    place = Int32(ahead)
    taken = Uint32(cutlass.select_(segment.slot < count, Uint32(1) << Uint32(segment.start + place), Uint32(0)))
    places = Uint32(cute.arch.warp_redux_sync(taken, "or")) & segment.mask
    if Int32(cute.arch.popc(places)) != count:  # equal scores: the lowest id first; read again, to spare registers
        others, numbers = first_slots(values, segment, expected), first_slots(experts, segment, expected)
        for i in cutlass.range_constexpr(expected):
            place += Int32((others[i] == value) & (numbers[i] < expert))
        for i in cutlass.range(expected, last, unroll=1):
            place += Int32((values[segment.start + i] == value) & (experts[segment.start + i] < expert))
    return value, expert, place


def first_slots(slots: cute.Tensor, segment: Segment, count: int) -> cute.Tensor:
    """The contents of the first `count` slots (WARP,) of the lane's token."""
    fragment = cute.make_rmem_tensor((count,), slots.element_type)
    start = slots.iterator + cute.assume(segment.start, divby=VECTOR)
    cute.autovec_copy(cute.make_tensor(start, cute.make_layout((count,))), fragment)
    return fragment


def is_above(a: Float32, b: Float32) -> Float32:
    """1 where a > b, else 0: one instruction, and adding such numbers needs no integer unit, which is the busy one."""
    return cute.arch.inline_ptx(
        "set.gt.f32.f32 {$w0}, {$r0}, {$r1};", write_only_types=[Float32], read_only_args=[a, b]
    )


@cute.jit
def choose_in_rounds(
    scores: cute.Tensor, top_k: cutlass.Constexpr, segment: cutlass.Constexpr
) -> tuple[Float32, Int32]:
    """The choice of the lane's slot and its expert, for any scores (VECTOR, vectors) of a token without a NaN.

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
        number = Int32(cutlass.select_(key == last, lane * VECTOR + number, Int32(NO_EXPERT)))
        last_expert = cute.arch.warp_redux_sync(number, "min")
        value = select(segment.slot == choice, bitcast(bits_of(last), Float32), value)
        expert = Int32(cutlass.select_(segment.slot == choice, last_expert, expert))
    return value, expert
