"""The product of a block of the CuTe router: a tile of tokens by all experts' weights, over one part of H.

Each warp takes some of the experts and issues warp-level tensor core products with float32 sums. The order of H within a
product is free as long as both operands share it, so 8 neighbouring elements, 16 bytes, are all that a thread needs of a row
for two products: each thread copies its own to shared memory and reads them back, asynchronously but without a barrier.
"""

import math

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64

from moe_routing_kernels.cute import WARP
from moe_routing_kernels.gate.cute_primitives import THREADS

WARPS = THREADS // WARP
ROWS, COLUMNS, DEPTH = 16, 8, 16  # of a product: tokens, experts, elements of H
QUAD = 4  # lanes that share a row of an operand
LANE = 8  # neighbouring elements of H that a lane loads: those of two products
CHUNK = QUAD * LANE


def tiles_of(experts: int) -> int:
    """Products side by side, of COLUMNS experts each, that a warp computes."""
    return -(-experts // (COLUMNS * WARPS))


@cute.jit
def fetch(matrix: cute.Tensor, row: Int32, h: Int32, slot: cute.Tensor, exact: cutlass.Constexpr):
    """Start to copy LANE elements of a row of (rows, H) from h on to a slot of shared memory; zeros beyond the end of H.

    Where `exact`, no thread reads beyond it. For a row that does not exist the last one is copied: its scores are not used.
    """
    hidden = cutlass.const_expr(matrix.shape[1])
    width = cutlass.const_expr(math.gcd(hidden, LANE))
    start = Int64(cutlass.min(row, matrix.shape[0] - 1)) * hidden + Int64(h)
    held = cute.make_rmem_tensor((LANE,), matrix.element_type)
    held.fill(0)
    if cutlass.const_expr(width == LANE):
        atom = cute.make_copy_atom(cute.nvgpu.cpasync.CopyG2SOp(), matrix.element_type, num_bits_per_copy=128)
        source = cute.make_tensor(matrix.iterator + cute.assume(start, divby=LANE), cute.make_layout((LANE,)))
        if cutlass.const_expr(exact):
            cute.copy(atom, source, slot)
        else:
            if h < hidden:
                cute.copy(atom, source, slot)
            if h >= hidden:
                cute.autovec_copy(held, slot)
    else:  # too narrow for an asynchronous copy
        source = cute.make_tensor(matrix.iterator + start, cute.make_layout((LANE,)))
        for v in cutlass.range_constexpr(LANE):
            if h + v < hidden:
                held[v] = source[v]
        cute.autovec_copy(held, slot)


@cute.jit
def fetch_chunk(
    x: cute.Tensor,
    weight: cute.Tensor,
    token: Int32,
    expert: Int32,
    h: Int32,
    slots: cute.Tensor,
    exact: cutlass.Constexpr,
):
    """Start to copy a lane's part of CHUNK elements of H: its experts of all tiles, then its tokens."""
    tiles = cutlass.const_expr(tiles_of(weight.shape[0]))
    for n in cutlass.range_constexpr(tiles):
        fetch(weight, expert + n * COLUMNS, h, slots[None, n], exact)
    for m in cutlass.range_constexpr(cute.size(slots, mode=[1]) - tiles):
        fetch(x, token + m * (ROWS // 2), h, slots[None, tiles + m], exact)


def left_register(i: int, upper: int) -> int:
    """Where a lane's left operand has the i-th of four elements of H, of its lower or upper token.

    The right operand has them in order, and sums have two neighbouring experts of the lower token before the upper's. That
    this is the layout of the instruction is held by `tests/benches/test_cute_router.py`.
    """
    return i // 2 * 4 + upper * 2 + i % 2


@cute.jit
def multiply(held: cute.Tensor, sums: cute.Tensor):
    """sums (4, rows, tiles) += the products of held (LANE, tiles + 2 rows): a lane's experts, then its tokens."""
    rows, tiles = cutlass.const_expr(cute.size(sums, mode=[1])), cutlass.const_expr(cute.size(sums, mode=[2]))
    atom = cute.make_mma_atom(cute.nvgpu.warp.MmaF16BF16Op(held.element_type, Float32, (ROWS, COLUMNS, DEPTH)))
    left = cute.make_rmem_tensor((8, rows), held.element_type)
    right = cute.make_rmem_tensor((4, tiles), held.element_type)
    for half in cutlass.range_constexpr(LANE // 4):
        for i in cutlass.range_constexpr(4):  # of H a lane has two neighbours in each half of a product
            for m in cutlass.range_constexpr(2 * rows):
                left[left_register(i, m % 2), m // 2] = held[half * 4 + i, tiles + m]
            for n in cutlass.range_constexpr(tiles):
                right[i, n] = held[half * 4 + i, n]
        cute.gemm(atom, sums, left, right, sums)


@cute.jit
def multiply_part(
    x: cute.Tensor,
    weight: cute.Tensor,
    first_token: Int32,
    first_expert: Int32,
    part: Int32,
    thread: Int32,
    lane: Int32,
    config: cutlass.Constexpr,
) -> cute.Tensor:
    """A thread's sums (4, row tiles, tiles of experts) of the products over one part of H."""
    tiles = cutlass.const_expr(tiles_of(weight.shape[0]))
    in_flight = cutlass.const_expr(config.in_flight)
    slots = cutlass.const_expr(tiles + 2 * config.row_tiles)  # of a chunk and thread: only the thread itself reads them
    ring = cutlass.memory.SmemAllocator().allocate_tensor(
        x.element_type, cute.make_layout((LANE, THREADS, slots, in_flight)), byte_alignment=16
    )
    sums = cute.make_rmem_tensor((4, config.row_tiles, tiles), Float32)
    sums.fill(0.0)
    exact = cutlass.const_expr(x.shape[1] == config.parts * config.chunks * CHUNK)
    expert, token = first_expert + lane // QUAD, first_token + lane // QUAD
    h = part * (config.chunks * CHUNK) + lane % QUAD * LANE
    for f in cutlass.range_constexpr(in_flight):
        fetch_chunk(x, weight, token, expert, h + f * CHUNK, ring[None, thread, None, f], exact)
        cute.arch.cp_async_commit_group()
    for step in range(config.chunks // in_flight):
        for f in cutlass.range_constexpr(in_flight):
            cute.arch.cp_async_wait_group(in_flight - 1)
            held = cute.make_rmem_tensor((LANE, slots), x.element_type)
            for slot in cutlass.range_constexpr(slots):
                cute.autovec_copy(ring[None, thread, slot, f], held[None, slot])
            multiply(held, sums)
            if cutlass.const_expr(config.chunks > in_flight):
                after = (step + 1) * in_flight + f
                if after < config.chunks:
                    fetch_chunk(x, weight, token, expert, h + after * CHUNK, ring[None, thread, None, f], exact)
            cute.arch.cp_async_commit_group()  # an empty one at the end, so that waiting counts alike
    return sums
