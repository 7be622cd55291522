"""The exact variant of the CuTe gate: any rule, scores of any format, k up to 32.

Neighbouring threads share a token. Each holds neighbouring experts' scores, loaded with wide accesses, as 32-bit keys of the
same order, and sorts them in registers. Then k rounds find the token's largest key (by shuffles, or `redux.sync` where the
token has the whole warp), and only the thread that held it advances, to its next key in shared memory. At the end each
thread of the warp completes one choice: it finds the expert's id by its key, and the weights and stores of all tokens are
one step. Sorting within a thread is cheaper than rounds over more threads, up to about 16 keys.

Invariant: of equal scores the lowest id wins. Threads and their slots are ordered by expert id, so the first thread with the
largest score, and in it the first slot with it, has the lowest id. A token with a NaN among its scores gets ids -1 and NaN
weights: it is reported, and nothing downstream is out of bounds.
"""

import math
from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Int64, Uint32, Uint64

from moe_routing_kernels.cute import VECTOR_BYTES, WARP, power_of_2
from moe_routing_kernels.gate.cute_primitives import (
    below,
    bitcast,
    bits_of,
    fmin,
    key_of,
    mass,
    max_of_token,
    row_index,
    row_stride,
    score,
    sort,
    value_of,
    warp_tensor,
)
from moe_routing_kernels.routers.formulas import GUARD, MOST_SCORE


@dataclass(frozen=True)
class WarpShape:
    """How a warp works on tokens, fixed when the kernel is compiled. An expert group is one of the rule's groups."""

    experts: int
    top_k: int
    groups: int  # expert groups
    threads_per_token: int
    tokens_per_thread: int  # one after the other

    @property
    def members(self) -> int:
        """Experts of an expert group."""
        return self.experts // self.groups

    @property
    def group_threads(self) -> int:
        """Threads that share an expert group of a token."""
        return self.threads_per_token // self.groups

    @property
    def slots(self) -> int:
        """Experts of a thread."""
        return -(-self.members // self.group_threads)

    @property
    def depth(self) -> int:
        """The most choices that a thread's experts can be."""
        return min(self.slots, self.top_k)

    @property
    def at_once(self) -> int:
        """Tokens that the warp works on at the same time."""
        return WARP // self.threads_per_token

    @property
    def tokens(self) -> int:
        """Tokens of the warp."""
        return self.at_once * self.tokens_per_thread


@cute.jit
def exact_warp(
    logits: cute.Tensor,
    bias: cute.Tensor,
    ids: cute.Tensor,
    weights: cute.Tensor,
    first_token: Int32,
    rule: cutlass.Constexpr,
    threads_per_token: cutlass.Constexpr,
    tokens_per_thread: cutlass.Constexpr,
    wide: cutlass.Constexpr = False,
):
    """A warp of a block of THREADS: its tokens from `first_token` on, then all their choices. `wide`: offsets need 64 bits."""
    shape = cutlass.const_expr(
        WarpShape(logits.shape[1], ids.shape[1], rule.groups, threads_per_token, tokens_per_thread)
    )
    lane = cute.arch.lane_idx()
    lower_lanes = Uint32(cute.arch.lanemask_lt())
    same_token = Uint32((1 << threads_per_token) - 1) << (lane // threads_per_token * threads_per_token)
    # per thread: the keys from the second on, largest first, then empty ones; the keys by slot, from which the expert's id follows
    ranked = warp_tensor(Uint32, (shape.depth, (WARP, row_stride(shape.depth)), tokens_per_thread))
    by_slot = warp_tensor(Uint32, (shape.slots, (WARP, row_stride(shape.slots)), tokens_per_thread))
    winners = warp_tensor(Uint64, (shape.top_k, shape.tokens))  # key << 32 | lane
    totals = warp_tensor(Float32, (shape.tokens,))  # of softmax_all; -1 marks a token with a NaN among its scores
    group_start = lane % threads_per_token // shape.group_threads * shape.members  # first expert of the expert group
    first = lane % threads_per_token % shape.group_threads * shape.slots  # the thread's first expert in its group

    # load
    raw = load_logits(logits, first_token, lane, group_start, first, shape)
    # sort
    current = cute.make_rmem_tensor((tokens_per_thread,), Uint32)  # the largest key that has not won yet
    next_rank = cute.make_rmem_tensor((tokens_per_thread,), Int32)  # where in `ranked` the key after it is
    next_rank.fill(0)
    for i in cutlass.range_constexpr(tokens_per_thread):
        keys, total, has_nan = keys_of_thread(raw, bias, by_slot, i, lane, group_start, first, same_token, rule, shape)
        if lane % threads_per_token == 0:
            total = Float32(cutlass.select_(has_nan, Float32(-1.0), total))
            totals[i * shape.at_once + lane // threads_per_token] = total
        if cutlass.const_expr(rule.groups > 1):
            limit_groups(keys, lane, rule, shape)
        current[i] = keys[0]
        later = cute.make_rmem_tensor((shape.depth,), Uint32)
        later.fill(0)
        for v in cutlass.range_constexpr(1, shape.depth):
            later[v - 1] = keys[v]
        cute.autovec_copy(later, ranked[None, lane, i])

    # rounds
    run_rounds(current, next_rank, ranked, winners, lane, lower_lanes, same_token, shape)
    cute.arch.sync_warp()

    # weights
    choice_threads = cutlass.const_expr(power_of_2(shape.top_k))  # threads that complete a token: one per choice
    for done in cutlass.range_constexpr(0, shape.tokens, WARP // choice_threads):
        complete(logits, ids, weights, winners, totals, by_slot, first_token, done, choice_threads, rule, shape, wide)


@cute.jit
def load_logits(
    logits: cute.Tensor,
    first_token: Int32,
    lane: Int32,
    group_start: Int32,
    first: Int32,
    shape: cutlass.Constexpr,
) -> cute.Tensor:
    """A thread's logits (slots, tokens per thread), loaded with wide accesses; undefined where there is no expert or token."""
    slots, members = cutlass.const_expr(shape.slots), cutlass.const_expr(shape.members)
    width = cutlass.const_expr(math.gcd(slots, members, VECTOR_BYTES * 8 // logits.element_type.width))
    atom = cute.make_copy_atom(
        cute.nvgpu.CopyG2ROp(), logits.element_type, num_bits_per_copy=width * logits.element_type.width
    )
    raw = cute.make_rmem_tensor((slots, shape.tokens_per_thread), logits.element_type)
    for i in cutlass.range_constexpr(shape.tokens_per_thread):
        token = first_token + i * shape.at_once + lane // shape.threads_per_token
        for v in cutlass.range_constexpr(0, slots, width):
            if first + v < members and token < logits.shape[0]:
                start = cute.assume(Int64(token) * shape.experts + Int64(group_start + first + v), divby=width)
                source = cute.make_tensor(logits.iterator + start, cute.make_layout((width,)))
                target = cute.make_tensor(raw.iterator + (i * slots + v), cute.make_layout((width,)))
                cute.copy(atom, source, target)
    return raw


@cute.jit
def keys_of_thread(
    raw: cute.Tensor,
    bias: cute.Tensor,
    by_slot: cute.Tensor,
    i: cutlass.Constexpr,
    lane: Int32,
    group_start: Int32,
    first: Int32,
    same_token: Uint32,
    rule: cutlass.Constexpr,
    shape: cutlass.Constexpr,
):
    """The keys of a thread's logits of its i-th token, raw (slots, tokens per thread), largest first.

    Also returns the sum of the token's softmax over all experts, and whether the token has a NaN; writes the keys in order of
    experts to `by_slot`.
    """
    slots, members = cutlass.const_expr(shape.slots), cutlass.const_expr(shape.members)
    values = cute.make_rmem_tensor((slots,), Float32)  # logits; -inf where there is no expert
    chosen_by = cute.make_rmem_tensor((slots,), Float32)
    for v in cutlass.range_constexpr(slots):
        values[v] = Float32(-math.inf)
        chosen_by[v] = Float32(-math.inf)
        if first + v < members:
            values[v] = raw[v, i].to(Float32)
            chosen_by[v] = score(rule.select, values[v]) + 0.0  # -0.0 and 0.0 are one score
            if cutlass.const_expr(rule.biased):
                chosen_by[v] = chosen_by[v] + bias[group_start + first + v]
    bits = cute.recast_tensor(chosen_by, Uint32)
    keys = cute.make_rmem_tensor((slots,), Uint32)
    nan = Boolean(False)
    for v in cutlass.range_constexpr(slots):
        keys[v] = Uint32(cutlass.select_(first + v < members, key_of(bits[v]), Uint32(0)))
        nan = nan or (chosen_by[v] != chosen_by[v])
    has_nan = (Uint32(cute.arch.vote_ballot_sync(nan)) & same_token) != 0
    cute.autovec_copy(keys, by_slot[None, lane, i])
    sort(keys)

    total = Float32(0.0)
    if cutlass.const_expr(rule.weigh == "softmax_all"):
        highest = bitcast(bits_of(max_of_token(keys[0], shape.threads_per_token)), Float32)
        for v in cutlass.range_constexpr(slots):
            total += cute.math.exp(values[v] - highest)
        total = cute.arch.warp_reduction_sum(total, threads_in_group=shape.threads_per_token)
        total = mass(total, values, highest, shape.experts, shape.threads_per_token)
    return keys, total, has_nan


@cute.jit
def limit_groups(keys: cute.Tensor, lane: Int32, rule: cutlass.Constexpr, shape: cutlass.Constexpr):
    """Replace the sorted keys of all but the best expert groups by empty ones."""
    threads, group_threads = cutlass.const_expr(shape.threads_per_token), cutlass.const_expr(shape.group_threads)
    best = value_of(keys[0])
    if cutlass.const_expr(rule.group_best == 1):
        for step in cutlass.range_constexpr(int(math.log2(group_threads))):
            best = cute.arch.fmax(best, cute.arch.shuffle_sync_bfly(best, 1 << step))
    else:
        second = value_of(keys[1]) if cutlass.const_expr(cute.size(keys) > 1) else Float32(-math.inf)
        for step in cutlass.range_constexpr(int(math.log2(group_threads))):
            other_best = cute.arch.shuffle_sync_bfly(best, 1 << step)
            other_second = cute.arch.shuffle_sync_bfly(second, 1 << step)
            second = cute.arch.fmax(cute.arch.fmin(best, other_best), cute.arch.fmax(second, other_second))
            best = cute.arch.fmax(best, other_best)
        best = best + second
    better = Int32(0)
    for group in cutlass.range_constexpr(rule.groups):
        other = cute.arch.shuffle_sync(best, lane // threads * threads + group * group_threads)
        wins = (other > best) or (other == best and lane % threads // group_threads > group)
        better += Int32(cutlass.select_(wins, Int32(1), Int32(0)))
    for v in cutlass.range_constexpr(cute.size(keys)):
        keys[v] = Uint32(cutlass.select_(better < rule.keep_groups, keys[v], Uint32(0)))


@cute.jit
def run_rounds(
    current: cute.Tensor,
    next_rank: cute.Tensor,
    ranked: cute.Tensor,
    winners: cute.Tensor,
    lane: Int32,
    lower_lanes: Uint32,
    same_token: Uint32,
    shape: cutlass.Constexpr,
):
    """Find the top_k largest keys of each token, largest first, among its threads' keys -> winners (top_k, tokens).

    Rounds of different tokens alternate: a round is a chain of dependent steps, and rounds of different tokens are independent.
    """
    for j in cutlass.range_constexpr(shape.top_k):
        for i in cutlass.range_constexpr(shape.tokens_per_thread):
            best = max_of_token(current[i], shape.threads_per_token)
            owners = Uint32(cute.arch.vote_ballot_sync(current[i] == best)) & same_token
            if current[i] == best and (owners & lower_lanes) == 0:
                winner = (Uint64(current[i]) << 32) | Uint64(Uint32(lane))
                winners[j, i * shape.at_once + lane // shape.threads_per_token] = winner
                if cutlass.const_expr(j + 1 < shape.top_k):
                    current[i] = Uint32(ranked[next_rank[i], lane, i])
                    next_rank[i] += 1


@cute.jit
def complete(
    logits: cute.Tensor,
    ids: cute.Tensor,
    weights: cute.Tensor,
    winners: cute.Tensor,
    totals: cute.Tensor,
    by_slot: cute.Tensor,
    first_token: Int32,
    done: cutlass.Constexpr,
    choice_threads: cutlass.Constexpr,
    rule: cutlass.Constexpr,
    shape: cutlass.Constexpr,
    wide: cutlass.Constexpr,
):
    """Write ids and weights of the warp's tokens from the `done`-th on: one choice per thread, `choice_threads` threads per token."""
    threads, group_threads = cutlass.const_expr(shape.threads_per_token), cutlass.const_expr(shape.group_threads)
    lane = cute.arch.lane_idx()
    lower_lanes = Uint32(cute.arch.lanemask_lt())
    index, choice = done + lane // choice_threads, lane % choice_threads
    valid = index < shape.tokens and choice < shape.top_k
    winner, previous, highest, total = Uint64(0), Uint64(1), Float32(0.0), Float32(0.0)
    if valid:
        winner = Uint64(winners[choice, index])
        highest = bitcast(bits_of(Uint32(Uint64(winners[0, index]) >> 32)), Float32)
        total = totals[index]
        if choice > 0:
            previous = Uint64(winners[choice - 1, index])
    has_nan = total < 0.0
    key, owner = Uint32(winner >> 32), Int32(Uint32(winner & Uint64(0xFFFFFFFF)))
    # Equal keys of one thread are neighbours among the winners: the n-th of them is the n-th slot with this key.
    repeats = ~Uint32(cute.arch.vote_ballot_sync(winner == previous)) & (lower_lanes | (lower_lanes + 1))
    nth = lane - Int32(31 - cute.arch.clz(repeats))
    slot = Int32(0)
    for v in cutlass.range_constexpr(shape.slots):
        hit = Boolean(False)
        if valid:
            hit = Uint32(by_slot[v, owner, index // shape.at_once]) == key
        slot = Int32(cutlass.select_(hit and nth == 0, Int32(v), slot))
        nth -= Int32(cutlass.select_(hit, Int32(1), Int32(0)))
    expert = owner % threads // group_threads * shape.members + owner % threads % group_threads * shape.slots + slot
    token = first_token + index
    valid = valid and token < logits.shape[0]

    # weights
    weight = bitcast(bits_of(key), Float32)
    if cutlass.const_expr(rule.weigh.startswith("softmax")):
        weight = cute.math.exp(below(weight, highest))
    elif cutlass.const_expr(rule.biased):  # the bias chooses, it does not weigh
        weight = Float32(0.0)
        if valid:
            weight = score(rule.weigh, logits[row_index(token, wide), expert].to(Float32))
    elif cutlass.const_expr(rule.select == "logit"):
        weight = score(rule.weigh, weight)
    if cutlass.const_expr(rule.renormalize and rule.weigh == "sqrtsoftplus"):  # no other score exceeds 1
        weight = fmin(weight, Float32(MOST_SCORE))
    if cutlass.const_expr(rule.renormalize or rule.weigh == "softmax_chosen"):
        total = Float32(cutlass.select_(valid, weight, Float32(0.0)))
        total = cute.arch.warp_reduction_sum(total, threads_in_group=choice_threads)
    if cutlass.const_expr(rule.renormalize):
        total = total + GUARD
    if cutlass.const_expr(rule.renormalize or rule.weigh.startswith("softmax")):
        weight = weight / total
    weight = weight * rule.scale
    # store
    if valid:
        ids[row_index(token, wide), choice] = Int32(cutlass.select_(has_nan, Int32(-1), expert))
        weights[row_index(token, wide), choice] = Float32(cutlass.select_(has_nan, Float32(math.nan), weight))
