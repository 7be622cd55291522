"""The steps of the threshold form of the CuTe gate: a threshold, the candidates that reach it, and their order.

A warp holds the scores of a few tokens, VECTOR neighbours at a time. The vectors that reach their token's threshold are
gathered in shared memory, one per lane, and from these the scores that do.
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
NOBODY = 0x7FFFFFFF  # above every expert's id


class Room:
    """The lanes, and slots in shared memory, of each of `tokens` tokens side by side."""

    def __init__(self, tokens: int) -> None:
        lane = cute.arch.lane_idx()
        self.slots = WARP // tokens
        self.token, self.slot = lane // self.slots, lane % self.slots  # of this lane
        self.start = self.token * self.slots
        self.mask = Uint32((1 << self.slots) - 1) << Uint32(self.start)

    def own(self, options: list[Any]) -> Any:
        """Of a value per token, that of the lane's token."""
        found = options[0]
        for i, option in enumerate(options[1:], start=1):
            found = type(found)(cutlass.select_(self.token == i, option, found))
        return found


def find_threshold(best_of_lane: list[Float32], top_k: int) -> tuple[list[Uint32], list[Float32]]:
    """Of each token, the key of its largest score, and a score that at least top_k lanes' best ones reach.

    The latter is the top_k-th largest of different scores among the lanes' best. Where these are fewer it is NaN.
    """
    keys = [key_of(bitcast(one, Uint32)) for one in best_of_lane]
    highest = top = [cute.arch.warp_redux_sync(key, "umax") for key in keys]
    for _ in range(1, top_k):
        keys = [Uint32(cutlass.select_(key == one, Uint32(0), key)) for key, one in zip(keys, top, strict=True)]
        top = [cute.arch.warp_redux_sync(key, "umax") for key in keys]
    return highest, [bitcast(bits_of(one), Float32) for one in top]


def slots_of(taken: list[Boolean], lanes: Uint32) -> tuple[list[Int32], Int32]:
    """Slots for what some lanes take, one after the other and, of a number, in the order of lanes; and how many are taken."""
    lower_lanes = Uint32(cute.arch.lanemask_lt()) & lanes
    slots, count = [], Int32(0)
    for one in taken:
        takers = Uint32(cute.arch.vote_ballot_sync(one))
        slots.append(count + Int32(cute.arch.popc(takers & lower_lanes)))
        count = count + Int32(cute.arch.popc(takers & lanes))
    return slots, count


@cute.jit
def gather_vectors(
    scores: cute.Tensor,
    best: list[list[Float32]],
    threshold: list[Float32],
    gathered: tuple[cute.Tensor, cute.Tensor],
    room: cutlass.Constexpr,
) -> list[Int32]:
    """Write the vectors (VECTOR, WARP) whose `best` score reaches their token's threshold, and their numbers (WARP,).

    Returns how many there are of each token. Of a token that has not the room none are written.
    """
    lane = cute.arch.lane_idx()
    vectors, numbers = gathered
    counts = []
    for i in cutlass.range_constexpr(len(best)):
        slots, count = slots_of([one >= threshold[i] for one in best[i]], Uint32(0xFFFFFFFF))
        for n in cutlass.range_constexpr(len(slots)):
            if (best[i][n] >= threshold[i]) & (count <= room.slots):
                slot = i * room.slots + slots[n]
                cute.autovec_copy(scores[None, n, i], vectors[None, slot])
                numbers[slot] = n * WARP + lane
        counts.append(count)
    cute.arch.sync_warp()
    return counts


@cute.jit
def gather_candidates(
    threshold: Float32,
    count: Int32,
    gathered: tuple[cute.Tensor, cute.Tensor],
    candidates: tuple[cute.Tensor, cute.Tensor],
    room: cutlass.Constexpr,
) -> Int32:
    """Of `count` vectors, write the scores that reach the threshold, and then -inf (WARP,), and their experts (WARP,).

    Returns how many reach it, of the lane's token. Of a token that has not the room none are written.
    """
    lane = cute.arch.lane_idx()
    vectors, numbers = gathered
    values, experts = candidates
    own = cute.make_rmem_tensor((VECTOR,), Float32)
    cute.autovec_copy(vectors[None, lane], own)
    first = numbers[lane] * VECTOR
    slots, found = slots_of([(room.slot < count) & (own[v] >= threshold) for v in range(VECTOR)], room.mask)
    for v in cutlass.range_constexpr(VECTOR):
        if (room.slot < count) & (own[v] >= threshold) & (found <= room.slots):
            values[room.start + slots[v]] = own[v]
            experts[room.start + slots[v]] = first + v
    if room.slot >= found:
        values[lane] = Float32(-math.inf)
    cute.arch.sync_warp()
    return found


@cute.jit
def rank_candidates(
    found: Int32, top_k: cutlass.Constexpr, candidates: tuple[cute.Tensor, cute.Tensor], room: cutlass.Constexpr
) -> tuple[Float32, Int32, Int32]:
    """A lane's candidate, its expert, and how many of the `found` candidates come before it; undefined past the last one."""
    lane = cute.arch.lane_idx()
    values, experts = candidates
    value, expert = values[lane], experts[lane]
    expected = cutlass.const_expr(min(room.slots, -(-3 * top_k // (2 * VECTOR)) * VECTOR))  # seldom are there more
    others, last = first_slots(values, room, expected), cutlass.min(found, room.slots)
    ahead = is_above(others[0], value)
    for i in cutlass.range_constexpr(1, expected):
        ahead += is_above(others[i], value)
    for i in cutlass.range(expected, last, unroll=1):
        ahead += is_above(values[room.start + i], value)

    place = Int32(ahead)
    taken = Uint32(cutlass.select_(room.slot < found, Uint32(1) << Uint32(room.start + place), Uint32(0)))
    places = Uint32(cute.arch.warp_redux_sync(taken, "or")) & room.mask
    if Int32(cute.arch.popc(places)) != found:  # equal scores: the lowest id first; read again, to spare registers
        others, numbers = first_slots(values, room, expected), first_slots(experts, room, expected)
        for i in cutlass.range_constexpr(expected):
            place += Int32((others[i] == value) & (numbers[i] < expert))
        for i in cutlass.range(expected, last, unroll=1):
            place += Int32((values[room.start + i] == value) & (experts[room.start + i] < expert))
    return value, expert, place


def first_slots(slots: cute.Tensor, room: Room, count: int) -> cute.Tensor:
    """What the first `count` slots (WARP,) of the lane's token hold."""
    held = cute.make_rmem_tensor((count,), slots.element_type)
    start = slots.iterator + cute.assume(room.start, divby=VECTOR)
    cute.autovec_copy(cute.make_tensor(start, cute.make_layout((count,))), held)
    return held


def is_above(a: Float32, b: Float32) -> Float32:
    """1 where a > b, else 0: one instruction, and the sum of such numbers needs no integer unit, which is the busy one."""
    return cute.arch.inline_ptx(
        "set.gt.f32.f32 {$w0}, {$r0}, {$r1};", write_only_types=[Float32], read_only_args=[a, b]
    )


@cute.jit
def choose_in_rounds(scores: cute.Tensor, top_k: cutlass.Constexpr, room: cutlass.Constexpr) -> tuple[Float32, Int32]:
    """The choice of the lane's slot and its expert, for whatever scores (VECTOR, vectors) of a token without a NaN.

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
        value = select(room.slot == choice, bitcast(bits_of(last), Float32), value)
        expert = Int32(cutlass.select_(room.slot == choice, last_expert, expert))
    return value, expert
