"""The grouped matrix product of `cute_experts` (sm_90a): weights on the M side of the tensor cores' product, tokens on its N side.

out[r, c] = f(sum_k w[e, c, k] x[r, k]) for the rows r of each expert e, offsets[e] <= r < offsets[e + 1].

Strategy: one persistent thread block per multiprocessor. A warp of its first warpgroup streams tiles of weights and of token rows
by TMA through a ring of stages in shared memory; one or two more warpgroups multiply them (wgmma, both operands from shared
memory, float32 sums in registers). A tile of the result is up to 256 rows of weights times 8 to 256 tokens: N has steps of 8,
M has steps of 64, so that few tokens per expert waste little, and an expert's weights are read once where its tokens fit one
tile. Sums lie as (weight row, token) and memory as (token, weight row): the epilogue transposes 8 x 8 blocks with `stmatrix`
into a buffer of its own, then writes 16 bytes per thread, while the producer loads the next tile.

Gate and up: the tensor map sees w13 as (8 rows, gate or up, I / 8, H, E), so that a box of it lays 8 gate rows above the 8 up
rows that belong to them. A thread's sums of rows r and r + 8 of a 16-row slab are then a gate and its up, and the activation
needs no exchange; boxes are clipped at I.

Invariants:
- Rows beyond an expert's last are multiplied (they are another expert's, or past the tensor and zero) and never stored; sums of
  different tokens do not mix.
- A stage is filled again only after each multiplying warp has arrived at its `empty` barrier, which it does after the
  `wgmma.wait_group` that covers its reads. The producer waits for the parity opposite to its phase, so its first round passes.
- The epilogue's buffer is written and read by threads of one warpgroup alone, between barriers of that warpgroup, and never by
  TMA: no proxy fence is needed.
- TMA fills with zeros what lies beyond the inner dimension, in both operands, so the last step may overhang.
"""

import math
from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64
from cutlass.cute.nvgpu import cpasync, warp, warpgroup

from moe_routing_bench.kernels.cute import WARP
from moe_routing_bench.kernels.cute.cache import cached
from moe_routing_bench.kernels.cute.compilation import DTYPES, compile_kernel, fake_tensor

STEP = 64  # elements of the inner dimension per stage: 128 bytes, the width of the swizzle
SLAB = 64  # rows of weights that a warpgroup's instruction takes
WARPGROUP = 4 * WARP
VECTOR = 8  # elements that a thread stores at a time: 16 bytes
GROUP = 8  # tiles of tokens that share weights in L2: up to 2048 tokens for one reading of them
SHARED_BYTES = 227 << 10  # that a thread block may have on sm_90
RESERVED = 2048  # of them, for barriers and alignment
MOST_STAGES = 24
PRODUCER_REGISTERS = 40
CONSUMER_REGISTERS = 232  # 128 * 40 + 256 * 232 registers are what a multiprocessor has
LOG2_E = math.log2(math.e)


@dataclass(frozen=True)
class Tile:
    """What a thread block computes at a time."""

    slabs: int  # of 64 rows of weights, per warpgroup
    warpgroups: int  # that multiply
    tokens: int  # a multiple of 8, at most 256

    @property
    def rows(self) -> int:
        """Rows of weights."""
        return SLAB * self.slabs * self.warpgroups


@dataclass(frozen=True)
class Product:
    """One grouped product: weights (E, N, inner) -> out (R, columns), N being 2 columns where it is gated."""

    columns: int
    inner: int
    experts: int
    activation: str  # of swiglu, geglu, relu2; empty for none
    tile: Tile

    @property
    def gated(self) -> bool:
        """Whether the rows of weights are gates and ups."""
        return self.activation in ("swiglu", "geglu")

    @property
    def width(self) -> int:
        """Columns of the result that a warpgroup computes."""
        return SLAB * self.tile.slabs // (2 if self.gated else 1)

    @property
    def parts(self) -> int:
        """Tiles side by side in a row of the result."""
        return math.ceil(self.columns / (self.width * self.tile.warpgroups))

    @property
    def chunk(self) -> int:
        """Tokens that the epilogue transposes at a time: a divisor of the tile's."""
        eights = self.tile.tokens // 8
        return 8 * max(n for n in range(1, 9) if eights % n == 0)

    @property
    def pitch(self) -> int:
        """Elements from token to token in the epilogue's buffer: an odd number of 16 bytes, so that no two of 8 tokens share banks."""
        return self.width + VECTOR

    @property
    def stage_bytes(self) -> int:
        """Bytes of a stage, all of which TMA writes."""
        return (self.tile.rows + self.tile.tokens) * STEP * 2

    @property
    def stages(self) -> int:
        """As many as fit beside the rest."""
        buffers = self.chunk * self.pitch * 2 * self.tile.warpgroups
        tables = 2 * 4 * (self.experts + 1)
        return min(MOST_STAGES, (SHARED_BYTES - RESERVED - buffers - tables) // self.stage_bytes)

    @property
    def threads(self) -> int:
        """Threads of a block: the producer's warpgroup, and those that multiply."""
        return WARPGROUP * (1 + self.tile.warpgroups)

    def most_tiles(self, rows: int) -> int:
        """The most tiles that `rows` rows can need: each expert's may leave one that is not full."""
        return (rows // self.tile.tokens + min(self.experts, rows)) * self.parts


@cute.jit
def count_tiles(offsets: cute.Tensor, starts: cute.Tensor, first_tiles: cute.Tensor, product: cutlass.Constexpr):
    """By one warp: copy offsets (E + 1,) to `starts`, and write how many tiles of tokens precede each expert.

    A lane takes neighbouring experts, so that all its loads are in flight at a time.
    """
    lane = cute.arch.lane_idx()
    experts = cutlass.const_expr(product.experts)
    share = cutlass.const_expr(math.ceil(experts / WARP))
    begins = [offsets[cutlass.min(lane * share + i, experts)] for i in range(share + 1)]
    before = [Int32(0)]
    for i in cutlass.range_constexpr(share):
        tiles = (begins[i + 1] - begins[i] + (product.tile.tokens - 1)) // product.tile.tokens
        before.append(before[i] + tiles)
    total = before[share]
    for n in cutlass.range_constexpr(5):
        below = cute.arch.shuffle_sync_up(total, 1 << n)
        total = total + cutlass.select_(lane >= (1 << n), below, Int32(0))
    base = total - before[share]
    for i in cutlass.range_constexpr(share):
        expert = lane * share + i
        if expert < experts:
            starts[expert] = begins[i]
            first_tiles[expert] = base + before[i]
    if lane == WARP - 1:  # experts past the last have no tiles, so the last lane's sum is that of all
        starts[experts] = offsets[experts]
        first_tiles[experts] = total


def locate(tile: Any, starts: cute.Tensor, first_tiles: cute.Tensor, product: Product) -> tuple[Any, Any, Any, Any]:
    """Of a tile, by a whole warp: its expert, its first row, the expert's end, and its part of the columns.

    Tiles of an expert are taken in groups of up to GROUP tiles of tokens, part by part: what runs at a time shares weights
    and token rows.
    """
    lane, experts = cute.arch.lane_idx(), product.experts
    share = math.ceil(experts / WARP)
    number = tile // product.parts  # as if the tiles of an expert stood part by part: right for the expert
    passed = first_tiles[cutlass.min((lane + 1) * share, experts)] <= number
    base = cute.arch.popc(cute.arch.vote_ballot_sync(passed)) * share
    passed = first_tiles[cutlass.min(base + lane + 1, experts)] <= number
    expert = base + cute.arch.popc(cute.arch.vote_ballot_sync(passed & (lane < share)))
    expert = cute.arch.make_warp_uniform(expert)
    first = first_tiles[expert]
    inside = tile - first * product.parts
    group = inside // (GROUP * product.parts)
    high = cutlass.min(first_tiles[expert + 1] - first - group * GROUP, GROUP)
    inside = inside - group * (GROUP * product.parts)
    row = starts[expert] + (group * GROUP + inside % high) * product.tile.tokens
    return expert, row, starts[expert + 1], inside // high


def advance(index: Any, phase: Any, stages: int) -> tuple[Any, Any]:
    """The next stage of the ring, and its phase."""
    last = index == stages - 1
    return cutlass.select_(last, Int32(0), index + 1), cutlass.select_(last, phase ^ 1, phase)


def activate(gate: Any, up: Any, activation: str) -> Any:
    """An activation of float32 sums; `relu2` and none look at the gate alone."""
    if activation == "relu2":
        positive = cutlass.max(gate, Float32(0.0))
        return positive * positive
    if activation == "":
        return gate
    slope = gate
    if activation == "geglu":  # gelu made of tanh: x (1 + tanh(z)) / 2 = x sigmoid(2 z)
        slope = 1.5957691216057308 * (gate + 0.044715 * gate * gate * gate)
    return gate * cute.arch.rcp_approx(1.0 + cute.math.exp2(slope * -LOG2_E, fastmath=True)) * up


def blocks_of(sums: cute.Tensor, slab: int, column: int, product: Product) -> list[tuple[Any, Any]]:
    """A thread's elements of the 8 x 8 blocks of the result that its warp's 16 rows of a slab and 8 tokens make.

    `sums` is (2 tokens, 2 rows 8 apart, tokens / 8, slabs).
    """
    both = [[sums[token, half, column, slab] for token in range(2)] for half in range(2)]
    if product.gated:
        return [tuple(activate(both[0][token], both[1][token], product.activation) for token in range(2))]
    return [tuple(activate(value, None, product.activation) for value in half) for half in both]


@cute.jit
def transpose(sums: cute.Tensor, buffer: cute.Tensor, chunk: cutlass.Constexpr, product: cutlass.Constexpr):
    """Write a chunk of tokens of a warpgroup's sums, activated and rounded, to `buffer` as (token, column)."""
    dtype = buffer.element_type
    lane = cute.arch.lane_idx()
    warp_of_group = cute.arch.warp_idx() % 4
    columns = cutlass.const_expr(product.chunk // 8)  # of 8 tokens
    halves = cutlass.const_expr(1 if product.gated else 2)  # blocks of 8 rows that a warp has of a slab
    matrices = cutlass.const_expr(min(4, halves * (columns & -columns)))  # of one instruction
    atom = cute.make_copy_atom(warp.StMatrix8x8x16bOp(transpose=True, num_matrices=matrices), dtype)
    matrix = (lane // 8) % matrices  # lanes 8 q to 8 q + 7 give the addresses of the q-th block
    token = matrix // halves * 8 + lane % 8
    place = token * product.pitch + (warp_of_group * halves + matrix % halves) * 8
    for slab in cutlass.range_constexpr(product.tile.slabs):
        for first in cutlass.range_constexpr(0, columns, matrices // halves):
            values = cute.make_rmem_tensor((2 * matrices,), Float32)
            for n in cutlass.range_constexpr(matrices // halves):
                blocks = blocks_of(sums, slab, chunk * columns + first + n, product)
                for half in cutlass.range_constexpr(halves):
                    for i in cutlass.range_constexpr(2):
                        values[(n * halves + half) * 2 + i] = blocks[half][i]
            rounded = cute.make_rmem_tensor((2 * matrices,), dtype)
            rounded.store(values.load().to(dtype))
            offset = place + (first * 8 * product.pitch + slab * (product.width // product.tile.slabs))
            target = buffer.iterator + cute.assume(offset, divby=VECTOR)
            cute.copy(atom, rounded, cute.make_tensor(target, rounded.layout))


@cute.jit
def store_chunk(buffer: cute.Tensor, out: cute.Tensor, row: Any, end: Any, column: Any, product: cutlass.Constexpr):
    """Copy a chunk of (token, column) from `buffer` to rows `row` to `end` of out (R, columns) from `column` on."""
    thread = cute.arch.thread_idx()[0] % WARPGROUP
    lanes = cutlass.const_expr(product.width // VECTOR)  # of a token
    passes = cutlass.const_expr(math.ceil(product.chunk * lanes / WARPGROUP))
    token, part = thread // lanes, thread % lanes * VECTOR
    held = cute.make_rmem_tensor((VECTOR, passes), out.element_type)
    for n in cutlass.range_constexpr(passes):
        mine = token + n * (WARPGROUP // lanes)
        source = buffer.iterator + cute.assume(mine * product.pitch + part, divby=VECTOR)
        vector = cute.make_tensor(source, cute.make_layout(VECTOR))
        if cutlass.const_expr(product.chunk * lanes % WARPGROUP == 0):
            cute.autovec_copy(vector, held[None, n])
        else:
            if mine < product.chunk:
                cute.autovec_copy(vector, held[None, n])
    for n in cutlass.range_constexpr(passes):
        mine = token + n * (WARPGROUP // lanes)
        if (mine < product.chunk) & (row + mine < end) & (column + part < product.columns):
            offset = Int64(row + mine) * product.columns + Int64(column + part)
            target = out.iterator + cute.assume(offset, divby=VECTOR)
            cute.autovec_copy(held[None, n], cute.make_tensor(target, cute.make_layout(VECTOR)))


@cute.jit
def release(empty: cute.Pointer):
    """Say that the calling warp has read a stage."""
    if cute.arch.lane_idx() == 0:
        cute.arch.mbarrier_arrive(empty)


@cute.kernel
def product_kernel(
    w_atom: cute.CopyAtom,
    w: cute.Tensor,
    x_atom: cute.CopyAtom,
    x: cute.Tensor,
    offsets: cute.Tensor,
    out: cute.Tensor,
    w_layout: cute.ComposedLayout,
    x_layout: cute.ComposedLayout,
    mma: cute.TiledMma,
    product: cutlass.Constexpr,
):
    """A thread block: tiles blockIdx, blockIdx + gridDim, ... Warpgroup 0 loads, the others multiply and store."""
    tile_shape, stages = cutlass.const_expr(product.tile), cutlass.const_expr(product.stages)
    steps = cutlass.const_expr(math.ceil(product.inner / STEP))
    thread = cute.arch.thread_idx()[0]
    warp_index = cute.arch.make_warp_uniform(thread // WARP)
    group = cute.arch.make_warp_uniform(thread // WARPGROUP)
    allocator = cutlass.memory.SmemAllocator()
    w_stages = allocator.allocate_tensor(out.element_type, w_layout.outer, byte_alignment=1024, swizzle=w_layout.inner)
    x_stages = allocator.allocate_tensor(out.element_type, x_layout.outer, byte_alignment=1024, swizzle=x_layout.inner)
    buffers = allocator.allocate_tensor(
        out.element_type, cute.make_layout((product.chunk * product.pitch, tile_shape.warpgroups)), byte_alignment=128
    )
    full = allocator.allocate_tensor(Int64, cute.make_layout(stages), byte_alignment=8).iterator
    empty = allocator.allocate_tensor(Int64, cute.make_layout(stages), byte_alignment=8).iterator
    starts = allocator.allocate_tensor(Int32, cute.make_layout(product.experts + 1), byte_alignment=4)
    first_tiles = allocator.allocate_tensor(Int32, cute.make_layout(product.experts + 1), byte_alignment=4)

    if warp_index == 0:
        cpasync.prefetch_descriptor(w_atom)
        cpasync.prefetch_descriptor(x_atom)
        count_tiles(offsets, starts, first_tiles, product)
    if thread == WARP:
        for i in cutlass.range_constexpr(stages):
            cute.arch.mbarrier_init(full + i, 1)
            cute.arch.mbarrier_init(empty + i, 4 * tile_shape.warpgroups)
        cute.arch.mbarrier_init_fence()
    cute.arch.sync_threads()
    tiles = first_tiles[product.experts] * product.parts
    tile, stride = cute.arch.block_idx()[0], cute.arch.grid_dim()[0]

    if group == 0:
        if cutlass.const_expr(tile_shape.warpgroups > 1):
            cute.arch.setmaxregister_decrease(PRODUCER_REGISTERS)
        if warp_index == 0:
            w_tiles = cute.local_tile(w, (tile_shape.rows, STEP), (None, None, None))
            w_to, w_from = cpasync.tma_partition(
                w_atom, 0, cute.make_layout(1), cute.group_modes(w_stages, 0, 2), cute.group_modes(w_tiles, 0, 2)
            )
            index, phase = Int32(0), Int32(1)
            while tile < tiles:
                expert, row, _, part = locate(tile, starts, first_tiles, product)
                x_tiles = cute.local_tile(cute.domain_offset((row, 0), x), (tile_shape.tokens, STEP), (0, None))
                x_to, x_from = cpasync.tma_partition(
                    x_atom, 0, cute.make_layout(1), cute.group_modes(x_stages, 0, 2), cute.group_modes(x_tiles, 0, 2)
                )
                for k in cutlass.range(steps, unroll=1):
                    cute.arch.mbarrier_wait(empty + index, phase)
                    with cute.arch.elect_one():
                        cute.arch.mbarrier_arrive_and_expect_tx(full + index, product.stage_bytes)
                    cute.copy(w_atom, w_from[None, part, k, expert], w_to[None, index], tma_bar_ptr=full + index)
                    cute.copy(x_atom, x_from[None, k], x_to[None, index], tma_bar_ptr=full + index)
                    index, phase = advance(index, phase, stages)
                tile += stride
    else:
        if cutlass.const_expr(tile_shape.warpgroups > 1):
            cute.arch.setmaxregister_increase(CONSUMER_REGISTERS)
        consumer = group - 1
        mine = mma.get_slice(0)
        rows = cutlass.const_expr(SLAB * tile_shape.slabs)
        w_mine = cute.local_tile(w_stages, (rows, STEP, stages), (consumer, 0, 0))
        a = mma.make_fragment_A(mine.partition_A(w_mine))
        b = mma.make_fragment_B(mine.partition_B(x_stages))
        sums = cute.make_rmem_tensor(mma.partition_shape_C((rows, tile_shape.tokens)), Float32)
        plain = cute.make_layout((2, 2, tile_shape.tokens // 8, tile_shape.slabs))
        finished = cute.make_tensor(sums.iterator, plain)  # the same registers
        mma.set(warpgroup.Field.ACCUMULATE, True)
        buffer = buffers[None, consumer]
        index, phase = Int32(0), Int32(0)
        while tile < tiles:
            _, row, end, part = locate(tile, starts, first_tiles, product)
            sums.fill(0.0)
            warpgroup.fence()
            previous = index
            for k in cutlass.range(steps, unroll=1):
                cute.arch.mbarrier_wait(full + index, phase)
                for n in cutlass.range_constexpr(STEP // 16):
                    cute.gemm(mma, sums, a[None, None, n, index], b[None, None, n, index], sums)
                warpgroup.commit_group()
                if k > 0:
                    warpgroup.wait_group(1)
                    release(empty + previous)
                previous = index
                index, phase = advance(index, phase, stages)
            warpgroup.wait_group(0)
            release(empty + previous)

            column = (part * tile_shape.warpgroups + consumer) * product.width
            for chunk in cutlass.range_constexpr(tile_shape.tokens // product.chunk):
                first = row + chunk * product.chunk
                if first < end:
                    cute.arch.barrier(barrier_id=group, number_of_threads=WARPGROUP)  # all have read the chunk before
                    transpose(finished, buffer, chunk, product)
                    cute.arch.barrier(barrier_id=group, number_of_threads=WARPGROUP)
                    store_chunk(buffer, out, first, end, column, product)
            tile += stride


@cute.jit
def product_host(
    x: cute.Tensor,
    offsets: cute.Tensor,
    w: cute.Tensor,
    out: cute.Tensor,
    blocks: Int32,
    product: cutlass.Constexpr,
    stream: Any,
):
    inner, columns, experts = product.inner, product.columns, product.experts
    if cutlass.const_expr(product.gated):
        shape = ((8, 2, columns // 8), inner, experts)
        stride = ((inner, columns * inner, 8 * inner), 1, 2 * columns * inner)
    else:
        shape, stride = (columns, inner, experts), (inner, 1, columns * inner)
    weights = cute.make_tensor(w.iterator, cute.make_layout(shape, stride=stride))
    tile, dtype = product.tile, w.element_type
    atom = warpgroup.make_smem_layout_atom(warpgroup.SmemLayoutAtomKind.K_SW128, dtype)
    w_layout = cute.tile_to_shape(atom, (tile.rows, STEP, product.stages), order=(0, 1, 2))
    x_layout = cute.tile_to_shape(atom, (tile.tokens, STEP, product.stages), order=(0, 1, 2))
    load = cpasync.CopyBulkTensorTileG2SOp()
    w_atom, w_map = cpasync.make_tiled_tma_atom(load, weights, w_layout, (tile.rows, STEP))
    x_atom, x_map = cpasync.make_tiled_tma_atom(load, x, x_layout, (tile.tokens, STEP))
    k_major, shared = cute.nvgpu.OperandMajorMode.K, warpgroup.OperandSource.SMEM
    op = warpgroup.MmaF16BF16Op(dtype, Float32, (SLAB, tile.tokens, 16), shared, k_major, k_major)
    mma = cute.make_tiled_mma(cute.make_mma_atom(op))
    product_kernel(w_atom, w_map, x_atom, x_map, offsets, out, w_layout, x_layout, mma, product).launch(
        grid=(blocks, 1, 1), block=(product.threads, 1, 1), min_blocks_per_mp=1, stream=stream
    )


@cached
def compile_for(arch: str, dtype: str, product: Product, keep: bool = False) -> Any:
    """Compile one product for one architecture and shape class (no GPU needed).

    The result is called with x (R, inner), offsets (E + 1,) int32, w (E, N, inner), out (R, columns), and the number of
    thread blocks.
    """
    element, rows = DTYPES[dtype], cute.sym_int()
    wide = (2 if product.gated else 1) * product.columns
    weights = cute.runtime.make_fake_compact_tensor(
        element, (product.experts, wide, product.inner), stride_order=(2, 1, 0), assumed_align=16
    )
    arguments = [
        fake_tensor(element, rows, product.inner),
        fake_tensor(Int32, product.experts + 1),
        weights,
        fake_tensor(element, rows, product.columns),
        Int32(1),
        product,
    ]
    return compile_kernel(product_host, arguments, arch, keep)
