"""The kernel of a grouped GEMM for Hopper: out[r, c] = f(sum_k w[e, c, k] x[r, k]) for the rows r of each expert e, offsets[e] <= r < offsets[e + 1].

Strategy: one persistent, warp-specialised thread block per multiprocessor. Its producer brings tiles of weights and of token rows through a
ring of stages in shared memory (`loads`, `pipeline`); one or two consumer warpgroups multiply them (`mainloop`) and store the result
(`epilogue`) while the next tile is loaded. A and B are swapped: a tile of the result is up to 256 rows of weights (M) times 8 to 256 tokens
(N). N has steps of 8, M has steps of 64, so that few tokens per expert waste little, and an expert's weights are read once where its
tokens fit one tile.

Two warpgroups either share each tile, and the tensor cores rest during the epilogue, or take tiles in turn (ping-pong): one is in its main
loop while the other is in its epilogue. A named barrier per warpgroup hands the tensor cores over, so that a tile is finished early
rather than two late; each warpgroup skips the stages of the other's tiles.

A tile may have several variants (`Tile.narrowest`): an expert's rows are then spread evenly over its tiles, and each multiplies
no more tokens than the next multiple of 8. Variants differ in their main loop alone.

Two thread blocks may form a cluster (`Tile.cluster`): they take neighbouring tiles of an expert's rows and the same weights, of
which each loads half, for both (TMA multicast). So L2 sends 36 instead of 52 KB per block and stage of 256 x 160, and less power
goes into moving data.

Gate and up: the tensor map sees w13 as (8 rows, gate or up, I / 8, H, E), so that a box of it lays 8 gate rows above the 8 up
rows that belong to them. A thread's accumulators of rows r and r + 8 of 16 are then a gate and its up, and the activation
needs no exchange; boxes are clipped at I.

Two GEMMs may overlap (programmatic dependent launch): blocks of the second start on multiprocessors that the first has left,
count tiles and load weights, and wait for the end of the first before they load its rows. With few rows the kernels around them may
overlap with them as well: the first GEMM sets up its barriers while rows are still being ordered, and combine starts only after the
second GEMM has issued all its loads, so that it does not compete with them.

Variants are subclasses that override the hooks below: `training`, `fp8`, `quantised`.

Invariants:
- Whatever overlapping kernels did not write themselves is complete before the first of them starts: it is launched in the ordinary
  way. What one of them wrote, another may read without waiting for it if it starts only after a third has: the second GEMM reads
  `offsets` so, as the first lets it start after its own wait. Each ends after the previous one, for whose end it waits in every
  block, and writes nothing that an earlier one reads.
- Rows beyond an expert's last are multiplied (they are another expert's or its own, or past the tensor and zero) and never
  stored; accumulators of different tokens do not mix.
- A stage is filled again only after each warp that multiplies it, in all blocks of a cluster, has arrived at its `empty` barrier,
  which it does after the `wgmma.wait_group` that covers its reads.
- Ping-pong, a warpgroup waits for a stage once the other has seen all earlier ones, as a parity tells a phase from the next only.
- Elements beyond K are zero in both operands, so the last stage may overhang.
"""

from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Int32
from cutlass.cute.nvgpu import cpasync, warpgroup

from moe_routing_kernels.cute import WARP
from moe_routing_kernels.cute.cache import DTYPES, cached, compile_kernel, fake_tensor
from moe_routing_kernels.gemm.sm90 import ARCH, epilogue
from moe_routing_kernels.gemm.sm90.loads import load_gathered, load_packed, load_weights, weight_boxes
from moe_routing_kernels.gemm.sm90.mainloop import accumulator, dispatch, mainloop
from moe_routing_kernels.gemm.sm90.schedule import (
    EPILOGUE,
    MAINLOOP,
    allocate_barriers,
    begin_at,
    count_tiles,
    init_barriers,
    locate,
    n_of,
    skip,
)
from moe_routing_kernels.gemm.sm90.tile import MMA_M, TILE_K, WARPGROUP, GroupedGemm


class Operands(NamedTuple):
    """Operands of the producer: the tensor maps of weights and rows, and the numbers of rows that are gathered."""

    w_atom: Any
    w: Any
    x_atom: Any  # None where rows are gathered
    x: Any
    order: Any  # None where rows lie in order
    w_layout: Any  # of stages in shared memory
    x_layout: Any


class Results(NamedTuple):
    """Tensors that the consumers read and write."""

    biases: Any  # (E, N) or None
    out: Any  # (R, columns)


class Shared(NamedTuple):
    """Shared memory: the stages of both operands, and the epilogue's buffers, one per warpgroup."""

    w: Any
    x: Any
    buffers: Any


class GroupedGemmKernel:
    """A grouped GEMM of 16-bit operands; a variant overrides the hooks `__call__`, `allocate` to `store`."""

    def __init__(self, gemm: GroupedGemm) -> None:
        """Keep the configuration, on which alone the kernel depends, with its operands' dtype."""
        self.gemm = gemm

    @cute.jit
    def __call__(
        self,
        x: cute.Tensor,
        order: cute.Tensor | None,
        offsets: cute.Tensor,
        w: cute.Tensor,
        biases: cute.Tensor | None,
        out: cute.Tensor,
        blocks: Int32,
        stream: Any,
    ):
        """Launch it: x (R, inner), or (T, inner) with order (R,), offsets (E + 1,), w (E, N, inner), biases (E, N) -> out (R, columns)."""
        gemm, tile = self.gemm, self.gemm.tile
        w_layout, x_layout = (
            k_major_stages(rows, TILE_K, gemm.stages, w.element_type) for rows in (tile.m, tile.tokens)
        )
        load = cpasync.CopyBulkTensorTileG2SOp()
        to_cluster = cpasync.CopyBulkTensorTileG2SMulticastOp() if tile.cluster > 1 else load
        weights = cute.make_tensor(w.iterator, weight_layout(gemm))
        w_atom, w_map = cpasync.make_tiled_tma_atom(to_cluster, weights, w_layout, (tile.m, TILE_K), tile.cluster)
        x_atom, x_map = None, x
        if cutlass.const_expr(not gemm.top_k):
            x_atom, x_map = cpasync.make_tiled_tma_atom(load, x, x_layout, (tile.tokens, TILE_K))
        operands = Operands(w_atom, w_map, x_atom, x_map, order, w_layout, x_layout)
        self.kernel(operands, offsets, Results(biases, out)).launch(
            grid=(blocks, 1, 1),
            block=(gemm.threads, 1, 1),
            cluster=(tile.cluster, 1, 1) if tile.cluster > 1 else None,
            min_blocks_per_mp=1,
            stream=stream,
            use_pdl=bool(gemm.waits),
        )

    @cute.kernel
    def kernel(self, operands: Any, offsets: cute.Tensor, results: Any):
        """A thread block: tiles blockIdx, blockIdx + gridDim, ... (of clusters)."""
        gemm, tile_shape = cutlass.const_expr(self.gemm), cutlass.const_expr(self.gemm.tile)
        thread = cute.arch.thread_idx()[0]
        warp_index = cute.arch.make_warp_uniform(thread // WARP)
        group = cute.arch.make_warp_uniform(thread // WARPGROUP)
        allocator = cutlass.memory.SmemAllocator()
        shared = self.allocate(allocator, operands, results)
        full, empty = allocate_barriers(allocator, gemm.stages)
        starts = allocator.allocate_tensor(Int32, cute.make_layout(gemm.experts + 1), byte_alignment=4)
        first_tiles = allocator.allocate_tensor(Int32, cute.make_layout(gemm.experts + 1), byte_alignment=4)

        # prologue: tiles are counted, barriers are ready
        if warp_index == 0:
            self.prefetch(operands)
            if cutlass.const_expr(gemm.waits == "offsets"):
                cute.arch.griddepcontrol_wait()
            count_tiles(offsets, starts, first_tiles, gemm)
        if thread == WARP:
            init_barriers(full, empty, gemm.stages, gemm.arrivals, 4 * tile_shape.sharing * tile_shape.cluster)
        if cutlass.const_expr(tile_shape.cluster > 1):
            cute.arch.cluster_arrive()
            cute.arch.cluster_wait()
        else:
            cute.arch.sync_threads()
        if cutlass.const_expr(gemm.signals == "early"):
            cute.arch.griddepcontrol_launch_dependents()  # blocks of the next kernel start where those of this one end
        tiles = first_tiles[gemm.experts] * gemm.m_tiles
        tile, stride = begin_at(gemm)

        if group == gemm.producer:
            if cutlass.const_expr(gemm.moves_registers):
                cute.arch.setmaxregister_decrease(gemm.registers[0])
            self.produce(operands, shared, warp_index, (full, empty, starts, first_tiles, tiles, gemm))
        else:
            if cutlass.const_expr(gemm.moves_registers):
                cute.arch.setmaxregister_increase(gemm.registers[1])
            consumer = group if cutlass.const_expr(gemm.producer) else group - 1
            share = consumer if cutlass.const_expr(tile_shape.sharing > 1) else 0  # of the tile's weights or tokens
            acc = self.accumulator()
            index, phase, slot = Int32(0), Int32(0), Int32(0)
            if cutlass.const_expr(tile_shape.pingpong):
                if consumer == 1:
                    tile += stride
                    index, phase = skip(index, phase, gemm.k_tiles, gemm.stages)
                    cute.arch.barrier_arrive(barrier_id=MAINLOOP, number_of_threads=2 * WARPGROUP)  # the other begins
                stride *= 2
            while tile < tiles:
                expert, row, end, m_tile = locate(tile, starts, first_tiles, gemm)
                part = share if cutlass.const_expr(tile_shape.parts > 1) else 0
                column = (m_tile * tile_shape.parts + part) * gemm.width
                self.begin(acc, results, expert, column)
                # main loop
                place = (expert, row, end, column)
                stage = (full, empty, index, phase)
                self.multiply(acc, operands, shared, place, stage, share, consumer, first_tiles[0])
                index, phase = skip(index, phase, gemm.k_tiles * (2 if tile_shape.pingpong else 1), gemm.stages)
                # epilogue
                self.store(acc, shared, results, (row, end, column), share, consumer, slot)
                if cutlass.const_expr(gemm.slots > 1):
                    slot = 1 - slot
                tile += stride
        if cutlass.const_expr(tile_shape.cluster > 1):  # none ends while others write to its memory
            cute.arch.cluster_arrive(aligned=False)
            cute.arch.cluster_wait()

    def allocate(self, allocator: Any, operands: Any, results: Any) -> Any:
        """Shared memory but for barriers and the schedule's tables."""
        dtype = results.out.element_type
        stages = [
            allocator.allocate_tensor(dtype, layout.outer, byte_alignment=1024, swizzle=layout.inner)
            for layout in (operands.w_layout, operands.x_layout)
        ]
        return Shared(*stages, self.allocate_buffers(allocator, dtype))

    def allocate_buffers(self, allocator: Any, dtype: Any) -> Any:
        """The epilogue's buffers, (elements, warpgroups)."""
        elements = self.gemm.epi_elements(self.gemm.epi_tokens)
        return allocator.allocate_tensor(
            dtype, cute.make_layout((elements, self.gemm.tile.warpgroups)), byte_alignment=128
        )

    @cute.jit
    def prefetch(self, operands: Any):
        """By one warp: fetch the descriptors of the tensor maps."""
        cpasync.prefetch_descriptor(operands.w_atom)
        if cutlass.const_expr(operands.x_atom is not None):
            cpasync.prefetch_descriptor(operands.x_atom)

    @cute.jit
    def produce(self, operands: Any, shared: Any, warp_index: Int32, ring: tuple):
        """By the producer's warpgroup: load the block's tiles."""
        weights = weight_boxes(operands.w_atom, operands.w, shared.w, self.gemm)
        if cutlass.const_expr(self.gemm.top_k):
            load_gathered(weights, operands.x, operands.order, shared.x, *ring)
        elif warp_index == 0:
            load_packed(load_weights, weights, operands.x_atom, operands.x, shared.x, *ring)

    def accumulator(self) -> Any:
        """The accumulators of a consumer warpgroup."""
        return accumulator(self.gemm)

    @cute.jit
    def begin(self, acc: cute.Tensor, results: Any, expert: Int32, column: Int32):
        """By a consumer warpgroup: set the accumulators of a tile."""
        epilogue.init_accumulator(acc, results.biases, expert, column, self.gemm)

    @cute.jit
    def multiply(
        self,
        acc: cute.Tensor,
        operands: Any,
        shared: Any,
        place: tuple,
        stage: tuple,
        share: Any,
        consumer: Int32,
        zero: Int32,
    ):
        """By a consumer warpgroup: the main loop of a tile, whose place is (expert, row, end, column), from a stage on.

        `zero` is 0, which only the device knows.
        """
        gemm, tile = cutlass.const_expr(self.gemm), cutlass.const_expr(self.gemm.tile)
        _, row, end, _ = place
        w_stages = cute.local_tile(shared.w, (MMA_M * tile.m_atoms, TILE_K, gemm.stages), (share, 0, 0))
        dispatch(mainloop, n_of(row, end, tile), tile.n_sizes, (w_stages, shared.x, acc, *stage, consumer, gemm))

    @cute.jit
    def store(
        self, acc: cute.Tensor, shared: Any, results: Any, place: tuple, share: Any, consumer: Int32, slot: Int32
    ):
        """By a consumer warpgroup: the epilogue of a tile, whose place is (row, end, column)."""
        gemm, buffer = cutlass.const_expr(self.gemm), self.buffer(shared, consumer)
        row, end, column = place
        if cutlass.const_expr(gemm.tile.by_warp):
            self.store_by_warp(acc, buffer, results.out, place)
        for subtile in cutlass.range_constexpr(0 if gemm.tile.by_warp else gemm.tile.tokens // gemm.epi_tokens):
            first = row + subtile * gemm.epi_tokens
            if first < end:
                # All threads have read the subtile before.
                cute.arch.barrier(barrier_id=EPILOGUE + consumer, number_of_threads=WARPGROUP)
                epilogue.transpose(epilogue.activated(acc, gemm), buffer, 0, subtile, gemm)
                cute.arch.barrier(barrier_id=EPILOGUE + consumer, number_of_threads=WARPGROUP)
                epilogue.store(buffer, 0, results.out, 0, gemm.columns, first, end, column, gemm)

    @cute.jit
    def store_by_warp(self, acc: cute.Tensor, buffer: Any, out: cute.Tensor, place: tuple):
        """By each warp of a consumer warpgroup: the epilogue of a tile, 64 tokens at a time."""
        gemm = cutlass.const_expr(self.gemm)
        row, end, column = place
        m_atoms = cutlass.const_expr(1 if gemm.blocked else gemm.tile.m_atoms)
        for first in cutlass.range_constexpr(0, gemm.tile.tokens // 16, 4):
            sixteens = cutlass.const_expr(range(first, min(first + 4, gemm.tile.tokens // 16)))
            blocks = cutlass.const_expr([(m_atom, sixteen) for sixteen in sixteens for m_atom in range(m_atoms)])
            if row + 16 * first < end:
                epilogue.store_by_warp(epilogue.activated(acc, gemm), buffer, out, blocks, row, end, column, gemm)

    def buffer(self, shared: Any, consumer: Any) -> Any:
        """The epilogue's buffer of a consumer warpgroup."""
        return shared.buffers[None, consumer]


def k_major_stages(rows: int, tile_k: int, stages: int, dtype: Any) -> Any:
    """The layout in shared memory of the stages of an operand, (rows, tile_k, stages), swizzled as TMA writes and wgmma reads it."""
    atom = warpgroup.make_smem_layout_atom(warpgroup.SmemLayoutAtomKind.K_SW128, dtype)
    return cute.tile_to_shape(atom, (rows, tile_k, stages), order=(0, 1, 2))


def weight_layout(gemm: GroupedGemm) -> Any:
    """The layout of weights (E, N, inner) as the tensor map sees it, (N, inner, E): gates and ups 8 and 8, or 64 and 64, in turns."""
    inner, columns, experts = gemm.inner, gemm.columns, gemm.experts
    if gemm.blocked:
        shape = ((MMA_M, 2, columns // MMA_M), inner, experts)
        return cute.make_layout(shape, stride=((inner, columns * inner, MMA_M * inner), 1, 2 * columns * inner))
    if gemm.gated:
        shape = ((8, 2, columns // 8), inner, experts)
        return cute.make_layout(shape, stride=((inner, columns * inner, 8 * inner), 1, 2 * columns * inner))
    return cute.make_layout((columns, inner, experts), stride=(inner, 1, columns * inner))


@cached
def compile_for(arch: str, dtype: str, gemm: GroupedGemm, keep: bool = False) -> Any:
    """Compile one GEMM for one architecture and shape class (no GPU needed).

    The result is called with x (R, inner), None, offsets (E + 1,) int32, w (E, N, inner), biases (E, N) or None, out
    (R, columns), and the number of thread blocks; a GEMM that gathers with x (T, inner) and order (R,) int32 in the first
    two places.
    """
    element, rows = DTYPES[dtype], cute.sym_int()
    arguments = [
        fake_tensor(element, cute.sym_int() if gemm.top_k else rows, gemm.inner),
        fake_tensor(Int32, rows) if gemm.top_k else None,
        fake_tensor(Int32, gemm.experts + 1),
        fake_tensor(element, gemm.experts, gemm.wide, gemm.inner),
        fake_tensor(element, gemm.experts, gemm.wide) if gemm.biased else None,
        fake_tensor(element, rows, gemm.columns),
        Int32(1),
    ]
    return compile_kernel(GroupedGemmKernel(gemm), arguments, arch, keep, only=ARCH)
