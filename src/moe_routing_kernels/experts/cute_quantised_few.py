"""The main loop of `cute_quantised_product` for tiles of 8 tokens, where issuing instructions binds: each warp multiplies by itself.

With so few tokens the tensor cores are nearly idle, and what a warpgroup's product needs beside itself, fences and descriptors, is a sixth of
the instructions. A warp's product takes the same fragments, tokens in registers too. Integers are not dequantised: of a group of the inner dimension

    sum_k scale (code_k - zero) x_k = scale (sum_k (base + code_k) x_k - sum_k (base + zero) x_k),

where base + code is what a mask leaves of a word of codes, and base + zero a register per row: a second product takes the place of
subtractions, and sums are scaled in place of weights. All are integers of at most 11 bits times x, summed in float32, and their
difference has at least 24 - 8 bits left, more than the weights that others round to 16-bit floats. 8-bit floats are dequantised as elsewhere: without their scale
those beside bf16 are so small that products vanish.

Invariant: a stage is released when all lanes of the warp have their codes and tokens in registers.
"""

from collections.abc import Iterator
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Uint32
from cutlass.cute.nvgpu import warp

from moe_routing_kernels.experts.cute_dequantise import masks, number, register, subtracts, subtrahend_of
from moe_routing_kernels.experts.cute_multiply import TURN, release
from moe_routing_kernels.experts.cute_quantised_multiply import (
    BATCHES,
    FRAGMENT,
    factors,
    offsets_of,
    parameters_of,
    words_of,
)
from moe_routing_kernels.experts.cute_quantised_tiles import FEWEST_TOKENS, K16
from moe_routing_kernels.experts.cute_tiles import STEP, WARPGROUP, skip
from moe_routing_kernels.experts.quantised_layout import DEPTH, Codes

_CHUNK = 8  # elements that a lane gives the address of: 16 bytes of a token
_A, _B, _SUMS = ((2, 2, 2), 1), ((2, 2), 1), ((2, 2), 1, 1)  # fragments of a warp's product, and how many


@cute.jit
def tokens_of(x_stages: cute.Tensor, index: Int32):
    """A thread's part of a stage's tokens: (2 registers of two numbers for each of two steps, pairs of steps).

    Lane 8 q + r names the q-th of four pieces of token r. A token's pieces of 128 bytes are permuted by its number, as TMA wrote them.
    """
    dtype = x_stages.element_type
    atom = cute.make_copy_atom(warp.LdMatrix8x8x16bOp(transpose=False, num_matrices=4), dtype)
    held = cute.make_rmem_tensor((_CHUNK, K16 // 2), dtype)
    plain = cute.recast_ptr(x_stages.iterator, cute.make_swizzle(0, 4, 3), dtype=dtype)
    token, piece = cute.arch.lane_idx() % FEWEST_TOKENS, cute.arch.lane_idx() // FEWEST_TOKENS
    for n in cutlass.range_constexpr(K16 // 2):
        half, first = divmod(n * 4 * _CHUNK, STEP)
        place = index * (FEWEST_TOKENS * DEPTH) + half * (FEWEST_TOKENS * STEP) + token * STEP
        place = place + ((piece + first // _CHUNK) ^ token) * _CHUNK
        source = cute.make_tensor(plain + cute.assume(place, divby=_CHUNK), held[None, n].layout)
        cute.copy(atom, source, held[None, n])
    return held


def zeros() -> cute.Tensor:
    """Sums of a product, (2 tokens, 2 rows 8 apart), that begin with 0."""
    sums = cute.make_rmem_tensor(_SUMS, Float32)
    sums.fill(0.0)
    return sums


def places(step: int, codes: Codes) -> list[tuple[int, int, int]]:
    """Of a step's registers: the number, the word of a thread's words of a stage, and which of its fields."""
    return [(n, *divmod(step * FRAGMENT + n, codes.fields)) for n in range(FRAGMENT)]


def add(mma: cute.MmaAtom, sums: cute.Tensor, x: cute.Tensor, steps: range, operands: Iterator[list]) -> None:
    """Add to sums the products of the registers of `steps` of 16, from `operands`, and of tokens x, `tokens_of`."""
    for step, registers in zip(steps, operands, strict=True):
        a = cute.make_rmem_tensor((FRAGMENT,), Uint32)
        for n in range(FRAGMENT):
            a[n] = registers[n]
        left = cute.make_tensor(cute.recast_ptr(a.iterator, dtype=x.element_type), cute.make_layout(_A))
        right = cute.make_tensor(x.iterator + step * _CHUNK // 2, cute.make_layout(_B))
        cute.gemm(mma, sums, left, right, sums)


def add_block(
    mma: cute.MmaAtom, results: cute.Tensor, block: cute.Tensor, x: cute.Tensor, offsets: dict, mask: dict, product: Any
) -> None:
    """Add the product of a block of codes and of a stage's tokens x to results, sums of a product.

    `offsets` are the sums by group that are subtracted: without zero points those of one block are those of all.
    """
    codes = product.codes
    batches = [words_of(block, batch, product) for batch in range(BATCHES)]
    words = [batch[n] for batch in batches for n in range(cute.size(batch))]
    parameters = parameters_of(block, product)
    layout = cute.make_layout((2, codes.parameters, codes.groups))
    scales = cute.make_tensor(cute.recast_ptr(parameters.iterator, dtype=x.element_type), layout)
    each = K16 // codes.groups  # steps of a group
    for group in range(codes.groups):
        steps = range(group * each, (group + 1) * each)
        if codes.kind != "int":
            known = factors(parameters, group, codes)
            numbers = (
                [register(words[at], field, *known[n % 2], mask, codes) for n, at, field in places(step, codes)]
                for step in steps
            )
            add(mma, results, x, steps, numbers)
            continue
        sums = zeros()
        numbers = ([number(words[at], field, mask, codes) for _, at, field in places(step, codes)] for step in steps)
        add(mma, sums, x, steps, numbers)
        if subtracts(codes) and (codes.zeros or group not in offsets):
            offsets[group], known = zeros(), offsets_of(parameters, group, codes)
            less = (
                [subtrahend_of(field, known[n % 2], codes) for n, _, field in places(step, codes)] for step in steps
            )
            add(mma, offsets[group], x, steps, less)
        for n in range(cute.size(sums)):
            exact = sums[n] - offsets[group][n] if subtracts(codes) else sums[n]
            results[n] = results[n] + Float32(scales[n // 2, 0, group]) * exact


@cute.jit
def multiply(
    tokens: cutlass.Constexpr,
    w_stages: cute.Tensor,
    x_stages: cute.Tensor,
    sums: cute.Tensor,
    full: cute.Pointer,
    empty: cute.Pointer,
    index: Int32,
    phase: Int32,
    share: Int32,
    consumer: Int32,
    zero: Int32,
    product: cutlass.Constexpr,
):
    """As `cute_quantised_multiply.multiply`, by the warps of a warpgroup, each by itself."""
    slabs, stages = cutlass.const_expr(product.tile.slabs), cutlass.const_expr(product.stages)
    mma = cute.make_mma_atom(warp.MmaF16BF16Op(x_stages.element_type, Float32, (16, FEWEST_TOKENS, 16)))
    results = cute.make_tensor(sums.iterator, cute.make_layout((*_SUMS, slabs)))
    mask = masks(Uint32(zero), product.codes)
    first = Int32(0)
    if cutlass.const_expr(product.splits > 1):
        first = consumer
        index, phase = skip(index, phase, consumer, stages)
        if consumer > 0:
            sums.fill(0.0)  # the first one's begin with the biases
    for _ in cutlass.range(first, product.steps, product.splits, unroll=1):
        cute.arch.mbarrier_wait(full + index, phase)
        x, offsets = tokens_of(x_stages, index), {}
        for slab in cutlass.range_constexpr(slabs):
            block = w_stages[None, share * slabs + slab, index]
            add_block(mma, results[None, None, None, slab], block, x, offsets, mask, product)
        cute.arch.sync_warp()
        release(empty + index)
        index, phase = skip(index, phase, product.splits, stages)


@cute.jit
def add_up(sums: cute.Tensor, partial: cute.Tensor, consumer: Int32, product: cutlass.Constexpr):
    """By the warpgroups that split a tile: add their sums to those of the first one, by way of `partial` (threads, sums, the others)."""
    thread = cute.arch.thread_idx()[0] % WARPGROUP
    threads = cutlass.const_expr(WARPGROUP * product.splits)
    if consumer > 0:
        for n in cutlass.range_constexpr(cute.size(sums)):
            partial[thread, n, consumer - 1] = sums[n]
    cute.arch.barrier(barrier_id=TURN, number_of_threads=threads)
    if consumer == 0:
        for n in cutlass.range_constexpr(cute.size(sums)):
            for other in cutlass.range_constexpr(product.splits - 1):
                sums[n] = sums[n] + partial[thread, n, other]
    cute.arch.barrier(barrier_id=TURN, number_of_threads=threads)  # none overwrites its part before it is read
