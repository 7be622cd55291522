"""The main loop of `fp8`: e4m3 times e4m3 with scales, stage by stage, and how the rows' scales come to shared memory.

A stage is 128 numbers of K deep, as far as scales reach: the tensor cores accumulate a block, whose accumulators are then multiplied by the
scales of weights and tokens and added to those of the tile, in float32. So the tensor cores' narrower accumulation goes over no more than
128 products. While one warpgroup scales, the other's MMAs run. The configuration is that of `tile`, with pairs of 8-bit numbers where
that has 16-bit ones.

Invariant: a stage is released after its MMAs and the reads of its scales are over.
"""

import math
from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float8E4M3FN, Float32, Int32, Int64
from cutlass.cute.nvgpu import cpasync, warpgroup

from moe_routing_kernels.cute import VECTOR_BYTES, WARP
from moe_routing_kernels.gemm.sm90.epilogue import bias_of
from moe_routing_kernels.gemm.sm90.schedule import advance, begin_at, locate, release
from moe_routing_kernels.gemm.sm90.tile import MMA_M, TILE_K, VECTOR, WARPGROUP, GroupedGemm, Tile

BLOCK = 2 * TILE_K  # numbers of a stage, and of a block with one scale
MMA_K = 32  # numbers of K that an MMA takes
MMAS = BLOCK // MMA_K  # of 64 rows and a stage
WARP_ROWS = MMA_M // 4  # tokens of an MMA that a warp has, upright
LOADERS = WARPGROUP - WARP  # threads that load scales


def stands(columns: int, gated: bool, biased: bool, tile: Tile) -> bool:
    """Whether a GEMM can be upright: all gates of a warpgroup have one block's scales, and so have all ups."""
    if biased or (gated and columns % MMA_M):
        return False
    if tile.across:
        return tile.tokens == 2 * MMA_M and (tile.m_atoms == 4 or not gated)
    return tile.m_atoms == tile.warpgroups == 2 and tile.tokens % MMA_M == 0


@dataclass(frozen=True)
class Fp8Gemm(GroupedGemm):
    """One grouped GEMM: e4m3 weights (E, N, 2 inner), with scales per 128 x 128 -> out (R, columns). `inner` counts pairs of numbers."""

    upright: bool = False  # A and B are not swapped: tokens stand on the M side of the MMA, weights on the N side
    quantises: bool = False  # upright, its results are e4m3 with scales, as rows are
    lead: int = 0  # upright, blocks' sums that the first warpgroup's MMAs have made when the second begins a tile

    def __post_init__(self) -> None:
        """Check the kernel's assumptions."""
        super().__post_init__()
        tile = self.tile
        assert not (self.top_k or self.waits or self.signals or tile.pingpong or tile.narrowest), self
        of_block = self.mma_rows * MMA_M if self.upright else MMA_M * tile.tokens
        of_tile = tile.m * tile.tokens // tile.warpgroups
        assert of_tile + of_block <= 192 * WARPGROUP, "accumulators of a tile and of a block fill registers"
        assert self.upright or not (self.quantises or self.lead or tile.across), self
        assert not (self.quantises and self.width > BLOCK), "a warpgroup has the columns of one scale, or half of them"
        # A warpgroup that is a whole ring ahead waits, so a second tile is never announced before the first has begun.
        assert not self.lead or (self.k_tiles >= self.stages and self.lead <= self.sums * (self.stages - 2)), self
        assert not self.upright or stands(self.columns, self.gated, self.biased, tile), self

    @property
    def mma_rows(self) -> int:
        """Upright, rows of weights that an MMA takes."""
        return 3 * MMA_M if self.tile.m_atoms == 3 else BLOCK

    @property
    def mmas(self) -> int:
        """Upright, MMAs of 64 tokens that a warpgroup has."""
        return self.tile.tokens // MMA_M // (self.tile.warpgroups if self.tile.across else 1)

    @property
    def sums(self) -> int:
        """Upright, sums of a stage that a warpgroup scales, one after the other: their accumulators are the same."""
        return self.tile.m // self.mma_rows if self.tile.across else self.mmas

    @property
    def epi_tokens(self) -> int:
        """Upright, each warp has 16 tokens of an MMA."""
        return MMA_M if self.upright else super().epi_tokens

    @property
    def epi_pitch(self) -> int:
        """Upright, as of 64 columns, which are as many bytes where it quantises."""
        if self.quantises:
            return MMA_M + VECTOR_BYTES
        return MMA_M + VECTOR if self.upright else super().epi_pitch

    @property
    def slots(self) -> int:
        """Tiles whose largest values have room: in what `stages_for` counts for the buffers of bytes as if they had 16 bits."""
        return 2 if self.quantises else 1

    @property
    def blocks(self) -> int:
        """Blocks of 128 rows that an expert's weights have."""
        return math.ceil(self.wide / BLOCK)

    @property
    def stage_bytes(self) -> int:
        """Bytes of a stage: weights, token rows, and the scales of those."""
        return super().stage_bytes + 4 * self.tile.tokens

    @property
    def tma_bytes(self) -> int:
        """Bytes of a stage that TMA writes."""
        return super().stage_bytes

    @property
    def arrivals(self) -> int:
        """Arrivals at a stage's `full` barrier: that of the thread that issues TMA, and one per thread that loads scales."""
        return 1 + LOADERS


@cute.jit
def load_scales(
    scales: cute.Tensor,
    x_scales: cute.Tensor,
    full: cute.Pointer,
    empty: cute.Pointer,
    starts: cute.Tensor,
    first_tiles: cute.Tensor,
    tiles: Int32,
    gemm: cutlass.Constexpr,
):
    """By three warps: load the scales (R, blocks) of the tiles' rows to x_scales (tokens, stages), 4 bytes at a time.

    Rows beyond an expert's last have the scales of its last.
    """
    tile, stride = begin_at(gemm)
    loader = cute.arch.thread_idx()[0] - WARP
    atom = cute.make_copy_atom(cpasync.CopyG2SOp(), Float32, num_bits_per_copy=32)
    scalar = cute.make_layout((1,))
    index, phase = Int32(0), Int32(1)
    while tile < tiles:
        _, row, end, _ = locate(tile, starts, first_tiles, gemm)
        for k in cutlass.range(gemm.k_tiles, unroll=1):
            cute.arch.mbarrier_wait(empty + index, phase)
            for first in cutlass.range_constexpr(0, gemm.tile.tokens, LOADERS):
                token = first + loader
                if token < gemm.tile.tokens:
                    source = scales.iterator + (Int64(cutlass.min(row + token, end - 1)) * gemm.k_tiles + k)
                    target = x_scales.iterator + (index * gemm.tile.tokens + token)
                    cute.copy(atom, cute.make_tensor(source, scalar), cute.make_tensor(target, scalar))
            cute.arch.cp_async_commit_group()
            cute.arch.cp_async_mbarrier_arrive_noinc(full + index)
            index, phase = advance(index, phase, gemm.stages)
        tile += stride
    cute.arch.cp_async_wait_group(0)  # no thread ends before its copies


def tiled_mma(width: int) -> Any:
    """A warpgroup's MMA of 64 rows and `width` columns, both operands from shared memory."""
    k_major, shared = cute.nvgpu.OperandMajorMode.K, warpgroup.OperandSource.SMEM
    op = warpgroup.MmaF8Op(Float8E4M3FN, Float8E4M3FN, Float32, (MMA_M, width, MMA_K), shared, k_major, k_major)
    return cute.make_tiled_mma(cute.make_mma_atom(op))


def fragments(left: cute.Tensor, right: cute.Tensor, width: int) -> tuple[cute.Tensor, cute.Tensor]:
    """Stages (rows, 128, stages) of both sides as operands: (_, MMAs of 64 rows or of `width`, MMAs of a stage, stages)."""
    mma = tiled_mma(width)
    thread_mma = mma.get_slice(0)
    return mma.make_fragment_A(thread_mma.partition_A(left)), mma.make_fragment_B(thread_mma.partition_B(right))


def multiply_block(
    a: cute.Tensor, b: cute.Tensor, block_acc: cute.Tensor, m_atom: int, index: Any, n_atom: int = 0
) -> None:
    """Issue the MMAs of 64 rows of a stage of a, and of as many of b as an MMA takes; `block_acc` is overwritten."""
    width = 8 * block_acc.shape[2]
    mma = tiled_mma(width)  # a new one, as values set here may not leave this branch
    results = cute.make_tensor(block_acc.iterator, cute.make_layout(((2, 2, width // 8), 1, 1)))
    warpgroup.fence()
    for n in range(MMAS):
        mma.set(warpgroup.Field.ACCUMULATE, n > 0)
        rows = a[None, m_atom, n, index]
        rows = cute.make_tensor(rows.iterator, cute.append_ones(rows.layout))
        others = b[None, n_atom, n, index]
        others = cute.make_tensor(others.iterator, cute.append_ones(others.layout))
        cute.gemm(mma, results, rows, others, results)
    warpgroup.commit_group()


def scale_places(expert: Any, column: Any, gemm: Fp8Gemm) -> list[list]:
    """For a thread's rows of weights, two of each MMA: where the scales of their blocks begin among those of all (E, N / 128, K / 128)."""
    places = []
    for m_atom in range(gemm.tile.m_atoms):
        rows = [bias_of(column, m_atom, half, gemm)[1] for half in range(2)]
        blocks = [cutlass.min(row, gemm.wide - 1) // BLOCK for row in rows]
        places.append([(expert * gemm.blocks + block) * gemm.k_tiles for block in blocks])
    return places


def promote(
    acc: cute.Tensor, block_acc: cute.Tensor, m_atom: int, w_scales: list, x_scales: cute.Tensor, index: Any
) -> None:
    """Add a block's scaled accumulators, (2 tokens, 2 rows 8 apart, tokens / 8), to those of the tile, (2, 2, tokens / 8, m_atoms)."""
    eights = block_acc.shape[2]
    place = index * (8 * eights) + cute.arch.lane_idx() % 4 * 2
    for eight in range(eights):
        pair = cute.make_rmem_tensor((2,), Float32)
        source = x_scales.iterator + cute.assume(place + 8 * eight, divby=2)
        cute.autovec_copy(cute.make_tensor(source, cute.make_layout((2,))), pair)
        for half in range(2):
            for token in range(2):
                scale = w_scales[half] * pair[token]
                acc[token, half, eight, m_atom] = (
                    acc[token, half, eight, m_atom] + scale * block_acc[token, half, eight]
                )


@cute.jit
def mainloop(
    w_stages: cute.Tensor,
    x_stages: cute.Tensor,
    x_scales: cute.Tensor,
    scales: cute.Tensor,
    places: list,
    acc: cute.Tensor,
    full: cute.Pointer,
    empty: cute.Pointer,
    index: Int32,
    phase: Int32,
    gemm: cutlass.Constexpr,
):
    """By a warpgroup: add the product of its weights (rows, 128, stages) and of a tile's tokens (tokens, 128, stages) to acc.

    `scales` are those of the weights, flat, and `places` where those of the thread's rows begin.
    """
    tile = cutlass.const_expr(gemm.tile)
    a, b = fragments(w_stages, x_stages, tile.tokens)
    block_acc = cute.make_rmem_tensor((2, 2, tile.tokens // 8), Float32)
    for k in cutlass.range(gemm.k_tiles, unroll=1):
        w_scales = [[scales[start + k] for start in pair] for pair in places]
        cute.arch.mbarrier_wait(full + index, phase)
        for m_atom in cutlass.range_constexpr(tile.m_atoms):
            multiply_block(a, b, block_acc, m_atom, index)
            warpgroup.wait_group(0)
            promote(acc, block_acc, m_atom, w_scales[m_atom], x_scales, index)
        cute.arch.sync_warp()  # all lanes have read their scales
        release(empty + index)
        index, phase = advance(index, phase, gemm.stages)
