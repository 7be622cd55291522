"""Grouped GEMMs with quantised weights, which consumers dequantise in registers: a variant of `grouped_gemm`.

out[r, c] = f(sum_k w[e, c, k] x[r, k]) for the rows r of each expert e, offsets[e] <= r < offsets[e + 1].

Strategy: weights stand on the M side of the MMA, whose left operand may come from registers. A warp loads blocks of codes in the order of
`quantised_layout` and token rows through the ring of stages; one or two warpgroups load their codes, 16 bytes per thread at a time, make
numbers of them (`dequantise`) and multiply (`quantised_mainloop`, and tiles of 8 tokens `quantised_warp`). Tiles, their order and the
epilogue are those of `grouped_gemm`. With few rows, several blocks share a multiprocessor, each of which hides its latencies behind the others'
work, and up to three warpgroups take the stages of a tile in turn (split K).
"""

from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint32
from cutlass.cute.nvgpu import cpasync

from moe_routing_kernels.cute.cache import DTYPES, cached, compile_kernel, fake_tensor
from moe_routing_kernels.gemm.sm90 import ARCH, quantised_warp
from moe_routing_kernels.gemm.sm90.grouped_gemm import GroupedGemmKernel, Results, k_major_stages
from moe_routing_kernels.gemm.sm90.loads import load_packed
from moe_routing_kernels.gemm.sm90.mainloop import dispatch
from moe_routing_kernels.gemm.sm90.quantised_layout import DEPTH
from moe_routing_kernels.gemm.sm90.quantised_mainloop import mainloop
from moe_routing_kernels.gemm.sm90.quantised_tile import QuantisedGemm
from moe_routing_kernels.gemm.sm90.schedule import n_of


class QuantisedOperands(NamedTuple):
    """Operands of the producer: codes as words, and the tensor map of rows."""

    w: Any  # (E, m_blocks, blocks, words)
    x_atom: Any
    x: Any
    x_layout: Any  # of stages in shared memory


class QuantisedShared(NamedTuple):
    """Shared memory: the stages of both operands, the epilogue's buffers, and accumulators that are handed over."""

    w: Any
    x: Any
    buffers: Any
    partial: Any


class QuantisedGemmKernel(GroupedGemmKernel):
    """The kernel of a `QuantisedGemm`."""

    @cute.jit
    def __call__(
        self,
        x: cute.Tensor,
        offsets: cute.Tensor,
        w: cute.Tensor,
        biases: cute.Tensor | None,
        out: cute.Tensor,
        blocks: Int32,
        stream: Any,
    ):
        """Launch it, with tensors as for `compile_for`."""
        gemm, tile = self.gemm, self.gemm.tile
        words = cute.make_tensor(cute.recast_ptr(w.iterator, dtype=Uint32), w.layout)
        x_layout = k_major_stages(tile.tokens, DEPTH, gemm.stages, x.element_type)
        load = cpasync.CopyBulkTensorTileG2SOp()
        x_atom, x_map = cpasync.make_tiled_tma_atom(load, x, x_layout, (tile.tokens, DEPTH))
        self.kernel(QuantisedOperands(words, x_atom, x_map, x_layout), offsets, Results(biases, out)).launch(
            grid=(blocks, 1, 1),
            block=(gemm.threads, 1, 1),
            min_blocks_per_mp=gemm.resident,
            preferred_smem_carveout=100,  # percent; asking the driver for it would need one
            stream=stream,
            use_pdl=bool(gemm.waits),
        )

    def allocate(self, allocator: Any, operands: Any, results: Any) -> Any:
        """Shared memory but for barriers and the schedule's tables."""
        gemm, layout, dtype = self.gemm, operands.x_layout, results.out.element_type
        x_stages = allocator.allocate_tensor(dtype, layout.outer, byte_alignment=1024, swizzle=layout.inner)
        codes = cute.make_layout((gemm.codes.block_words, gemm.tile_m_blocks, gemm.stages))
        w_stages = allocator.allocate_tensor(Uint32, codes, byte_alignment=128)
        buffers = self.allocate_buffers(allocator, dtype)
        partial = None
        if gemm.splits > 1:
            partial = allocator.allocate_tensor(Float32, cute.make_layout(gemm.partial), byte_alignment=128)
        return QuantisedShared(w_stages, x_stages, buffers, partial)

    @cute.jit
    def prefetch(self, operands: Any):
        """By one warp: fetch the descriptor of the tensor map."""
        cpasync.prefetch_descriptor(operands.x_atom)

    @cute.jit
    def produce(self, operands: Any, shared: Any, warp_index: Int32, ring: tuple):
        """By the producer's first warp: load the block's tiles."""
        if warp_index == 4 * self.gemm.producer:
            load_packed(load_codes, (operands.w, shared.w), operands.x_atom, operands.x, shared.x, *ring)

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
        _, row, end, _ = place
        loop = quantised_warp.mainloop if gemm.few else mainloop
        arguments = (shared.w, shared.x, acc, *stage, share, consumer, zero, gemm)
        dispatch(loop, n_of(row, end, gemm.tile), gemm.tile.n_sizes, arguments)

    @cute.jit
    def store(
        self, acc: cute.Tensor, shared: Any, results: Any, place: tuple, share: Any, consumer: Int32, slot: Int32
    ):
        """By a consumer warpgroup: the epilogue of a tile, which the first of those that split it stores."""
        row, end, column = place
        if cutlass.const_expr(self.gemm.splits > 1):
            quantised_warp.reduce_splits(acc, shared.partial, consumer, self.gemm)
            end = cutlass.select_(consumer == 0, end, row)
        GroupedGemmKernel.store(self, acc, shared, results, (row, end, column), share, consumer, slot)

    def buffer(self, shared: Any, consumer: Any) -> Any:
        """The epilogue's buffer of a consumer warpgroup: those that split a tile have one."""
        return shared.buffers[None, consumer % self.gemm.tile.warpgroups]


@cute.jit
def load_codes(
    weights: tuple, expert: Int32, m_tile: Int32, k: Int32, index: Int32, full: cute.Pointer, gemm: cutlass.Constexpr
):
    """By one warp: tell `full` how many bytes come to a stage, and issue the copies of its blocks of w (E, m_blocks, blocks, words).

    `weights` are w and the stages. A bulk copy brings a block, as it lies in one piece in memory; blocks beyond an expert's last are copies
    of it, whose results are never stored.
    """
    w, w_stages = weights
    words = cutlass.const_expr(gemm.codes.block_words)
    atom = cute.make_copy_atom(cpasync.CopyBulkG2SOp(), w.element_type, num_bits_per_copy=32 * words)
    with cute.arch.elect_one():
        cute.arch.mbarrier_arrive_and_expect_tx(full + index, gemm.tma_bytes)
        for n in cutlass.range_constexpr(gemm.tile_m_blocks):
            m_block = cutlass.min(m_tile * gemm.tile_m_blocks + n, gemm.m_blocks - 1)
            offset = Int64((expert * gemm.m_blocks + m_block) * gemm.k_tiles + k) * words
            source = cute.make_tensor(w.iterator + cute.assume(offset, divby=32), cute.make_layout((words,)))
            cute.copy(atom, source, w_stages[None, n, index], mbar_ptr=full + index)


@cached
def compile_for(arch: str, dtype: str, gemm: QuantisedGemm, keep: bool = False) -> Any:
    """Compile one GEMM for one architecture and shape class (no GPU needed).

    The result is called with x (R, inner), offsets (E + 1,) int32, w (E, m_blocks, blocks, words) int32 of `quantised_layout`, biases (E, N)
    or None, out (R, columns), and the number of thread blocks.
    """
    element, rows = DTYPES[dtype], cute.sym_int()
    arguments = [
        fake_tensor(element, rows, gemm.inner),
        fake_tensor(Int32, gemm.experts + 1),
        fake_tensor(Int32, gemm.experts, gemm.m_blocks, gemm.k_tiles, gemm.codes.block_words),
        fake_tensor(element, gemm.experts, gemm.wide) if gemm.biased else None,
        fake_tensor(element, rows, gemm.columns),
        Int32(1),
    ]
    return compile_kernel(QuantisedGemmKernel(gemm), arguments, arch, keep, only=ARCH)
