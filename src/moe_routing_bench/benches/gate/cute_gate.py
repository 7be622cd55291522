"""Gate in CuTe DSL: scores to top-k ids and weights for any fused routing rule, in one launch.

Strategy: a warp a token. Each lane holds E / 32 neighbouring scores, loaded with wide accesses, as 64-bit keys: the
order-preserving bits of the float above the complement of the expert's id, so that one comparison settles ties in favour
of the lowest id. A lane sorts its keys once in registers; then k rounds of `redux.sync` find the warp's largest key and
only the lane that owned it moves up. Lane j keeps the j-th winner, so weights and stores are one step for all of them.
Compulsory bytes: T * E * itemsize + 8 * T * k; floor at T=16384, E=128, k=8, fp32: 9.4 MB, 2.2 us at 4.25 TB/s.
Predicted: about 200 instructions a token, 31 tokens a scheduler, so 3.5 us of issue and 1 to 2 us of start.

Invariant: lanes and slots are ordered by expert id, so the lowest lane with the largest score holds the lowest id. A
token with a NaN among its scores gets ids -1 and NaN weights: it is reported, and nothing downstream is out of bounds.
"""

import functools
import math
from collections.abc import Callable
from typing import Any

import cutlass
import cutlass.cute as cute
import torch
from cutlass import Float32, Int32, Int64, Uint32, Uint64

from moe_routing_bench import cute_cache
from moe_routing_bench import cute_support as support
from moe_routing_bench.benches.gate.rules import WARP, Rule, rule_of, supports

__all__ = ["compile_for", "precompile", "prepare", "supports"]

THREADS = 128
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
        return 1.0 / (1.0 + cute.math.exp(-logit))
    if kind == "sqrtsoftplus":
        soft = cutlass.select_(logit > 20.0, logit, cute.math.log1p(cute.math.exp(logit)))
        return cute.math.sqrt(Float32(soft))
    return logit


def ordered(bits: Uint32) -> Uint32:
    """Float bits as an unsigned integer of the same order; every float, -inf included, is above 0."""
    return bits ^ Uint32(cutlass.select_(bits >= SIGN, Uint32(0xFFFFFFFF), Uint32(SIGN)))


def unordered(key: Uint32) -> Uint32:
    """The float bits of an ordered key."""
    return key ^ Uint32(cutlass.select_(key >= SIGN, Uint32(SIGN), Uint32(0xFFFFFFFF)))


def bitcast(value: Any, dtype: Any) -> Any:
    """The same 32 bits as another type."""
    held = cute.make_rmem_tensor((1,), type(value))
    held[0] = value
    return cute.recast_tensor(held, dtype)[0]


@cute.jit
def limit_groups(keys: cute.Tensor, lane: Int32, rule: cutlass.Constexpr):
    """Empty the keys of all but the best groups. A group is `WARP // rule.groups` neighbouring lanes."""
    lanes = cutlass.const_expr(WARP // rule.groups)
    best = bitcast(unordered(Uint32(keys[0] >> 32)), Float32)
    if cutlass.const_expr(rule.group_best == 1):
        for step in cutlass.range_constexpr(int(math.log2(lanes))):
            best = cute.arch.fmax(best, cute.arch.shuffle_sync_bfly(best, 1 << step))
    else:
        second = Float32(-math.inf)
        if cutlass.const_expr(cute.size(keys) > 1):
            if Uint32(keys[1] >> 32) > 0:
                second = bitcast(unordered(Uint32(keys[1] >> 32)), Float32)
        if keys[0] == 0:
            best = Float32(-math.inf)
        for step in cutlass.range_constexpr(int(math.log2(lanes))):
            other = cute.arch.shuffle_sync_bfly(best, 1 << step)
            runner = cute.arch.shuffle_sync_bfly(second, 1 << step)
            second = cute.arch.fmax(cute.arch.fmin(best, other), cute.arch.fmax(second, runner))
            best = cute.arch.fmax(best, other)
        best = best + second
    better = Int32(0)
    for group in cutlass.range_constexpr(rule.groups):
        other = cute.arch.shuffle_sync(best, group * lanes)
        wins = (other > best) or (other == best and lane // lanes > group)
        better += Int32(cutlass.select_(wins, Int32(1), Int32(0)))
    for v in cutlass.range_constexpr(cute.size(keys)):
        keys[v] = Uint64(cutlass.select_(better < rule.keep_groups, keys[v], Uint64(0)))


@cute.jit
def sort(keys: cute.Tensor):
    """Sort a lane's keys, largest first."""
    for pair in cutlass.range_constexpr(len(comparators(cute.size(keys)))):
        i, j = cutlass.const_expr(comparators(cute.size(keys))[pair])
        a, b = keys[i], keys[j]
        keys[i] = Uint64(cutlass.select_(a < b, b, a))
        keys[j] = Uint64(cutlass.select_(a < b, a, b))


@cute.kernel
def gate_kernel(
    logits: cute.Tensor,
    bias: cute.Tensor,
    ids: cute.Tensor,
    weights: cute.Tensor,
    rule: cutlass.Constexpr,
):
    """One warp: one token."""
    experts, top_k = cutlass.const_expr(logits.shape[1]), cutlass.const_expr(ids.shape[1])
    members, lanes = cutlass.const_expr(experts // rule.groups), cutlass.const_expr(WARP // rule.groups)
    slots = cutlass.const_expr(-(-members // lanes))
    width = cutlass.const_expr(math.gcd(slots, members, support.VECTOR_BYTES * 8 // logits.element_type.width))

    lane = cute.arch.lane_idx()
    token = cute.arch.block_idx()[0] * (THREADS // WARP) + cute.arch.thread_idx()[0] // WARP
    group, first = lane // lanes, lane % lanes * slots  # the group's number, the lane's first expert in it
    if token < logits.shape[0]:
        row = Int64(token) * experts
        raw = cute.make_rmem_tensor((slots,), logits.element_type)
        atom = cute.make_copy_atom(
            cute.nvgpu.CopyG2ROp(), logits.element_type, num_bits_per_copy=width * logits.element_type.width
        )
        for v in cutlass.range_constexpr(0, slots, width):
            if first + v < members:
                start = cute.assume(row + Int64(group * members + first + v), divby=width)
                source = cute.make_tensor(logits.iterator + start, cute.make_layout((width,)))
                cute.copy(atom, source, cute.make_tensor(raw.iterator + v, cute.make_layout((width,))))

        values = cute.make_rmem_tensor((slots,), Float32)  # logits; -inf where there is no expert
        chosen_by = cute.make_rmem_tensor((slots,), Float32)
        for v in cutlass.range_constexpr(slots):
            values[v] = Float32(-math.inf)
            chosen_by[v] = Float32(-math.inf)
            if first + v < members:
                values[v] = raw[v].to(Float32)
                chosen_by[v] = score(rule.select, values[v]) + 0.0  # -0.0 and 0.0 are one score
                if cutlass.const_expr(rule.biased):
                    chosen_by[v] = chosen_by[v] + bias[group * members + first + v]
        bits = cute.recast_tensor(chosen_by, Uint32)
        keys = cute.make_rmem_tensor((slots,), Uint64)
        broken = cutlass.Boolean(False)
        for v in cutlass.range_constexpr(slots):
            expert = group * members + first + v
            key = (Uint64(ordered(bits[v])) << 32) | Uint64(Uint32(0xFFFFFFFF) - Uint32(expert))
            keys[v] = Uint64(cutlass.select_(first + v < members, key, Uint64(0)))
            broken = broken or (chosen_by[v] != chosen_by[v])
        broken = cute.arch.vote_any_sync(broken)
        sort(keys)

        total = Float32(0.0)  # of a softmax over all experts
        if cutlass.const_expr(rule.weigh == "softmax_all"):
            highest = cute.arch.warp_redux_sync(Uint32(keys[0] >> 32), "umax")
            highest = bitcast(unordered(highest), Float32)
            for v in cutlass.range_constexpr(slots):
                total += cute.math.exp(values[v] - highest)
            total = cute.arch.warp_reduction_sum(total)
        if cutlass.const_expr(rule.groups > 1):
            limit_groups(keys, lane, rule)

        mine, mine_low, highest = Uint32(0), Uint32(0xFFFFFFFF), Float32(0.0)
        for j in cutlass.range_constexpr(top_k):
            own = Uint32(keys[0] >> 32)
            best = cute.arch.warp_redux_sync(own, "umax")
            owner = Int32(cute.arch.clz(cute.arch.brev(Uint32(cute.arch.vote_ballot_sync(own == best)))))
            low = cute.arch.shuffle_sync(Uint32(keys[0] & Uint64(0xFFFFFFFF)), owner)
            mine = Uint32(cutlass.select_(lane == j, best, mine))
            mine_low = Uint32(cutlass.select_(lane == j, low, mine_low))
            if cutlass.const_expr(j == 0):
                highest = bitcast(unordered(best), Float32)
            for v in cutlass.range_constexpr(slots - 1):
                keys[v] = Uint64(cutlass.select_(lane == owner, keys[v + 1], keys[v]))
            keys[slots - 1] = Uint64(cutlass.select_(lane == owner, Uint64(0), keys[slots - 1]))

        expert = Int32(Uint32(0xFFFFFFFF) - mine_low)
        weight = bitcast(unordered(mine), Float32)
        if cutlass.const_expr(rule.weigh.startswith("softmax")):
            weight = cute.math.exp(weight - highest)
        elif cutlass.const_expr(rule.biased):  # the bias chooses, it does not weigh
            weight = Float32(0.0)
            if lane < top_k:
                weight = score(rule.weigh, logits[token, expert].to(Float32))
        elif cutlass.const_expr(rule.select == "logit"):
            weight = score(rule.weigh, weight)
        if cutlass.const_expr(rule.renormalize or rule.weigh == "softmax_chosen"):
            total = cute.arch.warp_reduction_sum(Float32(cutlass.select_(lane < top_k, weight, Float32(0.0))))
        if cutlass.const_expr(rule.renormalize or rule.weigh.startswith("softmax")):
            weight = weight / total
        weight = weight * rule.scale
        if lane < top_k:
            ids[token, lane] = Int32(cutlass.select_(broken, Int32(-1), expert))
            weights[token, lane] = Float32(cutlass.select_(broken, Float32(math.nan), weight))


@cute.jit
def gate_host(
    logits: cute.Tensor, bias: cute.Tensor, ids: cute.Tensor, weights: cute.Tensor, rule: cutlass.Constexpr, stream: Any
):
    blocks = cute.ceil_div(logits.shape[0], THREADS // WARP)
    gate_kernel(logits, bias, ids, weights, rule).launch(grid=(blocks, 1, 1), block=(THREADS, 1, 1), stream=stream)


@cute_cache.cached
def compile_for(arch: str, dtype: str, experts: int, top_k: int, rule: Rule, keep: bool = False) -> Any:
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
    ]
    return support.compile_kernel(gate_host, arguments, arch, keep)


def precompile(cell: Any, arch: str) -> None:
    """Put the kernel of a cell into the cache; needs no GPU."""
    compile_for(arch, cell.dtype, cell.experts, cell.top_k, rule_of(cell))


def prepare(cell: Any, inputs: dict[str, torch.Tensor], outputs: dict[str, torch.Tensor]) -> Callable[[], None]:
    """Bind the gate: logits (T, E), bias (E,) for rules that have one -> topk_ids (T, k), topk_weights (T, k)."""
    logits = inputs["logits"]
    bias = inputs["bias"] if "bias" in inputs else logits.new_zeros(cell.experts, dtype=torch.float32)
    kernel = compile_for(support.current_arch(), cell.dtype, cell.experts, cell.top_k, rule_of(cell))
    return functools.partial(kernel, logits, bias, outputs["topk_ids"], outputs["topk_weights"])
