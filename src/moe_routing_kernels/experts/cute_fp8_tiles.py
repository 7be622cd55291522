"""The grouped products of `cute_fp8_product`: as those of `cute_tiles`, with pairs of 8-bit numbers where those have 16-bit ones."""

import math
from dataclasses import dataclass

from moe_routing_kernels.cute import VECTOR_BYTES, WARP
from moe_routing_kernels.experts.cute_tiles import SLAB, STEP, VECTOR, WARPGROUP, Product, Tile

BLOCK = 2 * STEP  # numbers of a stage, and of a block with one scale
DEPTH = 32  # numbers that an instruction of the tensor cores sums
INSTRUCTIONS = BLOCK // DEPTH  # of a slab and a stage
SLOTS = 2  # tiles whose largest values have room, beside buffers of bytes, which `Product.stages_beside` counts as if they had 16 bits
WARP_ROWS = SLAB // 4  # tokens of a slab that a warp has, upright
LOADERS = WARPGROUP - WARP  # threads that bring scales


def stands(columns: int, gated: bool, biased: bool, tile: Tile) -> bool:
    """Whether a product can be upright: all gates of a warpgroup have one block's scales, and so have all ups."""
    return (
        not biased
        and (columns % SLAB == 0 or not gated)
        and tile.slabs == tile.warpgroups == 2
        and tile.tokens % SLAB == 0
    )


@dataclass(frozen=True)
class Fp8Product(Product):
    """One grouped product: e4m3 weights (E, N, 2 inner), with scales per 128 x 128 -> out (R, columns). `inner` counts pairs of numbers."""

    upright: bool = False  # tokens stand on the M side of the tensor cores' product, weights on the N side
    quantises: bool = False  # upright, what it makes is e4m3 with scales, as rows are

    def __post_init__(self) -> None:
        """Check what the kernel takes for granted."""
        super().__post_init__()
        assert (
            not self.top_k and not (self.waits or self.signals) and not self.tile.pingpong and not self.tile.narrowest
        ), self
        assert self.tile.slabs * self.tile.tokens + self.tile.tokens <= 384, (
            "sums of a tile and of a slab fill the registers"
        )
        assert self.upright or not self.quantises, self
        assert not self.upright or stands(self.columns, self.gated, self.biased, self.tile), self

    @property
    def chunk(self) -> int:
        """Upright, each warp has the 16 tokens of a slab of its own."""
        return SLAB if self.upright else super().chunk

    @property
    def pitch(self) -> int:
        """Upright, as of 64 columns, which are as many bytes where it quantises."""
        if self.quantises:
            return SLAB + VECTOR_BYTES
        return SLAB + VECTOR if self.upright else super().pitch

    @property
    def blocks(self) -> int:
        """Blocks of 128 rows that an expert's weights have."""
        return math.ceil((2 if self.gated else 1) * self.columns / BLOCK)

    @property
    def stage_bytes(self) -> int:
        """Bytes of a stage: weights, token rows, and the scales of those."""
        return super().stage_bytes + 4 * self.tile.tokens

    @property
    def loaded_bytes(self) -> int:
        """Bytes of a stage that TMA writes."""
        return super().stage_bytes

    @property
    def arrivals(self) -> int:
        """Arrivals at a stage's `full` barrier: that of the thread that asks TMA, and one per thread that brings scales."""
        return 1 + LOADERS
