"""The packed variant of the CuTe gate: rules that select by raw float32 logits (no bias, no groups), k up to 16.

One to eight threads share a token, and an expert's id is in the lowest bits of its score, so that sorting networks of float
maxima and minima in registers find scores and ids at once, two instructions per comparison. With many experts, groups of four
neighbours are chosen first by their best, then the k experts among the k best groups. Rows come through shared memory, so
that threads can look up any group and the exact scores of the winners. The bits that ids displace make neighbouring scores
look equal, so exact scores are checked: winners that are out of order are put in order, and a token whose k-th score is not
above the bound of all other scores, or with an infinite or NaN score, is left to the whole warp in the exact variant.
"""

import functools
import math
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Int64, Uint32

from moe_routing_kernels.cute import WARP, power_of_2
from moe_routing_kernels.gate import FusedRule
from moe_routing_kernels.gate.cute_exact import exact_warp
from moe_routing_kernels.gate.cute_primitives import (
    bitcast,
    ceiling,
    fmax,
    largest,
    largest_of_token,
    row_index,
    score,
    select,
    tagged,
)
from moe_routing_kernels.gate.cute_staging import VECTOR, stage_rows


def pick(options: list[list[Any]], index: Int32) -> list[Any]:
    """The list at an index."""
    picked = options[0]
    for n, option in enumerate(options[1:], start=1):
        picked = [select(index == n, new, old) for new, old in zip(option, picked, strict=True)]
    return picked


def load_group(row: cute.Tensor, group: Int32) -> list[Float32]:
    """The VECTOR neighbouring scores of a group of experts."""
    fragment = cute.make_rmem_tensor((VECTOR,), Float32)
    start = cute.assume(Int32(group) * VECTOR, divby=VECTOR)
    cute.autovec_copy(cute.make_tensor(row.iterator + start, cute.make_layout((VECTOR,))), fragment)
    return [fragment[v] for v in range(VECTOR)]


def choose_experts(
    row: cute.Tensor, member: Int32, top_k: int, threads: int, ones: Uint32
) -> tuple[list[Any], list[Float32], Float32]:
    """The best keys of a token's scores `row` (E,), by the `member`-th of its threads.

    Returns the keys of at least top_k choices, largest first; an upper bound of the other experts' scores, if there are others;
    and NaN if one of the scores that were read is NaN or infinite, else 0.

    A key is a score with the expert's inverted id in its lowest bits. Where there are enough, groups of VECTOR experts
    are chosen first, by their best: the winners are among the experts of as many groups. `ones` has all bits set, which is
    hidden from the compiler: with two constants it would make two instructions of `tagged`.
    """
    experts = cute.size(row)
    groups, keep = experts // VECTOR, power_of_2(top_k)
    group_mask = power_of_2(groups) - 1
    expert_mask = group_mask * VECTOR + VECTOR - 1
    kept_of_group, kept = [ones & Uint32(~mask & 0xFFFFFFFF) for mask in (group_mask, expert_mask)]
    bounds, keys = [], []
    if groups >= 2 * keep:  # groups first
        best, bounds, non_finite = choose_groups(row, member, keep, threads, kept_of_group, ones)
        for key in best:
            code = bitcast(key, Uint32) & Uint32(group_mask)
            group = Int32(code ^ Uint32(group_mask))
            if groups <= group_mask:  # a NaN has any bits
                group = cutlass.min(group, groups - 1)
            for v, value in enumerate(load_group(row, group)):
                non_finite = value * 0.0 + non_finite
                keys.append(tagged(value, kept, code * VECTOR + (VECTOR - 1 - v)))
        best, others = largest(keys, keep)
    else:
        non_finite = Float32(0.0)
        for n in range(groups // threads):
            for v, value in enumerate(load_group(row, n * threads + member)):
                non_finite = value * 0.0 + non_finite
                code = ~(n * threads * VECTOR + v) & expert_mask & ~((threads - 1) * VECTOR)
                keys.append(tagged(value, kept, code))
        best, others = largest(keys, keep)
        if threads > 1:
            code, real = (threads - 1 - member) * VECTOR, len(keys)
            best = [tagged(key, ones, code) for key in best[:real]] + best[real:]
    # merge the threads' lists
    best, others = largest_of_token(best, others, keep, threads)
    bounds += [ceiling(key, expert_mask) for key in best[top_k : top_k + 1] or others]
    return best, [functools.reduce(fmax, bounds)] if bounds else [], non_finite


def choose_groups(
    row: cute.Tensor, member: Int32, keep: int, threads: int, kept: Uint32, ones: Uint32
) -> tuple[list[Any], list[Float32], Float32]:
    """The `keep` groups of VECTOR experts with the largest best scores.

    Returns the keys of this thread's share of them, with inverted group numbers; an upper bound of the scores of other groups;
    and NaN if one of the scores is NaN or infinite, else 0. A thread looks at every `threads`-th group.
    """
    groups = cute.size(row) // VECTOR
    mask, share = power_of_2(groups) - 1, groups // threads
    keys, non_finite = [], Float32(0.0)
    for n in range(share):
        a, b, c, d = load_group(row, n * threads + member)
        best = fmax(fmax(a, b, nan=True), fmax(c, d, nan=True), nan=True)
        non_finite = best * 0.0 + non_finite
        keys.append(tagged(best, kept, ~(n * threads) & mask & -threads))
    best, others = largest(keys, keep, threads == 1)
    best = [tagged(key, ones, threads - 1 - member) for key in best[:share]] + best[share:] if threads > 1 else best
    best, others = largest_of_token(best, others, keep, threads, unordered=True)
    bounds, part, half = [ceiling(others[0], mask)], keep // threads, max(1, threads // 2)
    member_keys = pick([best[n * part : (n + 1) * part] for n in range(half)], member % half)
    return member_keys, bounds, non_finite


def expert_of(key: Float32, experts: int) -> Int32:
    """The expert whose id is in a key; any where the key is a NaN."""
    mask = power_of_2(experts // VECTOR) * VECTOR - 1
    expert = Int32((bitcast(key, Uint32) & Uint32(mask)) ^ Uint32(mask))
    return cutlass.min(expert, experts - 1) if experts <= mask else expert


def rank(value: Float32, expert: Int32, values: list[Float32], experts: list[Int32]) -> Int32:
    """How many of a token's choices come before the choice (value, expert)."""
    place = Int32(0)
    for other, other_expert in zip(values, experts, strict=True):
        place += Int32((other > value) | ((other == value) & (other_expert < expert)))
    return place


def complete(
    row: cute.Tensor,
    keys: list[Any],
    bounds: list[Float32],
    member: Int32,
    rule: FusedRule,
    top_k: int,
    threads: int,
    chosen: cute.Tensor,
    scores: cute.Tensor,
    weights: cute.Tensor,
) -> tuple[Any, Any]:
    """Write a thread's share of a token's choices: ids, scores and weights, (choices,) each.

    Returns whether the exact scores fall strictly from each of these choices to the next, and whether each is above all
    `bounds`.
    """
    experts, choices = cute.size(row), cute.size(chosen)
    padded = [*keys, keys[-1]]
    member_keys = pick([padded[n * choices : (n + 1) * choices + 1] for n in range(threads)], member)
    selected = [expert_of(key, experts) for key in member_keys]
    exact = [row[expert] for expert in selected]
    highest = exact[0] if threads == 1 else row[expert_of(keys[0], experts)]
    in_order, above_bound, total, shares = Boolean(True), Boolean(True), Float32(0.0), []
    for n in range(choices):
        choice = member * choices + n
        in_order = in_order & ((exact[n] > exact[n + 1]) | (choice >= top_k - 1))
        for bound in bounds:
            above_bound = above_bound & ((exact[n] > bound) | (choice >= top_k))
        if rule.weigh.startswith("softmax"):
            share = cute.math.exp2((exact[n] - highest) * math.log2(math.e), fastmath=True)
        else:
            share = score(rule.weigh, exact[n])
        shares.append(share)
        total += select(choice < top_k, share, Float32(0.0))
        chosen[n], scores[n] = selected[n], exact[n]
    if rule.weigh == "softmax_all":
        total = Float32(0.0)
        for n in range(experts // VECTOR // threads):
            for value in load_group(row, n * threads + member):
                total += cute.math.exp2((value - highest) * math.log2(math.e), fastmath=True)
    factor = Float32(rule.scale)
    if rule.renormalize or rule.weigh.startswith("softmax"):
        factor = cute.arch.rcp_approx(cute.arch.warp_reduction_sum(total, threads_in_group=threads)) * rule.scale
    for n in range(choices):
        weights[n] = shares[n] * factor
    return in_order, above_bound


@cute.jit
def packed_warp(
    logits: cute.Tensor,
    bias: cute.Tensor,
    ids: cute.Tensor,
    weights: cute.Tensor,
    first_token: Int32,
    rule: cutlass.Constexpr,
    threads: cutlass.Constexpr,
    staged: cutlass.Constexpr,
    wide: cutlass.Constexpr,
):
    """A warp of a block of THREADS: its tokens from `first_token` on, with `threads` threads per token.

    Scores are copied to shared memory first where `staged`, and read from global memory otherwise.
    """
    experts, top_k = cutlass.const_expr(logits.shape[1]), cutlass.const_expr(ids.shape[1])
    choices = cutlass.const_expr(power_of_2(top_k) // threads)  # that a thread completes
    lane = cute.arch.lane_idx()
    member = lane % threads
    token = first_token + lane // threads
    final = logits.shape[0] - 1

    # load
    if cutlass.const_expr(staged):
        row = stage_rows(logits, first_token, lane, threads)[None, lane // threads]
    else:
        start = cute.assume(Int64(cutlass.min(token, final)) * experts, divby=VECTOR)
        row = cute.make_tensor(logits.iterator + start, cute.make_layout((experts,)))

    # select
    ones = ~Uint32(logits.shape[0] >> 31)
    keys, bounds, non_finite = choose_experts(row, member, top_k, threads, ones)
    chosen = cute.make_rmem_tensor((choices,), Int32)
    scores = cute.make_rmem_tensor((choices,), Float32)
    shares = cute.make_rmem_tensor((choices,), Float32)
    in_order, above_bound = complete(row, keys, bounds, member, rule, top_k, threads, chosen, scores, shares)
    # verify
    same_token = Uint32((1 << threads) - 1) << (lane // threads * threads)
    unsorted = Uint32(cute.arch.vote_ballot_sync(in_order ^ Boolean(True)))
    uncertain = Uint32(
        cute.arch.vote_ballot_sync(((above_bound ^ Boolean(True)) | (non_finite != non_finite)) & (token <= final))
    )
    # store
    valid = (uncertain & same_token) == 0 and token <= final
    write_choices(ids, weights, row, keys, chosen, scores, shares, token, member, valid, unsorted & same_token, wide)
    # uncertain tokens, by the exact variant
    if uncertain != 0:
        cute.arch.sync_warp()
        for n in range(WARP // threads):
            if ((uncertain >> Uint32(n * threads)) & Uint32((1 << threads) - 1)) != 0:
                exact_warp(logits, bias, ids, weights, first_token + n, rule, WARP, 1, wide)
                cute.arch.sync_warp()


@cute.jit
def write_choices(
    ids: cute.Tensor,
    weights: cute.Tensor,
    row: cute.Tensor,
    keys: list[Any],
    chosen: cute.Tensor,
    scores: cute.Tensor,
    shares: cute.Tensor,
    token: Int32,
    member: Int32,
    valid: Boolean,
    unsorted: Uint32,
    wide: cutlass.Constexpr,
):
    """Write a thread's ids `chosen` and weights `shares` of a `valid` token, at the ranks of their scores.

    Choices are in order already where `unsorted`, a mask of the token's threads, is 0.
    """
    experts, top_k, choices = cutlass.const_expr(cute.size(row)), cutlass.const_expr(ids.shape[1]), cute.size(chosen)
    together = cutlass.const_expr(math.gcd(choices, top_k, VECTOR))  # choices in an access
    for v in cutlass.range_constexpr(0, choices, together):
        if valid and unsorted == 0 and member * choices + v < top_k:
            start = cute.assume(Int64(token) * top_k + Int64(member * choices + v), divby=together)
            layout = cute.make_layout((together,))
            cute.autovec_copy(
                cute.make_tensor(chosen.iterator + v, layout), cute.make_tensor(ids.iterator + start, layout)
            )
            cute.autovec_copy(
                cute.make_tensor(shares.iterator + v, layout), cute.make_tensor(weights.iterator + start, layout)
            )
    if valid and unsorted != 0:
        selected = [expert_of(key, experts) for key in keys[:top_k]]
        exact = [row[expert] for expert in selected]
        for v in cutlass.range_constexpr(choices):
            if member * choices + v < top_k:
                place = rank(scores[v], chosen[v], exact, selected)
                ids[row_index(token, wide), place] = chosen[v]
                weights[row_index(token, wide), place] = shares[v]
