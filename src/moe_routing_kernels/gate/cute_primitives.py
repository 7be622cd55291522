"""Building blocks of the CuTe gate's variants: scores, sortable keys, sorting networks, shared memory of a warp."""

import functools
import math
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint32

from moe_routing_kernels.cute import WARP, power_of_2
from moe_routing_kernels.routers.formulas import TAIL

THREADS = 128  # of a block
SIGN = 0x80000000

fmax, fmin = cute.arch.fmax, cute.arch.fmin


def score(kind: str, logit: Float32) -> Float32:
    """The score of a logit, in float32."""
    if kind == "sigmoid":
        return cute.arch.rcp_approx(1.0 + cute.math.exp(-logit))  # 1 ulp, without the branches of a division
    if kind == "sqrtsoftplus":
        root = cute.math.exp(0.5 * logit)  # of e^x: the score where e^x vanishes
        softplus = Float32(cutlass.select_(logit > 20.0, logit, cute.math.log1p(root * root)))
        return Float32(cutlass.select_(logit < TAIL, root, cute.math.sqrt(softplus)))
    return logit


def below(logit: Float32, largest: Float32) -> Float32:
    """A logit minus the largest one, never positive: 0 for the largest, also where both are infinite.

    The difference of two infinities is NaN, and the minimum takes its other operand.
    """
    return fmin(logit - largest, Float32(0.0))


@cute.jit
def mass(
    total: Float32, scores: cute.Tensor, largest: Float32, experts: cutlass.Constexpr, threads: cutlass.Constexpr
) -> Float32:
    """The sum of a softmax over all experts, `total` where it is a number.

    `total` is NaN where a token's largest logit is infinite. Then each expert at that logit counts 1 and the others 0. `scores` are
    one thread's, of `threads` per token; slots without an expert hold -inf and do not count.
    """
    if cute.arch.vote_ballot_sync(total != total) != 0:
        at_largest = Float32(0.0)
        for v in cutlass.range_constexpr(cute.size(scores)):
            at_largest += select(scores[v] == largest, Float32(1.0), Float32(0.0))
        at_largest = cute.arch.warp_reduction_sum(at_largest, threads_in_group=threads)
        at_largest = select(largest > -math.inf, at_largest, Float32(experts))
        total = select(total != total, at_largest, total)
    return total


def bitcast(value: Any, dtype: Any) -> Any:
    """The same 32 bits as another type."""
    register = cute.make_rmem_tensor((1,), type(value))
    register[0] = value
    return cute.recast_tensor(register, dtype)[0]


def select(condition: Any, yes: Float32, no: Float32) -> Float32:
    """One of two scores."""
    return Float32(cutlass.select_(condition, yes, no))


def row_index(token: Int32, wide: bool) -> Any:
    """A token's index into a tensor, in 64 bits where offsets need them: in the packed variant these take a third more registers."""
    return Int64(token) if wide else token


# Keys of the exact variant: unsigned integers in the order of the scores; 0 is the empty key, below every score.


def key_of(bits: Uint32) -> Uint32:
    """Float bits as an unsigned integer of the same order; every float, -inf included, is above 0."""
    return bits ^ (Uint32(Int32(bits) >> 31) | Uint32(SIGN))


def bits_of(key: Uint32) -> Uint32:
    """The float bits of a key."""
    return key ^ Uint32(cutlass.select_(key >= SIGN, Uint32(SIGN), Uint32(0xFFFFFFFF)))


def value_of(key: Uint32) -> Float32:
    """The score of a key, -inf for the empty one."""
    return Float32(cutlass.select_(key == 0, Float32(-math.inf), bitcast(bits_of(key), Float32)))


# Keys of the packed variant: float scores with a code in their lowest bits.


def tagged(value: Float32, kept: Uint32, code: Any) -> Float32:
    """A score with `code` in place of the bits that are not kept."""
    return bitcast((bitcast(value, Uint32) & kept) | Uint32(code), Float32)


def ceiling(key: Float32, mask: int) -> Float32:
    """The largest score that may have become `key` by `tagged`."""
    bits = bitcast(key, Uint32)
    full, empty = bitcast(bits | Uint32(mask), Float32), bitcast(bits & Uint32(~mask & 0xFFFFFFFF), Float32)
    return fmax(full, empty)  # for -inf one of the two is a NaN, which fmax ignores


# Sorting networks.


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


@cute.jit
def sort(keys: cute.Tensor):
    """Sort a thread's keys, largest first."""
    for i, j in comparators(cute.size(keys)):
        keys[i], keys[j] = cutlass.max(keys[i], keys[j]), cutlass.min(keys[i], keys[j])


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


def merged(a: list[Any], b: list[Any], most: int, unordered: bool = False) -> tuple[list[Any], list[Any]]:
    """Merge two lists of 2**n scores, both largest first.

    Returns the `most` largest, largest first, and a list of the largest of the others, empty where there are none. If
    `unordered` the result needs no order; with a and b exchanged it is reversed.
    """
    if len(a) < most:
        return bitonic([*a, *reversed(b)]), []
    pairs = list(zip(a, reversed(b), strict=True))
    best = [fmax(*pair) for pair in pairs]
    return best if unordered else bitonic(best), [functools.reduce(fmax, [fmin(*pair) for pair in pairs])]


def largest(values: list[Any], most: int, unordered: bool = False) -> tuple[list[Any], list[Any]]:
    """The `most` = 2**n largest of a thread's scores, and a list of the largest of the others, empty where there are none.

    Largest first, unless `unordered`, and with -inf where there are fewer. With fewer than `most` / 2 scores the list is
    shorter, but still a power of two.
    """
    size = min(most, power_of_2(len(values)))
    values = values + [Float32(-math.inf)] * (-len(values) % size)
    lists, others = [], []
    for start in range(0, len(values), size):
        part = values[start : start + size]
        for i, j in comparators(size):
            part[i], part[j] = fmax(part[i], part[j]), fmin(part[i], part[j])
        lists.append(part)
    while len(lists) > 1:
        final = unordered and len(lists) == 2
        results = [merged(a, b, most, final) for a, b in zip(lists[::2], lists[1::2], strict=False)]
        others += [score for _, lost in results for score in lost]
        lists = [best for best, _ in results] + lists[2 * len(results) :]
    return lists[0], [functools.reduce(fmax, others)] if others else []


# Threads that share a token are neighbours, and a power of two.


def largest_of_token(
    best: list[Any], others: list[Any], most: int, threads_per_token: int, unordered: bool = False
) -> tuple[list[Any], list[Any]]:
    """`largest` over all scores of a token, from each thread's result.

    If `unordered`, the two halves of its threads have the result in opposite order.
    """
    step = 1
    while step < threads_per_token:
        partner = [cute.arch.shuffle_sync_bfly(score, step) for score in best]
        others = others + [cute.arch.shuffle_sync_bfly(score, step) for score in others]
        best, lost = merged(best, partner, most, unordered and 2 * step == threads_per_token)
        others = [functools.reduce(fmax, others + lost)] if others + lost else []
        step *= 2
    return best, others


@cute.jit
def max_of_token(key: Uint32, threads_per_token: cutlass.Constexpr) -> Uint32:
    """The largest key of the threads of a token."""
    if cutlass.const_expr(threads_per_token == WARP):
        return cute.arch.warp_redux_sync(key, "umax")
    for step in cutlass.range_constexpr(int(math.log2(threads_per_token))):
        key = cutlass.max(key, cute.arch.shuffle_sync_bfly(key, 1 << step))
    return key


# Shared memory.


def row_stride(length: int) -> int:
    """Distance in words of two threads' rows in shared memory, so that wide accesses of neighbours do not collide."""
    return length + 4 if length % 8 == 0 else length


def warp_tensor(dtype: Any, shape: tuple[Any, ...]) -> cute.Tensor:
    """This warp's part of a tensor of shape (extent, ...) in shared memory; an extent may be a pair (extent, its stride)."""
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
