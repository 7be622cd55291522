"""Grouped GEMMs of e4m3 rows and e4m3 weights with scales of 128 numbers: a variant of `grouped_gemm`.

out[r, c] = f(sum_b s[r, b] t[e, c / 128, b] sum_{k in b} w[e, c, k] x[r, k]) for the rows r of each expert e, offsets[e] <= r < offsets[e + 1],
and blocks b of 128 neighbours k; s are the scales of rows, t of 128 x 128 weights.

Strategy, tiles and invariants are those of `grouped_gemm`, whose loads are used as they are: tensor maps see pairs of numbers as one of 16
bits, and a stage is 128 bytes of each row. The three warps that have nothing to load there bring the rows' scales. Rows are packed, tiles are
shared and have one variant, and GEMMs do not overlap. The accumulators of a block and those of the tile take registers both, so a tile has
two MMAs of 64 rows times up to 128 tokens per warpgroup. With many rows A and B are not swapped: tokens are on the M side (`fp8_upright`), and
the warpgroups may halve a tile's tokens instead of its weights (`fp8_across`).
"""

from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float8E4M3FN, Float32, Int32, Uint8
from cutlass.cute.nvgpu import cpasync

from moe_routing_kernels.cute.cache import DTYPES, cached, compile_kernel, fake_tensor
from moe_routing_kernels.gemm.sm90 import ARCH, epilogue, fp8_across, fp8_quantise, fp8_upright
from moe_routing_kernels.gemm.sm90.fp8_mainloop import BLOCK, Fp8Gemm, load_scales, mainloop, scale_places
from moe_routing_kernels.gemm.sm90.grouped_gemm import GroupedGemmKernel, k_major_stages, weight_layout
from moe_routing_kernels.gemm.sm90.loads import load_packed, load_weights, weight_boxes
from moe_routing_kernels.gemm.sm90.tile import MMA_M, TILE_K


class Fp8Operands(NamedTuple):
    """Operands of the producer, and the scales of weights, which consumers read."""

    w_atom: Any
    w: Any
    w_scales: Any  # of all experts, flat
    x_atom: Any
    x: Any
    scales: Any  # (R, blocks)
    w_pairs: Any  # layouts of the stages in pairs of numbers, as TMA writes them
    x_pairs: Any
    w_layout: Any  # the same bytes in numbers, as wgmma reads them
    x_layout: Any


class Fp8Results(NamedTuple):
    """Tensors that the consumers read and write."""

    biases: Any  # (E, N) or None
    out: Any  # (R, columns)
    out_scales: Any  # (R, columns / 128) where the results are quantised


class Fp8Shared(NamedTuple):
    """Shared memory: stages of both operands and of the rows' scales, the epilogue's buffers, and largest values that are exchanged."""

    w: Any
    x: Any
    x_scales: Any
    buffers: Any
    largest: Any


class Fp8GemmKernel(GroupedGemmKernel):
    """The kernel of an `Fp8Gemm`."""

    @cute.jit
    def __call__(
        self,
        x: cute.Tensor,
        scales: cute.Tensor,
        offsets: cute.Tensor,
        w: cute.Tensor,
        w_scales: cute.Tensor,
        biases: cute.Tensor | None,
        out: cute.Tensor,
        out_scales: cute.Tensor | None,
        blocks: Int32,
        stream: Any,
    ):
        """Launch it, with tensors as for `compile_for`."""
        gemm, tile = self.gemm, self.gemm.tile
        weights = cute.make_tensor(cute.recast_ptr(w.iterator, dtype=BFloat16), weight_layout(gemm))
        pairs = cute.make_layout((x.shape[0], gemm.inner), stride=(gemm.inner, 1))
        rows = cute.make_tensor(cute.recast_ptr(x.iterator, dtype=BFloat16), pairs)
        flat = cute.make_tensor(w_scales.iterator, cute.make_layout(gemm.experts * gemm.blocks * gemm.k_tiles))
        w_pairs, x_pairs = (k_major_stages(size, TILE_K, gemm.stages, BFloat16) for size in (tile.m, tile.tokens))
        w_layout, x_layout = (k_major_stages(size, BLOCK, gemm.stages, Float8E4M3FN) for size in (tile.m, tile.tokens))
        load = cpasync.CopyBulkTensorTileG2SOp()
        w_atom, w_map = cpasync.make_tiled_tma_atom(load, weights, w_pairs, (tile.m, TILE_K))
        x_atom, x_map = cpasync.make_tiled_tma_atom(load, rows, x_pairs, (tile.tokens, TILE_K))
        maps = (w_atom, w_map, flat, x_atom, x_map, scales)
        operands = Fp8Operands(*maps, w_pairs, x_pairs, w_layout, x_layout)
        self.kernel(operands, offsets, Fp8Results(biases, out, out_scales)).launch(
            grid=(blocks, 1, 1), block=(gemm.threads, 1, 1), min_blocks_per_mp=1, stream=stream
        )

    def allocate(self, allocator: Any, operands: Any, results: Any) -> Any:
        """Shared memory but for barriers and the schedule's tables."""
        gemm, tile = self.gemm, self.gemm.tile
        w_stages, x_stages = (
            allocator.allocate_tensor(BFloat16, layout.outer, byte_alignment=1024, swizzle=layout.inner)
            for layout in (operands.w_pairs, operands.x_pairs)
        )
        x_scales = allocator.allocate_tensor(Float32, cute.make_layout((tile.tokens, gemm.stages)), byte_alignment=128)
        buffers = self.allocate_buffers(allocator, results.out.element_type)
        largest = None
        if gemm.quantises:
            places = cute.make_layout((tile.tokens, tile.warpgroups, gemm.slots))
            largest = allocator.allocate_tensor(Float32, places, byte_alignment=4)
        return Fp8Shared(w_stages, x_stages, x_scales, buffers, largest)

    @cute.jit
    def produce(self, operands: Any, shared: Any, warp_index: Int32, ring: tuple):
        """By the producer's warpgroup: one warp loads weights and rows, three load the rows' scales."""
        if warp_index == 0:
            weights = weight_boxes(operands.w_atom, operands.w, shared.w, self.gemm)
            load_packed(load_weights, weights, operands.x_atom, operands.x, shared.x, *ring)
        else:
            load_scales(operands.scales, shared.x_scales, *ring)

    def accumulator(self) -> Any:
        """Upright, (2 columns, 2 tokens 8 apart, columns / 8, MMAs of 64 tokens)."""
        tile = self.gemm.tile
        if not self.gemm.upright:
            return super().accumulator()
        return cute.make_rmem_tensor((2, 2, MMA_M * tile.m_atoms // 8, self.gemm.mmas), Float32)

    @cute.jit
    def begin(self, acc: cute.Tensor, results: Any, expert: Int32, column: Int32):
        """By a consumer warpgroup: set the accumulators of a tile; upright, there are no biases."""
        if cutlass.const_expr(self.gemm.upright):
            acc.fill(0.0)
        else:
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
        """By a consumer warpgroup: the main loop of a tile, whose place is (expert, row, end, column), from a stage on."""
        gemm = cutlass.const_expr(self.gemm)
        expert, row, end, column = place
        w_stages, x_stages = in_numbers(shared.w, operands.w_layout), in_numbers(shared.x, operands.x_layout)
        if cutlass.const_expr(not gemm.tile.across):
            of_group = (MMA_M * gemm.tile.m_atoms, BLOCK, gemm.stages)
            w_stages = cute.local_tile(w_stages, of_group, (share, 0, 0))
        stages = (w_stages, x_stages, shared.x_scales, operands.w_scales)
        if cutlass.const_expr(gemm.tile.across):
            rows = cute.arch.make_warp_uniform(end - row - share * MMA_M)
            fp8_across.mainloop(*stages, expert, column, acc, rows, share, *stage, gemm)
        elif cutlass.const_expr(gemm.upright):
            places = fp8_upright.scale_places(expert, column, gemm)
            live = cute.arch.make_warp_uniform((end - row + (MMA_M - 1)) // MMA_M)
            fp8_upright.mainloop(*stages, places, acc, live, share, *stage, gemm)
        else:
            mainloop(*stages, scale_places(expert, column, gemm), acc, *stage, gemm)

    @cute.jit
    def store(
        self, acc: cute.Tensor, shared: Any, results: Any, place: tuple, share: Any, consumer: Int32, slot: Int32
    ):
        """By a consumer warpgroup: the epilogue of a tile."""
        gemm, buffer = cutlass.const_expr(self.gemm), self.buffer(shared, consumer)
        if cutlass.const_expr(gemm.tile.across):
            row, end, column = place
            place = (row + share * MMA_M, end, column)
        if cutlass.const_expr(gemm.quantises):
            to = (results.out, results.out_scales, *place)
            fp8_quantise.store(acc, buffer, shared.largest, slot, *to, share, gemm)
        elif cutlass.const_expr(gemm.upright):
            fp8_upright.store(acc, buffer, results.out, *place, gemm)
        else:
            GroupedGemmKernel.store(self, acc, shared, results, place, share, consumer, slot)


def in_numbers(stages: cute.Tensor, layout: Any) -> cute.Tensor:
    """Stages of pairs as numbers."""
    return cute.make_tensor(cute.recast_ptr(stages.iterator, layout.inner, dtype=Float8E4M3FN), layout.outer)


@cached
def compile_for(arch: str, dtype: str, gemm: Fp8Gemm, keep: bool = False) -> Any:
    """Compile one GEMM for one architecture and shape class (no GPU needed).

    The result is called with bytes x (R, 2 inner), scales (R, blocks along K) float32, offsets (E + 1,) int32, bytes w (E, N, 2 inner), their
    scales (E, N / 128, K / 128) float32, biases (E, N) or None, out (R, columns), None, and the number of thread blocks; where it quantises,
    with bytes out (R, columns) and their scales (R, columns / 128) float32.
    """
    element, rows, experts = DTYPES[dtype], cute.sym_int(), gemm.experts
    arguments = [
        fake_tensor(Uint8, rows, 2 * gemm.inner),
        fake_tensor(Float32, rows, gemm.k_tiles),
        fake_tensor(Int32, experts + 1),
        fake_tensor(Uint8, experts, gemm.wide, 2 * gemm.inner),
        fake_tensor(Float32, experts, gemm.blocks, gemm.k_tiles),
        fake_tensor(element, experts, gemm.wide) if gemm.biased else None,
        fake_tensor(Uint8 if gemm.quantises else element, rows, gemm.columns),
        fake_tensor(Float32, rows, -(-gemm.columns // BLOCK)) if gemm.quantises else None,
        Int32(1),
    ]
    return compile_kernel(Fp8GemmKernel(gemm), arguments, arch, keep, only=ARCH)
