"""Gate in CuTe DSL: scores to top-k ids and weights for any fused routing rule, in one launch.

Strategy: a team of neighbouring lanes a token. Each lane holds neighbouring experts' scores, loaded with wide accesses,
as 32-bit keys of the same order, and sorts them in registers; then k rounds find the team's largest key (by shuffles, or
`redux.sync` where the team is the warp), and only the lane that owned it moves up, to its next key in shared memory. At
the end each lane of the warp completes one choice: it finds the expert's id by its key, and the weights and stores of all
teams are one step. A lane's own sort is cheaper than rounds over more lanes, up to about 16 keys.
Compulsory bytes: T * E * itemsize + 8 * T * k; floor at T=16384, E=128, k=8, fp32: 9.4 MB, 2.2 us at 4.25 TB/s. It is
bound by instructions: about 130 a token, four tokens a warp.

Invariant: lanes and slots are ordered by expert id, so the lowest lane with the largest score, and in it the lowest slot
with it, is the lowest id. A token with a NaN among its scores gets ids -1 and NaN weights: it is reported, and nothing
downstream is out of bounds.
"""

import functools
import math
from collections.abc import Callable
from typing import Any

import cutlass
import cutlass.cute as cute
import torch
from cutlass import Boolean, Float32, Int32, Int64, Uint32, Uint64

from moe_routing_bench import cute_cache
from moe_routing_bench import cute_support as support
from moe_routing_bench.benches.gate.rules import WARP, Rule, rule_of, supports

__all__ = ["compile_for", "precompile", "prepare", "supports"]

THREADS = 128
ENOUGH_WARPS = 132 * 8  # fewer leave a large GPU partly idle
SIGN = 0x80000000


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

    span = cutlass.const_expr(1 << (top_k - 1).bit_length())  # lanes that complete a token, one a choice
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


@cute.kernel
def gate_kernel(
    logits: cute.Tensor,
    bias: cute.Tensor,
    ids: cute.Tensor,
    weights: cute.Tensor,
    rule: cutlass.Constexpr,
    team: cutlass.Constexpr,
    each: cutlass.Constexpr,
):
    """A warp: `each` tokens for each of its teams."""
    warp = cute.arch.block_idx()[0] * (THREADS // WARP) + cute.arch.thread_idx()[0] // WARP
    gate_warp(logits, bias, ids, weights, warp * (WARP // team * each), rule, team, each)


@cute.jit
def gate_host(
    logits: cute.Tensor,
    bias: cute.Tensor,
    ids: cute.Tensor,
    weights: cute.Tensor,
    rule: cutlass.Constexpr,
    team: cutlass.Constexpr,
    each: cutlass.Constexpr,
    stream: Any,
):
    blocks = cute.ceil_div(logits.shape[0], THREADS // team * each)
    gate_kernel(logits, bias, ids, weights, rule, team, each).launch(
        grid=(blocks, 1, 1), block=(THREADS, 1, 1), stream=stream
    )


@cute_cache.cached
def compile_for(
    arch: str, dtype: str, experts: int, top_k: int, rule: Rule, team: int, each: int, keep: bool = False
) -> Any:
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
        team,
        each,
    ]
    return support.compile_kernel(gate_host, arguments, arch, keep)


def choose(tokens: int, experts: int, top_k: int, rule: Rule) -> tuple[int, int]:
    """(lanes of a team, tokens of a team), after measurements on an H200 (docs/kernels.md).

    Up to 128 experts a few lanes share a token, and a warp works on several at once; with more, sorting that many keys a
    lane costs more than it saves. Few tokens are spread over more lanes, so that the GPU is not idle.
    """
    if experts > 128:
        slots = -(-experts // WARP)
        return WARP, 2 if slots <= 16 and tokens >= 4 * ENOUGH_WARPS else 1
    team = max(rule.groups, min(8, 1 << (max(9, experts) // 8 - 1).bit_length()))
    while experts > 4 * team and team < WARP and tokens * team < ENOUGH_WARPS * WARP:
        team *= 2
    return team, 1


def _compiled(cell: Any, arch: str) -> Any:
    rule = rule_of(cell)
    return compile_for(
        arch, cell.dtype, cell.experts, cell.top_k, rule, *choose(cell.tokens, cell.experts, cell.top_k, rule)
    )


def precompile(cell: Any, arch: str) -> None:
    """Put the kernel of a cell into the cache; needs no GPU."""
    _compiled(cell, arch)


def prepare(cell: Any, inputs: dict[str, torch.Tensor], outputs: dict[str, torch.Tensor]) -> Callable[[], None]:
    """Bind the gate: logits (T, E), bias (E,) for rules that have one -> topk_ids (T, k), topk_weights (T, k)."""
    logits = inputs["logits"]
    bias = inputs["bias"] if "bias" in inputs else logits.new_zeros(cell.experts, dtype=torch.float32)
    kernel = _compiled(cell, support.current_arch())
    return functools.partial(kernel, logits, bias, outputs["topk_ids"], outputs["topk_weights"])
