"""Gate in CuTe DSL: scores to top-k ids and weights for any fused routing rule, in one launch.

Two forms. The packed one is for float32 logits that choose by themselves, k up to 8: one to eight lanes a token, and an
expert's id in the lowest bits of its score, so that sorting networks of float maxima and minima in registers find scores
and ids at once, two instructions a comparison. With many experts, groups of four neighbours are chosen first by their
best, then the k experts among the k best groups. Rows come through shared memory, so that lanes can look up any group and
the exact scores of the winners. The bits that ids displace make neighbouring scores look equal, so exact scores are
checked: winners that are out of order are put in order, and a token whose k-th score is not above all that others may
have, or with an infinity or a NaN in sight, is left to the whole warp in the other form.

The exact form, for all else: a team of neighbouring lanes a token. Each lane holds neighbouring experts' scores, loaded
with wide accesses, as 32-bit keys of the same order, and sorts them in registers; then k rounds find the team's largest key
(by shuffles, or `redux.sync` where the team is the warp), and only the lane that owned it moves up, to its next key in
shared memory. At the end each lane of the warp completes one choice: it finds the expert's id by its key, and the weights
and stores of all teams are one step. A lane's own sort is cheaper than rounds over more lanes, up to about 16 keys.

Compulsory bytes: T * E * itemsize + 8 * T * k; floor at T=16384, E=128, k=8, fp32: 9.4 MB, 2.2 us at 4.25 TB/s. Bound by
instructions: about 43 a token there, three quarters of them at half the issue rate; 156 in the exact form.

Invariant: of equal scores the lowest id wins. In the exact form lanes and slots are ordered by expert id, so the lowest
lane with the largest score, and in it the lowest slot with it, is the lowest id. A token with a NaN among its scores gets ids
-1 and NaN weights: it is reported, and nothing downstream is out of bounds.
"""

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
import torch
from cutlass import Boolean, Float32, Int32, Int64, Uint32, Uint64

from moe_routing_bench import cute_cache
from moe_routing_bench import cute_support as support
from moe_routing_bench.benches.gate.rules import WARP, Rule, rule_of, supports

__all__ = ["Form", "choose", "compile_for", "forms", "precompile", "prepare", "supports"]

THREADS = 128
ENOUGH_WARPS = 132 * 8  # fewer leave a large GPU partly idle
SIGN = 0x80000000
# Of packed forms:
VECTOR = 4  # scores of a wide access, experts of a group
MOST_CHOICES = 8  # networks grow faster than rounds
FEW_GROUPS, MOST_GROUPS = 16, 32  # of a lane: as many are worth having, and can be had
BUSY_WARPS = 132 * 4 - 16  # about one for each scheduler of a large GPU
MANY_TOKENS = 32768  # so many that stores of more than 16 bytes a lane wait for each other
DIRECT = 16  # experts up to which a row is read straight from global memory

fmax, fmin = cute.arch.fmax, cute.arch.fmin


@dataclass(frozen=True)
class Form:
    """How the tokens of a warp are worked on, fixed when the kernel is compiled."""

    team: int  # lanes of a token
    each: int = 1  # tokens of a team, one after the other
    packed: bool = False  # expert ids in the low bits of the scores


def comparators(n: int) -> list[tuple[int, int]]:
    """Batcher's odd-even merge sort of n values as pairs (i < j) to compare (Knuth, TAOCP 5.2.2, algorithm M)."""
    pairs, p = [], 1 << max(0, (n - 1).bit_length() - 1)
    top = p
    while p:
        q, r, d = top, 0, p
        while d:
            pairs += [(i, i + d) for i in range(n - d) if i & p == r]
            d, q, r = q - p, q // 2, p
        p //= 2
    return pairs


def score(kind: str, logit: Float32) -> Float32:
    """The score of a logit, in float32."""
    if kind == "sigmoid":
        return cute.arch.rcp_approx(1.0 + cute.math.exp(-logit))  # 1 ulp, without the branches of a division
    if kind == "sqrtsoftplus":
        soft = cutlass.select_(logit > 20.0, logit, cute.math.log1p(cute.math.exp(logit)))
        return cute.math.sqrt(Float32(soft))
    return logit


def ordered(bits: Uint32) -> Uint32:
    """Float bits as an unsigned integer of the same order; every float, -inf included, is above 0."""
    return bits ^ (Uint32(Int32(bits) >> 31) | Uint32(SIGN))


def unordered(key: Uint32) -> Uint32:
    """The float bits of an ordered key."""
    return key ^ Uint32(cutlass.select_(key >= SIGN, Uint32(SIGN), Uint32(0xFFFFFFFF)))


def bitcast(value: Any, dtype: Any) -> Any:
    """The same 32 bits as another type."""
    held = cute.make_rmem_tensor((1,), type(value))
    held[0] = value
    return cute.recast_tensor(held, dtype)[0]


def value_of(key: Uint32) -> Float32:
    """The score of a key, -inf for the empty one."""
    return Float32(cutlass.select_(key == 0, Float32(-math.inf), bitcast(unordered(key), Float32)))


@cute.jit
def limit_groups(keys: cute.Tensor, lane: Int32, rule: cutlass.Constexpr, team: cutlass.Constexpr):
    """Empty the keys of all but the best groups. A group is `team // rule.groups` neighbouring lanes; keys are sorted."""
    lanes = cutlass.const_expr(team // rule.groups)
    best = value_of(keys[0])
    if cutlass.const_expr(rule.group_best == 1):
        for step in cutlass.range_constexpr(int(math.log2(lanes))):
            best = cute.arch.fmax(best, cute.arch.shuffle_sync_bfly(best, 1 << step))
    else:
        second = value_of(keys[1]) if cutlass.const_expr(cute.size(keys) > 1) else Float32(-math.inf)
        for step in cutlass.range_constexpr(int(math.log2(lanes))):
            other = cute.arch.shuffle_sync_bfly(best, 1 << step)
            runner = cute.arch.shuffle_sync_bfly(second, 1 << step)
            second = cute.arch.fmax(cute.arch.fmin(best, other), cute.arch.fmax(second, runner))
            best = cute.arch.fmax(best, other)
        best = best + second
    better = Int32(0)
    for group in cutlass.range_constexpr(rule.groups):
        other = cute.arch.shuffle_sync(best, lane // team * team + group * lanes)
        wins = (other > best) or (other == best and lane % team // lanes > group)
        better += Int32(cutlass.select_(wins, Int32(1), Int32(0)))
    for v in cutlass.range_constexpr(cute.size(keys)):
        keys[v] = Uint32(cutlass.select_(better < rule.keep_groups, keys[v], Uint32(0)))


@cute.jit
def sort(keys: cute.Tensor):
    """Sort a lane's keys, largest first."""
    for i, j in comparators(cute.size(keys)):
        keys[i], keys[j] = cutlass.max(keys[i], keys[j]), cutlass.min(keys[i], keys[j])


def padded(length: int) -> int:
    """Distance in words of two lanes' rows in shared memory, so that wide accesses of neighbouring lanes do not collide."""
    return length + 4 if length % 8 == 0 else length


def shared(dtype: Any, shape: tuple[Any, ...]) -> cute.Tensor:
    """This warp's part of a tensor in shared memory. The second extent may be a pair (extent, stride)."""
    strides, size = [], 1
    for extent in shape:
        count, stride = extent if isinstance(extent, tuple) else (extent, size)
        strides.append(stride)
        size = count * stride
    layout = cute.make_layout(tuple(e[0] if isinstance(e, tuple) else e for e in shape), stride=tuple(strides))
    size += -size % 4
    whole = cutlass.memory.SmemAllocator().allocate_tensor(
        dtype, cute.make_layout((THREADS // WARP) * size), byte_alignment=16
    )
    start = cute.assume(cute.arch.thread_idx()[0] // WARP * size, divby=4)
    return cute.make_tensor(whole.iterator + start, layout)


@cute.jit
def team_max(key: Uint32, team: cutlass.Constexpr) -> Uint32:
    """The largest key of a team of lanes."""
    if cutlass.const_expr(team == WARP):
        return cute.arch.warp_redux_sync(key, "umax")
    for step in cutlass.range_constexpr(int(math.log2(team))):
        key = cutlass.max(key, cute.arch.shuffle_sync_bfly(key, 1 << step))
    return key


@cute.jit
def gate_warp(
    logits: cute.Tensor,
    bias: cute.Tensor,
    ids: cute.Tensor,
    weights: cute.Tensor,
    first_token: Int32,
    rule: cutlass.Constexpr,
    team: cutlass.Constexpr,
    each: cutlass.Constexpr,
):
    """A warp of a block of THREADS: the tokens from `first_token` on. A team of lanes: `each` of them; then the warp
    completes the choices of all its teams."""
    experts, top_k = cutlass.const_expr(logits.shape[1]), cutlass.const_expr(ids.shape[1])
    members, lanes = cutlass.const_expr(experts // rule.groups), cutlass.const_expr(team // rule.groups)
    slots = cutlass.const_expr(-(-members // lanes))
    depth = cutlass.const_expr(min(slots, top_k))  # a lane wins at most so often
    tokens = cutlass.const_expr(WARP // team * each)  # of a warp
    width = cutlass.const_expr(math.gcd(slots, members, support.VECTOR_BYTES * 8 // logits.element_type.width))
    atom = cute.make_copy_atom(
        cute.nvgpu.CopyG2ROp(), logits.element_type, num_bits_per_copy=width * logits.element_type.width
    )
    lane = cute.arch.lane_idx()
    below = Uint32(cute.arch.lanemask_lt())
    teammates = Uint32((1 << team) - 1) << (lane // team * team)
    # Of each lane: its keys from the second on, largest first and then nothing; its keys by slot, to find an expert by.
    ranked = shared(Uint32, (depth, (WARP, padded(depth)), each))
    by_slot = shared(Uint32, (slots, (WARP, padded(slots)), each))
    winners = shared(Uint64, (top_k, tokens))  # key << 32 | lane
    masses = shared(Float32, (tokens,))  # NaN marks a token with a NaN among its scores
    place = lane % team // lanes * members  # first expert of the lane's group
    first = lane % team % lanes * slots  # the lane's first expert in its group

    raw = cute.make_rmem_tensor((slots, each), logits.element_type)
    for i in cutlass.range_constexpr(each):
        token = first_token + i * (WARP // team) + lane // team
        for v in cutlass.range_constexpr(0, slots, width):
            if first + v < members and token < logits.shape[0]:
                start = cute.assume(Int64(token) * experts + Int64(place + first + v), divby=width)
                source = cute.make_tensor(logits.iterator + start, cute.make_layout((width,)))
                target = cute.make_tensor(raw.iterator + (i * slots + v), cute.make_layout((width,)))
                cute.copy(atom, source, target)

    own = cute.make_rmem_tensor((each,), Uint32)  # the lane's largest key that has not won yet
    cursor = cute.make_rmem_tensor((each,), Int32)  # where in `ranked` the next one is
    cursor.fill(0)
    for i in cutlass.range_constexpr(each):
        values = cute.make_rmem_tensor((slots,), Float32)  # logits; -inf where there is no expert
        chosen_by = cute.make_rmem_tensor((slots,), Float32)
        for v in cutlass.range_constexpr(slots):
            values[v] = Float32(-math.inf)
            chosen_by[v] = Float32(-math.inf)
            if first + v < members:
                values[v] = raw[v, i].to(Float32)
                chosen_by[v] = score(rule.select, values[v]) + 0.0  # -0.0 and 0.0 are one score
                if cutlass.const_expr(rule.biased):
                    chosen_by[v] = chosen_by[v] + bias[place + first + v]
        bits = cute.recast_tensor(chosen_by, Uint32)
        keys = cute.make_rmem_tensor((slots,), Uint32)
        nan = Boolean(False)
        for v in cutlass.range_constexpr(slots):
            keys[v] = Uint32(cutlass.select_(first + v < members, ordered(bits[v]), Uint32(0)))
            nan = nan or (chosen_by[v] != chosen_by[v])
        broken = (Uint32(cute.arch.vote_ballot_sync(nan)) & teammates) != 0
        cute.autovec_copy(keys, by_slot[None, lane, i])
        sort(keys)

        mass = Float32(0.0)  # of a softmax over all experts
        if cutlass.const_expr(rule.weigh == "softmax_all"):
            highest = bitcast(unordered(team_max(keys[0], team)), Float32)
            for v in cutlass.range_constexpr(slots):
                mass += cute.math.exp(values[v] - highest)
            mass = cute.arch.warp_reduction_sum(mass, threads_in_group=team)
        if lane % team == 0:
            masses[i * (WARP // team) + lane // team] = Float32(cutlass.select_(broken, Float32(math.nan), mass))
        if cutlass.const_expr(rule.groups > 1):
            limit_groups(keys, lane, rule, team)

        own[i] = keys[0]
        later = cute.make_rmem_tensor((depth,), Uint32)
        later.fill(0)
        for v in cutlass.range_constexpr(1, depth):
            later[v - 1] = keys[v]
        cute.autovec_copy(later, ranked[None, lane, i])

    # Rounds of different tokens alternate: each is a chain of dependent steps, and neither waits for the other.
    for j in cutlass.range_constexpr(top_k):
        for i in cutlass.range_constexpr(each):
            best = team_max(own[i], team)
            owners = Uint32(cute.arch.vote_ballot_sync(own[i] == best)) & teammates
            if own[i] == best and (owners & below) == 0:
                winners[j, i * (WARP // team) + lane // team] = (Uint64(own[i]) << 32) | Uint64(Uint32(lane))
                if cutlass.const_expr(j + 1 < top_k):
                    own[i] = Uint32(ranked[cursor[i], lane, i])
                    cursor[i] += 1
    cute.arch.sync_warp()

    span = cutlass.const_expr(support.power_of_2(top_k))  # lanes that complete a token, one a choice
    for done in cutlass.range_constexpr(0, tokens, WARP // span):
        mine, choice = done + lane // span, lane % span
        live = mine < tokens and choice < top_k
        winner, previous, highest, total = Uint64(0), Uint64(1), Float32(0.0), Float32(0.0)
        if live:
            winner = Uint64(winners[choice, mine])
            highest = bitcast(unordered(Uint32(Uint64(winners[0, mine]) >> 32)), Float32)
            total = masses[mine]
            if choice > 0:
                previous = Uint64(winners[choice - 1, mine])
        broken = total != total
        key, owner = Uint32(winner >> 32), Int32(Uint32(winner & Uint64(0xFFFFFFFF)))
        # Equal keys of one lane are neighbours among the winners: the n-th of them is the n-th slot with this key.
        repeats = ~Uint32(cute.arch.vote_ballot_sync(winner == previous)) & (below | (below + 1))
        nth = lane - Int32(31 - cute.arch.clz(repeats))
        slot = Int32(0)
        for v in cutlass.range_constexpr(slots):
            hit = Boolean(False)
            if live:
                hit = Uint32(by_slot[v, owner, mine // (WARP // team)]) == key
            slot = Int32(cutlass.select_(hit and nth == 0, Int32(v), slot))
            nth -= Int32(cutlass.select_(hit, Int32(1), Int32(0)))
        expert = owner % team // lanes * members + owner % team % lanes * slots + slot
        token = first_token + mine
        live = live and token < logits.shape[0]

        weight = bitcast(unordered(key), Float32)
        if cutlass.const_expr(rule.weigh.startswith("softmax")):
            weight = cute.math.exp(weight - highest)
        elif cutlass.const_expr(rule.biased):  # the bias chooses, it does not weigh
            weight = Float32(0.0)
            if live:
                weight = score(rule.weigh, logits[token, expert].to(Float32))
        elif cutlass.const_expr(rule.select == "logit"):
            weight = score(rule.weigh, weight)
        if cutlass.const_expr(rule.renormalize or rule.weigh == "softmax_chosen"):
            total = Float32(cutlass.select_(live, weight, Float32(0.0)))
            total = cute.arch.warp_reduction_sum(total, threads_in_group=span)
        if cutlass.const_expr(rule.renormalize or rule.weigh.startswith("softmax")):
            weight = weight / total
        weight = weight * rule.scale
        if live:
            ids[token, choice] = Int32(cutlass.select_(broken, Int32(-1), expert))
            weights[token, choice] = Float32(cutlass.select_(broken, Float32(math.nan), weight))


def tagged(value: Float32, kept: Uint32, code: Any) -> Float32:
    """A score with `code` in place of the bits that are not kept."""
    return bitcast((bitcast(value, Uint32) & kept) | Uint32(code), Float32)


def ceiling(key: Float32, mask: int) -> Float32:
    """The largest score that may have become `key` by `tagged`."""
    bits = bitcast(key, Uint32)
    full, empty = bitcast(bits | Uint32(mask), Float32), bitcast(bits & Uint32(~mask & 0xFFFFFFFF), Float32)
    return fmax(full, empty)  # of -inf one is a NaN, which fmax ignores


def bitonic(values: list[Any]) -> list[Any]:
    """A bitonic list of 2**n scores, largest first."""
    values, step = list(values), len(values) // 2
    while step:
        for i in range(len(values)):
            if not i & step:
                a, b = values[i], values[i + step]
                values[i], values[i + step] = fmax(a, b), fmin(a, b)
        step //= 2
    return values


def merged(a: list[Any], b: list[Any], most: int, last: bool = False) -> tuple[list[Any], list[Any]]:
    """The `most` largest of two lists of 2**n scores, both largest first, and the largest of the others, if there are.

    If `last` they need no order; with a and b exchanged it is reversed.
    """
    if len(a) < most:
        return bitonic([*a, *reversed(b)]), []
    pairs = list(zip(a, reversed(b), strict=True))
    best = [fmax(*pair) for pair in pairs]
    return best if last else bitonic(best), [functools.reduce(fmax, [fmin(*pair) for pair in pairs])]


def largest(values: list[Any], most: int, last: bool = False) -> tuple[list[Any], list[Any]]:
    """The `most` = 2**n largest of some scores, largest first, with -inf where there are fewer; the largest of the others.

    If `last` they need no order. With fewer than `most` / 2 scores the list is shorter, but still a power of two.
    """
    size = min(most, support.power_of_2(len(values)))
    values = values + [Float32(-math.inf)] * (-len(values) % size)
    lists, others = [], []
    for start in range(0, len(values), size):
        part = values[start : start + size]
        for i, j in comparators(size):
            part[i], part[j] = fmax(part[i], part[j]), fmin(part[i], part[j])
        lists.append(part)
    while len(lists) > 1:
        final = last and len(lists) == 2
        results = [merged(a, b, most, final) for a, b in zip(lists[::2], lists[1::2], strict=False)]
        others += [score for _, lost in results for score in lost]
        lists = [best for best, _ in results] + lists[2 * len(results) :]
    return lists[0], [functools.reduce(fmax, others)] if others else []


def of_team(
    best: list[Any], others: list[Any], most: int, team: int, last: bool = False
) -> tuple[list[Any], list[Any]]:
    """`largest` of a team's scores from that of each of its lanes. If `last`, both halves of a team have it in opposite order."""
    step = 1
    while step < team:
        theirs = [cute.arch.shuffle_sync_bfly(score, step) for score in best]
        others = others + [cute.arch.shuffle_sync_bfly(score, step) for score in others]
        best, lost = merged(best, theirs, most, last and 2 * step == team)
        others = [functools.reduce(fmax, others + lost)] if others + lost else []
        step *= 2
    return best, others


def select(condition: Any, yes: Float32, no: Float32) -> Float32:
    """One of two scores."""
    return Float32(cutlass.select_(condition, yes, no))


def pick(options: list[list[Any]], index: Int32) -> list[Any]:
    """The list of an index."""
    found = options[0]
    for n, option in enumerate(options[1:], start=1):
        found = [select(index == n, new, old) for new, old in zip(option, found, strict=True)]
    return found


def vector(row: cute.Tensor, group: Int32) -> list[Float32]:
    """The VECTOR neighbouring scores of a group of experts."""
    held = cute.make_rmem_tensor((VECTOR,), Float32)
    start = cute.assume(Int32(group) * VECTOR, divby=VECTOR)
    cute.autovec_copy(cute.make_tensor(row.iterator + start, cute.make_layout((VECTOR,))), held)
    return [held[v] for v in range(VECTOR)]


def packed_choice(
    row: cute.Tensor, member: Int32, top_k: int, team: int, ones: Uint32
) -> tuple[list[Any], list[Float32], Float32]:
    """Of a token's scores (E,), as one of its team: the keys of at least top_k choices, largest first; what no other
    expert's score exceeds, if there are others; NaN where one of the scores that were looked at is NaN or infinite.

    A key is a score with the expert's inverted id in its lowest bits. Where there are enough, groups of VECTOR experts
    are chosen first, by their best: the winners are among the experts of as many groups. `ones` has all bits set, but the
    compiler does not know: it would make two instructions of `tagged` with two constants.
    """
    experts = cute.size(row)
    groups, keep = experts // VECTOR, support.power_of_2(top_k)
    of_group, of_expert = support.power_of_2(groups) - 1, support.power_of_2(groups) * VECTOR - 1
    strange, bounds, keys = Float32(0.0), [], []
    above_group, above_expert = ones & Uint32(~of_group & 0xFFFFFFFF), ones & Uint32(~of_expert & 0xFFFFFFFF)
    held = groups // team  # by a lane: every team-th
    if groups >= 2 * keep:
        for n in range(held):
            a, b, c, d = vector(row, n * team + member)
            best = fmax(fmax(a, b, nan=True), fmax(c, d, nan=True), nan=True)
            strange = best * 0.0 + strange
            keys.append(tagged(best, above_group, ~(n * team) & of_group & -team))
        best, others = largest(keys, keep, team == 1)
        best = [tagged(key, ones, team - 1 - member) for key in best[:held]] + best[held:] if team > 1 else best
        best, others = of_team(best, others, keep, team, last=True)
        bounds = [ceiling(others[0], of_group)]
        each, keys = keep // team, []
        half = max(1, team // 2)
        for key in pick([best[n * each : (n + 1) * each] for n in range(half)], member % half):
            code = bitcast(key, Uint32) & Uint32(of_group)
            group = Int32(code ^ Uint32(of_group))
            if groups <= of_group:  # a NaN has any bits
                group = cutlass.min(group, groups - 1)
            for v, value in enumerate(vector(row, group)):
                strange = value * 0.0 + strange
                keys.append(tagged(value, above_expert, code * VECTOR + (VECTOR - 1 - v)))
        best, others = largest(keys, keep)
    else:
        for n in range(held):
            for v, value in enumerate(vector(row, n * team + member)):
                strange = value * 0.0 + strange
                keys.append(tagged(value, above_expert, ~(n * team * VECTOR + v) & of_expert & ~((team - 1) * VECTOR)))
        best, others = largest(keys, keep)
        if team > 1:
            real = len(keys)
            best = [tagged(key, ones, (team - 1 - member) * VECTOR) for key in best[:real]] + best[real:]
    best, others = of_team(best, others, keep, team)
    bounds += [ceiling(key, of_expert) for key in best[top_k : top_k + 1] or others]
    return best, [functools.reduce(fmax, bounds)] if bounds else [], strange


def expert_of(key: Float32, experts: int) -> Int32:
    """The expert whose id is in a key; any where the key is a NaN."""
    mask = support.power_of_2(experts // VECTOR) * VECTOR - 1
    found = Int32((bitcast(key, Uint32) & Uint32(mask)) ^ Uint32(mask))
    return cutlass.min(found, experts - 1) if experts <= mask else found


def rank(value: Float32, expert: Int32, values: list[Float32], experts: list[Int32]) -> Int32:
    """How many of some choices come before one of them."""
    place = Int32(0)
    for other, its in zip(values, experts, strict=True):
        place += Int32((other > value) | ((other == value) & (its < expert)))
    return place


def complete(
    row: cute.Tensor,
    keys: list[Any],
    bounds: list[Float32],
    member: Int32,
    rule: Rule,
    top_k: int,
    team: int,
    chosen: cute.Tensor,
    values: cute.Tensor,
    shares: cute.Tensor,
) -> tuple[Any, Any]:
    """Write a lane's part of a token's choices: ids, scores and weights, (choices,) each.

    False where a score does not fall from one of these choices to the next, and where one is not above all `bounds`.
    """
    experts, each = cute.size(row), cute.size(chosen)
    padded = [*keys, keys[-1]]
    mine = pick([padded[n * each : (n + 1) * each + 1] for n in range(team)], member)
    found = [expert_of(key, experts) for key in mine]
    scores = [row[expert] for expert in found]
    highest = scores[0] if team == 1 else row[expert_of(keys[0], experts)]
    falls, sure, total, parts = Boolean(True), Boolean(True), Float32(0.0), []
    for n in range(each):
        choice = member * each + n
        falls = falls & ((scores[n] > scores[n + 1]) | (choice >= top_k - 1))
        for bound in bounds:
            sure = sure & ((scores[n] > bound) | (choice >= top_k))
        if rule.weigh.startswith("softmax"):
            part = cute.math.exp2((scores[n] - highest) * math.log2(math.e), fastmath=True)
        else:
            part = score(rule.weigh, scores[n])
        parts.append(part)
        total += select(choice < top_k, part, Float32(0.0))
        chosen[n], values[n] = found[n], scores[n]
    if rule.weigh == "softmax_all":
        total = Float32(0.0)
        for n in range(experts // VECTOR // team):
            for value in vector(row, n * team + member):
                total += cute.math.exp2((value - highest) * math.log2(math.e), fastmath=True)
    factor = Float32(rule.scale)
    if rule.renormalize or rule.weigh.startswith("softmax"):
        factor = cute.arch.rcp_approx(cute.arch.warp_reduction_sum(total, threads_in_group=team)) * rule.scale
    for n in range(each):
        shares[n] = parts[n] * factor
    return falls, sure


def copy_row(source: Any, target: Any, count: int, apart: int) -> None:
    """Start to copy `count` vectors that are `apart`."""
    atom = cute.make_copy_atom(
        cute.nvgpu.cpasync.CopyG2SOp(cache_mode=cute.nvgpu.cpasync.LoadCacheMode.GLOBAL), Float32, num_bits_per_copy=128
    )
    layout = cute.make_layout((VECTOR,))
    for c in range(count):
        at = c * apart * VECTOR
        cute.copy(atom, cute.make_tensor(source + at, layout), cute.make_tensor(target + at, layout))


@cute.jit
def packed_warp(
    logits: cute.Tensor,
    bias: cute.Tensor,
    ids: cute.Tensor,
    weights: cute.Tensor,
    first_token: Int32,
    rule: cutlass.Constexpr,
    team: cutlass.Constexpr,
):
    """A warp of a block of THREADS: the WARP // team tokens from `first_token` on."""
    experts, top_k = cutlass.const_expr(logits.shape[1]), cutlass.const_expr(ids.shape[1])
    groups = cutlass.const_expr(experts // VECTOR)
    each = cutlass.const_expr(support.power_of_2(top_k) // team)  # choices that a lane completes
    lane = cute.arch.lane_idx()
    member = lane % team
    token = first_token + lane // team
    final = logits.shape[0] - 1

    if cutlass.const_expr(experts > DIRECT):
        # Rows are as far apart as lets the lanes of a team, and teams, read neighbouring banks.
        stride = cutlass.const_expr((groups + (team - groups) % 8) * VECTOR)
        rows = shared(Float32, (experts, (WARP // team, stride)))
        width = cutlass.const_expr(math.gcd(groups, WARP))  # lanes that copy a row
        start = Int64(first_token + lane // width) * experts + Int64(lane % width * VECTOR)
        source = logits.iterator + cute.assume(start, divby=VECTOR)
        target = rows.iterator + cute.assume(lane // width * stride + lane % width * VECTOR, divby=VECTOR)
        if first_token + (WARP // team - 1) <= final:
            for r in cutlass.range_constexpr(0, WARP // team, WARP // width):
                copy_row(source + r * experts, target + r * stride, groups // width, width)
        else:
            for r in cutlass.range(0, WARP // team, WARP // width, unroll=1):
                if first_token + lane // width + r <= final:
                    from_row = cute.assume(Int32(r) * experts, divby=VECTOR)
                    to_row = cute.assume(Int32(r) * stride, divby=VECTOR)
                    copy_row(source + from_row, target + to_row, groups // width, width)
        cute.arch.cp_async_commit_group()
        cute.arch.cp_async_wait_group(0)
        cute.arch.sync_warp()
        row = rows[None, lane // team]
    else:
        start = cute.assume(Int64(cutlass.min(token, final)) * experts, divby=VECTOR)
        row = cute.make_tensor(logits.iterator + start, cute.make_layout((experts,)))

    ones = ~Uint32(logits.shape[0] >> 31)
    keys, bounds, strange = packed_choice(row, member, top_k, team, ones)
    chosen = cute.make_rmem_tensor((each,), Int32)
    values = cute.make_rmem_tensor((each,), Float32)
    shares = cute.make_rmem_tensor((each,), Float32)
    falls, sure = complete(row, keys, bounds, member, rule, top_k, team, chosen, values, shares)
    mine = Uint32((1 << team) - 1) << (lane // team * team)
    tangled = Uint32(cute.arch.vote_ballot_sync(falls ^ Boolean(True)))
    doubtful = Uint32(cute.arch.vote_ballot_sync(((sure ^ Boolean(True)) | (strange != strange)) & (token <= final)))
    live = (doubtful & mine) == 0 and token <= final
    together = cutlass.const_expr(math.gcd(each, top_k, VECTOR))  # choices in an access
    for v in cutlass.range_constexpr(0, each, together):
        if live and (tangled & mine) == 0 and member * each + v < top_k:
            start = cute.assume(Int64(token) * top_k + Int64(member * each + v), divby=together)
            layout = cute.make_layout((together,))
            cute.autovec_copy(
                cute.make_tensor(chosen.iterator + v, layout), cute.make_tensor(ids.iterator + start, layout)
            )
            cute.autovec_copy(
                cute.make_tensor(shares.iterator + v, layout), cute.make_tensor(weights.iterator + start, layout)
            )
    if live and (tangled & mine) != 0:
        every = [expert_of(key, experts) for key in keys[:top_k]]
        exact = [row[expert] for expert in every]
        for v in cutlass.range_constexpr(each):
            if member * each + v < top_k:
                place = rank(values[v], chosen[v], exact, every)
                ids[token, place] = chosen[v]
                weights[token, place] = shares[v]
    if doubtful != 0:
        for n in range(WARP // team):
            if ((doubtful >> Uint32(n * team)) & Uint32((1 << team) - 1)) != 0:
                gate_warp(logits, bias, ids, weights, first_token + n, rule, WARP, 1)
                cute.arch.sync_warp()


@cute.kernel
def gate_kernel(
    logits: cute.Tensor,
    bias: cute.Tensor,
    ids: cute.Tensor,
    weights: cute.Tensor,
    rule: cutlass.Constexpr,
    form: cutlass.Constexpr,
):
    """A warp: `form.each` tokens for each of its teams."""
    warp = cute.arch.block_idx()[0] * (THREADS // WARP) + cute.arch.thread_idx()[0] // WARP
    first_token = warp * (WARP // form.team * form.each)
    if cutlass.const_expr(form.packed):
        packed_warp(logits, bias, ids, weights, first_token, rule, form.team)
    else:
        gate_warp(logits, bias, ids, weights, first_token, rule, form.team, form.each)


@cute.jit
def gate_host(
    logits: cute.Tensor,
    bias: cute.Tensor,
    ids: cute.Tensor,
    weights: cute.Tensor,
    rule: cutlass.Constexpr,
    form: cutlass.Constexpr,
    stream: Any,
):
    gate_kernel(logits, bias, ids, weights, rule, form).launch(
        grid=(cute.ceil_div(logits.shape[0], THREADS // form.team * form.each), 1, 1),
        block=(THREADS, 1, 1),
        stream=stream,
    )


@cute_cache.cached
def compile_for(arch: str, dtype: str, experts: int, top_k: int, rule: Rule, form: Form, keep: bool = False) -> Any:
    """Compile the gate for one architecture and shape class (no GPU needed).

    The result is called with logits (T, E), bias (E,) float32 (any float32 vector of E where the rule has none), ids (T, k)
    int32, weights (T, k) float32.
    """
    tokens = cute.sym_int()
    arguments = [
        support.matrix(support.DTYPES[dtype], tokens, experts),
        support.matrix(Float32, experts),
        support.matrix(Int32, tokens, top_k),
        support.matrix(Float32, tokens, top_k),
        rule,
        form,
    ]
    return support.compile_kernel(gate_host, arguments, arch, keep)


def forms(dtype: str, experts: int, top_k: int, rule: Rule) -> list[Form]:
    """The packed forms that can run a shape, of rising teams."""
    groups = experts // VECTOR
    plain = rule.select == "logit" and not rule.biased and rule.groups == 1
    whole = experts % (VECTOR if experts <= DIRECT else 2 * VECTOR) == 0  # else copies would halve sectors of 32 bytes
    if dtype != "fp32" or not plain or not whole or top_k > MOST_CHOICES:
        return []
    teams = [1 << n for n in range(4) if groups % (1 << n) == 0 and 1 << n <= support.power_of_2(top_k)]
    return [Form(team, packed=True) for team in teams if groups <= team * MOST_GROUPS]


def choose(dtype: str, tokens: int, experts: int, top_k: int, rule: Rule) -> Form:
    """The form of a shape, after measurements on an H200 (docs/kernels.md).

    Packed, few lanes a token are few instructions, as long as there are warps enough and a lane does not hold too much.
    Exact, up to 128 experts a few lanes share a token, and a warp works on several at once; with more, sorting that many
    keys a lane costs more than it saves. Few tokens are spread over more lanes, so that the GPU is not idle.
    """
    packed = forms(dtype, experts, top_k, rule)
    if packed and not _idle(packed[-1], tokens, experts):
        # One lane a token loads and stores too much with more experts, or with many choices of many tokens.
        alone = experts <= DIRECT and (top_k <= VECTOR or tokens < MANY_TOKENS)
        light = [form for form in packed if experts <= form.team * VECTOR * FEW_GROUPS and (alone or form.team > 1)]
        return next((form for form in light if tokens * form.team >= BUSY_WARPS * WARP), packed[-1])
    if experts > 128:
        slots = -(-experts // WARP)
        return Form(WARP, 2 if slots <= 16 and tokens >= 4 * ENOUGH_WARPS else 1)
    team = max(rule.groups, min(8, support.power_of_2(max(9, experts) // 8)))
    while experts > 4 * team and team < WARP and tokens * team < ENOUGH_WARPS * WARP:
        team *= 2
    return Form(team)


def _idle(widest: Form, tokens: int, experts: int) -> bool:
    """Whether few lanes would each go through many experts, with most of the GPU idle."""
    many = experts > widest.team * VECTOR * FEW_GROUPS // 2
    return many and widest.team < MOST_CHOICES and 2 * tokens * widest.team < BUSY_WARPS * WARP


def _compiled(cell: Any, arch: str) -> Any:
    rule = rule_of(cell)
    form = choose(cell.dtype, cell.tokens, cell.experts, cell.top_k, rule)
    return compile_for(arch, cell.dtype, cell.experts, cell.top_k, rule, form)


def precompile(cell: Any, arch: str) -> None:
    """Put the kernel of a cell into the cache; needs no GPU."""
    _compiled(cell, arch)


def prepare(cell: Any, inputs: dict[str, torch.Tensor], outputs: dict[str, torch.Tensor]) -> Callable[[], None]:
    """Bind the gate: logits (T, E), bias (E,) for rules that have one -> topk_ids (T, k), topk_weights (T, k)."""
    logits = inputs["logits"]
    bias = inputs["bias"] if "bias" in inputs else logits.new_zeros(cell.experts, dtype=torch.float32)
    kernel = _compiled(cell, support.current_arch())
    return functools.partial(kernel, logits, bias, outputs["topk_ids"], outputs["topk_weights"])
