"""The configuration of `fp8` GEMMs: as `tile` has it, with pairs of 8-bit numbers where that has 16-bit ones."""

import math
from dataclasses import dataclass

from moe_routing_kernels.cute import VECTOR_BYTES, WARP
from moe_routing_kernels.gemm.sm90.tile import MMA_M, TILE_K, VECTOR, WARPGROUP, GroupedGemm, Tile

BLOCK = 2 * TILE_K  # numbers of a stage, and of a block with one scale
MMA_K = 32  # numbers of K that an MMA takes
MMAS = BLOCK // MMA_K  # of 64 rows and a stage
WARP_ROWS = MMA_M // 4  # tokens of an MMA that a warp has, upright
LOADERS = WARPGROUP - WARP  # threads that load scales


def stands(columns: int, gated: bool, biased: bool, tile: Tile) -> bool:
    """Whether a GEMM can be upright: all gates of a warpgroup have one block's scales, and so have all ups."""
    return (
        not biased
        and (columns % MMA_M == 0 or not gated)
        and tile.m_atoms == tile.warpgroups == 2
        and tile.tokens % MMA_M == 0
    )


@dataclass(frozen=True)
class Fp8Gemm(GroupedGemm):
    """One grouped GEMM: e4m3 weights (E, N, 2 inner), with scales per 128 x 128 -> out (R, columns). `inner` counts pairs of numbers."""

    upright: bool = False  # A and B are not swapped: tokens stand on the M side of the MMA, weights on the N side
    quantises: bool = False  # upright, its results are e4m3 with scales, as rows are

    def __post_init__(self) -> None:
        """Check the kernel's assumptions."""
        super().__post_init__()
        tile = self.tile
        assert not (self.top_k or self.waits or self.signals or tile.pingpong or tile.narrowest), self
        assert tile.m_atoms * tile.tokens + tile.tokens <= 384, "accumulators of a tile and of a block fill registers"
        assert self.upright or not self.quantises, self
        assert not self.upright or stands(self.columns, self.gated, self.biased, tile), self

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
