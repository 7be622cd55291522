"""Grouped GEMMs of training over packed rows: forward GEMMs that keep their pre-activations, and dgrad GEMMs. Variants of `grouped_gemm`.

- A dgrad GEMM reduces over the rows of the weights: w[e, c, k] is at (E, k, c) in memory. Weights then lie in shared memory as they do
  there, 64 columns of a row side by side (MN-major); nothing is transposed.
- The first GEMM of the forward pass stores its pre-activations, too, and the gradient of the activated rows goes through the activation
  at once (`training_epilogue`): pre-activations are never computed twice, and the gradient of the activated rows is never written.

Strategy, tiles and invariants are those of `grouped_gemm`; rows are packed, GEMMs do not overlap, and there are no biases.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32
from cutlass.cute.nvgpu import cpasync, warpgroup

from moe_routing_kernels.cute.cache import DTYPES, cached, compile_kernel, fake_tensor
from moe_routing_kernels.gemm.sm90 import ARCH, training_epilogue
from moe_routing_kernels.gemm.sm90.epilogue import activated, store, transpose
from moe_routing_kernels.gemm.sm90.grouped_gemm import (
    GroupedGemmKernel,
    Operands,
    k_major_stages,
    weight_layout,
)
from moe_routing_kernels.gemm.sm90.schedule import EPILOGUE
from moe_routing_kernels.gemm.sm90.tile import TILE_K, VECTOR, WARPGROUP, GroupedGemm


@dataclass(frozen=True)
class TrainingGemm(GroupedGemm):
    """A GEMM over packed rows: forward its weights are (E, N, inner), in dgrad they are (E, inner, columns)."""

    dgrad: bool = False
    derivative: str = ""  # the activation whose derivative its results are multiplied by
    weighted: bool = False  # those results by the weights of their rows, too

    @property
    def transposed(self) -> bool:
        """In dgrad, weights' rows run along K."""
        return self.dgrad

    @property
    def dots(self) -> int:
        """Parts of a row of the result, for each of which a dot product is kept where rows have weights."""
        return self.m_tiles * self.tile.sharing

    @property
    def epi_buffers(self) -> int:
        """Forward: activated values, gates and ups."""
        return 3 if self.gated else 1

    @property
    def epi_tokens(self) -> int:
        """Tokens that the epilogue transposes at a time: all where it needs the registers of the accumulators."""
        return self.tile.tokens if self.derivative else super().epi_tokens


class TrainingResults(NamedTuple):
    """Tensors that the consumers read and write; None where a GEMM has no such tensor."""

    preact: Any  # (R, 2 columns): pre-activations, written forward, read with a derivative
    scales: Any  # (R,)
    out: Any
    inner: Any  # (R, columns): activated again
    dots: Any  # (R, `TrainingGemm.dots`)


class TrainingGemmKernel(GroupedGemmKernel):
    """The kernel of a `TrainingGemm`."""

    @cute.jit
    def __call__(
        self,
        x: cute.Tensor,
        offsets: cute.Tensor,
        w: cute.Tensor,
        preact: cute.Tensor | None,
        scales: cute.Tensor | None,
        out: cute.Tensor,
        inner: cute.Tensor | None,
        dots: cute.Tensor | None,
        blocks: Int32,
        stream: Any,
    ):
        """Launch it; `compile_for` says which tensors are given."""
        gemm, tile, dtype = self.gemm, self.gemm.tile, w.element_type
        x_layout = k_major_stages(tile.tokens, TILE_K, gemm.stages, dtype)
        if cutlass.const_expr(gemm.dgrad):
            shape, stride = (gemm.columns, gemm.inner, gemm.experts), (1, gemm.columns, gemm.columns * gemm.inner)
            weights = cute.make_tensor(w.iterator, cute.make_layout(shape, stride=stride))
            mn_major = warpgroup.make_smem_layout_atom(warpgroup.SmemLayoutAtomKind.MN_SW128, dtype)
            w_layout = cute.tile_to_shape(mn_major, (tile.m, TILE_K, gemm.stages), order=(1, 0, 2))
        else:
            weights = cute.make_tensor(w.iterator, weight_layout(gemm))
            w_layout = k_major_stages(tile.m, TILE_K, gemm.stages, dtype)
        load = cpasync.CopyBulkTensorTileG2SOp()
        w_atom, w_map = cpasync.make_tiled_tma_atom(load, weights, w_layout, (tile.m, TILE_K))
        x_atom, x_map = cpasync.make_tiled_tma_atom(load, x, x_layout, (tile.tokens, TILE_K))
        operands = Operands(w_atom, w_map, x_atom, x_map, None, w_layout, x_layout)
        results = TrainingResults(preact, scales, out, inner, dots)
        self.kernel(operands, offsets, results).launch(
            grid=(blocks, 1, 1), block=(gemm.threads, 1, 1), min_blocks_per_mp=1, stream=stream
        )

    @cute.jit
    def begin(self, acc: cute.Tensor, results: Any, expert: Int32, column: Int32):
        """By a consumer warpgroup: set the accumulators of a tile."""
        acc.fill(0.0)

    @cute.jit
    def store(
        self, acc: cute.Tensor, shared: Any, results: Any, place: tuple, share: Any, consumer: Int32, slot: Int32
    ):
        """By a consumer warpgroup: the epilogue of a tile, subtile by subtile."""
        gemm, buffer = cutlass.const_expr(self.gemm), self.buffer(shared, consumer)
        preact, scales, out, inner, dots = results
        row, end, column = place
        part = cutlass.const_expr(gemm.epi_tokens * gemm.epi_pitch)  # of the buffer
        for subtile in cutlass.range_constexpr(gemm.tile.tokens // gemm.epi_tokens):
            first = row + subtile * gemm.epi_tokens
            if first < end:
                at = (first, end, column, gemm)
                if cutlass.const_expr(gemm.derivative):
                    gates_and_ups = cute.make_rmem_tensor((VECTOR, 2, training_epilogue.TOGETHER), out.element_type)
                    scale = cute.make_rmem_tensor((training_epilogue.TOGETHER,), Float32)
                    gates_and_ups.fill(0.0)
                    scale.fill(1.0)
                    training_epilogue.fetch(preact, scales, gates_and_ups, scale, Int32(0), *at)
                # All threads have read the subtile before.
                cute.arch.barrier(barrier_id=EPILOGUE + consumer, number_of_threads=WARPGROUP)
                transpose(activated(acc, gemm), buffer, 0, subtile, gemm)
                if cutlass.const_expr(gemm.gated):
                    for half in cutlass.range_constexpr(2):
                        pairs = training_epilogue.gate_or_up(acc, half)
                        transpose(pairs, buffer, (1 + half) * part, subtile, gemm)
                cute.arch.barrier(barrier_id=EPILOGUE + consumer, number_of_threads=WARPGROUP)
                if cutlass.const_expr(gemm.derivative):
                    training_epilogue.store_gradients(
                        buffer, preact, scales, gates_and_ups, scale, out, inner, dots, *at
                    )
                else:
                    store(buffer, 0, out, 0, gemm.columns, *at)
                    if cutlass.const_expr(gemm.gated):
                        for half in cutlass.range_constexpr(2):
                            store(buffer, (1 + half) * part, preact, half * gemm.columns, 2 * gemm.columns, *at)


@cached
def compile_for(arch: str, dtype: str, gemm: TrainingGemm, keep: bool = False) -> Any:
    """Compile one GEMM for one architecture and shape class (no GPU needed).

    The result is called with x (R, inner), offsets (E + 1,) int32, w, preact, scales, out, inner, dots and the number of thread blocks,
    None for tensors that are not named here:

    - forward, w is (E, 2 columns, inner), and preact (R, 2 columns) and out (R, columns) are written;
    - with a `derivative`, w is (E, inner, columns), preact (R, 2 columns) is read, out (R, 2 columns) and inner (R, columns) are written;
      where that is `weighted`, scales (R,) float32 is read, too, and dots (R, `gemm.dots`) float32 written;
    - else w is (E, inner, columns), and out (R, columns) is written.
    """
    element, rows, columns = DTYPES[dtype], cute.sym_int(), gemm.columns
    shape = (gemm.inner, columns) if gemm.dgrad else (gemm.wide, gemm.inner)
    derived, weighted = bool(gemm.derivative), gemm.weighted
    arguments = [
        fake_tensor(element, rows, gemm.inner),
        fake_tensor(Int32, gemm.experts + 1),
        fake_tensor(element, gemm.experts, *shape),
        fake_tensor(element, rows, 2 * columns) if derived or gemm.gated else None,
        fake_tensor(Float32, rows) if weighted else None,
        fake_tensor(element, rows, 2 * columns if derived else columns),
        fake_tensor(element, rows, columns) if derived else None,
        fake_tensor(Float32, rows, gemm.dots) if weighted else None,
        Int32(1),
    ]
    return compile_kernel(TrainingGemmKernel(gemm), arguments, arch, keep, only=ARCH)
