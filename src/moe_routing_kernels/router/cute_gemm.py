"""The router's GEMM in CuTe DSL: a block multiplies a tile of tokens by all experts' weights over one split of K = H.

Each warp takes some of the experts and issues warp-level MMAs with float32 accumulators. The order of K within an MMA is free
as long as both operands share it, so a thread needs only 8 neighbouring elements, 16 bytes, of a row for two MMAs: each thread
copies its elements to shared memory and reads them back, asynchronously but without a barrier.
"""

import math

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64

from moe_routing_kernels.cute import WARP
from moe_routing_kernels.gate.cute_primitives import THREADS

WARPS = THREADS // WARP
ROWS, COLUMNS, DEPTH = 16, 8, 16  # of an MMA: M (tokens), N (experts), K (elements of H)
QUAD = 4  # lanes that share a row of an operand
LANE = 8  # neighbouring elements of H that a lane loads: K of two MMAs
CHUNK = QUAD * LANE


def tiles_of(experts: int) -> int:
    """MMA tiles of COLUMNS experts each that a warp computes."""
    return -(-experts // (COLUMNS * WARPS))


@cute.jit
def fetch(matrix: cute.Tensor, row: Int32, h: Int32, slot: cute.Tensor, exact: cutlass.Constexpr):
    """Start to copy LANE elements of a row of (rows, H) from h on to a slot of shared memory; zeros beyond the end of H.

    Where `exact`, no thread reads beyond it. In place of a row past the last one, the last row is copied; its scores are not used.
    """
    hidden = cutlass.const_expr(matrix.shape[1])
    width = cutlass.const_expr(math.gcd(hidden, LANE))
    start = Int64(cutlass.min(row, matrix.shape[0] - 1)) * hidden + Int64(h)
    vector = cute.make_rmem_tensor((LANE,), matrix.element_type)
    vector.fill(0)
    if cutlass.const_expr(width == LANE):
        atom = cute.make_copy_atom(cute.nvgpu.cpasync.CopyG2SOp(), matrix.element_type, num_bits_per_copy=128)
        source = cute.make_tensor(matrix.iterator + cute.assume(start, divby=LANE), cute.make_layout((LANE,)))
        if cutlass.const_expr(exact):
            cute.copy(atom, source, slot)
        else:
            if h < hidden:
                cute.copy(atom, source, slot)
            if h >= hidden:
                cute.autovec_copy(vector, slot)
    else:  # too narrow for an asynchronous copy
        source = cute.make_tensor(matrix.iterator + start, cute.make_layout((LANE,)))
        for v in cutlass.range_constexpr(LANE):
            if h + v < hidden:
                vector[v] = source[v]
        cute.autovec_copy(vector, slot)


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
    """Start to copy a lane's elements of CHUNK elements of H: its experts of all tiles, then its tokens."""
    tiles = cutlass.const_expr(tiles_of(weight.shape[0]))
    for n in cutlass.range_constexpr(tiles):
        fetch(weight, expert + n * COLUMNS, h, slots[None, n], exact)
    for m in cutlass.range_constexpr(cute.size(slots, mode=[1]) - tiles):
        fetch(x, token + m * (ROWS // 2), h, slots[None, tiles + m], exact)


def a_register(i: int, upper: int) -> int:
    """The register of a lane's operand A for the i-th of four elements of H, of its lower or upper token.

    Operand B has them in order, and accumulators have two neighbouring experts of the lower token before those of the upper
    token. `tests/benches/test_cute_router.py` compares this with the layout of the instruction.
    """
    return i // 2 * 4 + upper * 2 + i % 2


@cute.jit
def mma(fragment: cute.Tensor, acc: cute.Tensor):
    """acc (4, rows, tiles) += the products of fragment (LANE, tiles + 2 rows): a lane's experts, then its tokens."""
    rows, tiles = cutlass.const_expr(cute.size(acc, mode=[1])), cutlass.const_expr(cute.size(acc, mode=[2]))
    atom = cute.make_mma_atom(cute.nvgpu.warp.MmaF16BF16Op(fragment.element_type, Float32, (ROWS, COLUMNS, DEPTH)))
    a = cute.make_rmem_tensor((8, rows), fragment.element_type)
    b = cute.make_rmem_tensor((4, tiles), fragment.element_type)
    for half in cutlass.range_constexpr(LANE // 4):
        for i in cutlass.range_constexpr(4):  # a lane has two neighbouring elements of H in each half of K
            for m in cutlass.range_constexpr(2 * rows):
                a[a_register(i, m % 2), m // 2] = fragment[half * 4 + i, tiles + m]
            for n in cutlass.range_constexpr(tiles):
                b[i, n] = fragment[half * 4 + i, n]
        cute.gemm(atom, acc, a, b, acc)


@cute.jit
def mainloop(
    x: cute.Tensor,
    weight: cute.Tensor,
    first_token: Int32,
    first_expert: Int32,
    split: Int32,
    thread: Int32,
    lane: Int32,
    config: cutlass.Constexpr,
) -> cute.Tensor:
    """A thread's accumulators (4, row tiles, tiles of experts) over one split of H."""
    tiles = cutlass.const_expr(tiles_of(weight.shape[0]))
    in_flight = cutlass.const_expr(config.in_flight)
    slots = cutlass.const_expr(tiles + 2 * config.row_tiles)  # per chunk and thread: a thread reads its own slots only
    ring = cutlass.memory.SmemAllocator().allocate_tensor(
        x.element_type, cute.make_layout((LANE, THREADS, slots, in_flight)), byte_alignment=16
    )
    acc = cute.make_rmem_tensor((4, config.row_tiles, tiles), Float32)
    acc.fill(0.0)
    exact = cutlass.const_expr(x.shape[1] == config.splits * config.chunks * CHUNK)
    expert, token = first_expert + lane // QUAD, first_token + lane // QUAD
    h = split * (config.chunks * CHUNK) + lane % QUAD * LANE
    # prologue
    for f in cutlass.range_constexpr(in_flight):
        fetch_chunk(x, weight, token, expert, h + f * CHUNK, ring[None, thread, None, f], exact)
        cute.arch.cp_async_commit_group()
    # main loop
    for step in range(config.chunks // in_flight):
        for f in cutlass.range_constexpr(in_flight):
            cute.arch.cp_async_wait_group(in_flight - 1)
            fragment = cute.make_rmem_tensor((LANE, slots), x.element_type)
            for slot in cutlass.range_constexpr(slots):
                cute.autovec_copy(ring[None, thread, slot, f], fragment[None, slot])
            mma(fragment, acc)
            if cutlass.const_expr(config.chunks > in_flight):
                after = (step + 1) * in_flight + f
                if after < config.chunks:
                    fetch_chunk(x, weight, token, expert, h + after * CHUNK, ring[None, thread, None, f], exact)
            cute.arch.cp_async_commit_group()  # an empty one at the end, so that waiting counts alike
    return acc
