"""The grouped products of `cute_quantised_product`: as those of `cute_tiles`, with stages that hold codes."""

import math
from dataclasses import dataclass, field

from moe_routing_bench.kernels.experts.cute_tiles import (
    MOST_STAGES,
    REGISTERS,
    RESERVED,
    SHARED_BYTES,
    SLAB,
    Product,
)
from moe_routing_bench.kernels.experts.quantised_layout import DEPTH, Codes

K16 = DEPTH // 16  # instructions of a stage, per slab
SYSTEM_BYTES = 1 << 10  # of shared memory that each block costs beside its own
FEWER_REGISTERS = (40, 96)  # as `REGISTERS`, where two blocks of 384 threads share them


@dataclass(frozen=True)
class QuantisedProduct(Product):
    """One grouped product: weights (E, slabs, blocks, words) of `quantised_layout` -> out (R, columns). A stage is a block deep."""

    codes: Codes = field(kw_only=True)
    resident: int = 1  # blocks per multiprocessor

    def __post_init__(self) -> None:
        """Check what the kernel takes for granted."""
        super().__post_init__()
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
    def registers(self) -> tuple[int, int]:
        """Registers of a thread that loads, and of one that multiplies."""
        return FEWER_REGISTERS if self.resident > 1 else REGISTERS

    def stages_beside(self, chunk: int) -> int:
        """Stages that fit beside buffers of `chunk` tokens, in each of the blocks that share a multiprocessor."""
        buffers = chunk * self.pitch * 2 * self.tile.warpgroups
        tables = 2 * 4 * (self.experts + 1)
        room = (SHARED_BYTES + SYSTEM_BYTES) // self.resident - SYSTEM_BYTES - RESERVED
        return min(MOST_STAGES, (room - buffers - tables) // self.stage_bytes)
