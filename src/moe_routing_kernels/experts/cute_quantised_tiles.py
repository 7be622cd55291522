"""The grouped products of `cute_quantised_product`: as those of `cute_tiles`, with stages that hold codes."""

import math
from dataclasses import dataclass, field

from moe_routing_kernels.cute import WARP
from moe_routing_kernels.experts.cute_tiles import (
    MOST_STAGES,
    RESERVED,
    SHARED_BYTES,
    SLAB,
    WARPGROUP,
    Product,
)
from moe_routing_kernels.experts.quantised_layout import DEPTH, Codes

K16 = DEPTH // 16  # instructions of a stage, per slab
FEWEST_TOKENS = 8  # of a tile
SYSTEM_BYTES = 1 << 10  # of shared memory that each block costs beside its own


@dataclass(frozen=True)
class QuantisedProduct(Product):
    """One grouped product: weights (E, slabs, blocks, words) of `quantised_layout` -> out (R, columns). A stage is a block deep."""

    codes: Codes = field(kw_only=True)
    resident: int = 1  # blocks per multiprocessor
    splits: int = 1  # warpgroups that take the stages of a tile in turn, and add up their sums in the end

    def __post_init__(self) -> None:
        """Check what the kernel takes for granted."""
        super().__post_init__()
        assert self.splits == 1 or (self.few and self.tile.warpgroups == 1), "warpgroups share its rows or its depth"
        assert self.splits == 1 or self.resident > 1, "those who load have few registers"
        assert 1 <= self.splits <= min(self.steps, max(1, self.stages)), "each has a stage"
        assert self.waits != "offsets" and self.signals != "late", "they overlap with each other alone"

    @property
    def steps(self) -> int:
        """Stages that a tile takes."""
        return math.ceil(self.inner / DEPTH)

    @property
    def slabs(self) -> int:
        """Slabs of 64 rows that an expert's weights have."""
        return math.ceil(self.columns / (SLAB // 2 if self.gated else SLAB))

    @property
    def slabs_together(self) -> int:
        """Slabs of a tile, of all its warpgroups."""
        return self.tile.slabs * self.tile.sharing

    @property
    def stage_bytes(self) -> int:
        """Bytes of a stage: codes, then token rows."""
        return self.slabs_together * self.codes.block_words * 4 + self.tile.tokens * DEPTH * 2

    @property
    def loaded_bytes(self) -> int:
        """All are loaded asynchronously."""
        return self.stage_bytes

    @property
    def warpgroups(self) -> int:
        """Of a block, beside the one that loads."""
        return self.tile.warpgroups * self.splits

    @property
    def loaders(self) -> int:
        """Threads of a block that load: a warp, or, where registers move from them to those that multiply, a warpgroup."""
        return WARP if self.resident > 1 else WARPGROUP

    @property
    def threads(self) -> int:
        """Threads of a block: those that multiply, and those that load."""
        return WARPGROUP * self.warpgroups + self.loaders

    @property
    def few(self) -> bool:
        """Whether warps multiply by themselves (`cute_quantised_few`)."""
        return self.tile.widths == (FEWEST_TOKENS,)

    @property
    def partial(self) -> tuple[int, int, int]:
        """Float32 sums that all warpgroups of a split tile but the first hand over: threads, sums of each, warpgroups."""
        return WARPGROUP, SLAB * self.tile.slabs * self.tile.tokens // WARPGROUP, self.splits - 1

    def stages_beside(self, chunk: int) -> int:
        """Stages that fit beside buffers of `chunk` tokens, in each of the blocks that share a multiprocessor.

        Warpgroups that split a tile have stages of their own: who waits for a stage every other time it is filled cannot tell the two apart.
        """
        buffers = chunk * self.pitch * 2 * self.tile.warpgroups
        tables = 2 * 4 * (self.experts + 1)
        room = (SHARED_BYTES + SYSTEM_BYTES) // self.resident - SYSTEM_BYTES - RESERVED
        fit = min(MOST_STAGES, (room - buffers - tables - 4 * math.prod(self.partial)) // self.stage_bytes)
        return fit // self.splits * self.splits
