"""The configuration of `quantised` GEMMs: as `tile` has it, with stages that hold codes."""

import math
from dataclasses import dataclass, field

from moe_routing_kernels.cute import WARP
from moe_routing_kernels.gemm.sm90.quantised_layout import DEPTH, Codes
from moe_routing_kernels.gemm.sm90.tile import MMA_M, RESERVED, SHARED_BYTES, WARPGROUP, GroupedGemm

K16 = DEPTH // 16  # MMAs of a stage, per 64 rows of weights
FEWEST_TOKENS = 8  # of a tile
SYSTEM_BYTES = 1 << 10  # of shared memory that each block costs in addition to its own


@dataclass(frozen=True)
class QuantisedGemm(GroupedGemm):
    """One grouped GEMM: weights (E, m_blocks, blocks, words) of `quantised_layout` -> out (R, columns). A stage is a block deep."""

    codes: Codes = field(kw_only=True)
    resident: int = 1  # blocks per multiprocessor
    splits: int = 1  # warpgroups that take the stages of a tile in turn, and add up their accumulators in the end

    def __post_init__(self) -> None:
        """Check the kernel's assumptions."""
        super().__post_init__()
        assert self.splits == 1 or (self.few and self.tile.warpgroups == 1), "warpgroups share its rows or its depth"
        assert self.splits == 1 or self.resident > 1, "producers have few registers"
        assert 1 <= self.splits <= min(self.k_tiles, max(1, self.stages)), "each has a stage"
        assert self.waits != "offsets" and self.signals != "late", "they overlap with each other alone"

    @property
    def tile_k(self) -> int:
        """Elements of K per stage."""
        return DEPTH

    @property
    def m_blocks(self) -> int:
        """Blocks of 64 rows that an expert's weights have."""
        return math.ceil(self.columns / (MMA_M // 2 if self.gated else MMA_M))

    @property
    def tile_m_blocks(self) -> int:
        """Blocks of 64 rows of a tile, of all its warpgroups."""
        return self.tile.m_atoms * self.tile.sharing

    @property
    def stage_bytes(self) -> int:
        """Bytes of a stage: codes, then token rows."""
        return self.tile_m_blocks * self.codes.block_words * 4 + self.tile.tokens * DEPTH * 2

    @property
    def tma_bytes(self) -> int:
        """All are loaded asynchronously."""
        return self.stage_bytes

    @property
    def consumers(self) -> int:
        """Consumer warpgroups of a block."""
        return self.tile.warpgroups * self.splits

    @property
    def producer(self) -> int:
        """The number of the producer's warpgroup, of which there may be one warp alone: the last."""
        return self.consumers

    @property
    def producers(self) -> int:
        """The producer's threads: a warp, or, where it leaves registers to the consumers, a warpgroup."""
        return WARP if self.resident > 1 else WARPGROUP

    @property
    def moves_registers(self) -> bool:
        """Whether the producer's warpgroup leaves registers to the consumers."""
        return self.producers == WARPGROUP

    @property
    def threads(self) -> int:
        """Threads of a block: consumers, and the producer's."""
        return WARPGROUP * self.consumers + self.producers

    @property
    def few(self) -> bool:
        """Whether warps multiply by themselves (`quantised_warp`)."""
        return self.tile.n_sizes == (FEWEST_TOKENS,)

    @property
    def partial(self) -> tuple[int, int, int]:
        """Float32 accumulators that all warpgroups of a split tile but the first hand over: threads, accumulators of each, warpgroups."""
        return WARPGROUP, MMA_M * self.tile.m_atoms * self.tile.tokens // WARPGROUP, self.splits - 1

    def stages_for(self, tokens: int) -> int:
        """Stages that fit with buffers for `tokens` tokens, in each of the blocks that share a multiprocessor.

        Warpgroups that split a tile have separate stages: a warpgroup that waits for a stage only every second time it is filled cannot
        tell the two phases of its barrier apart.
        """
        return super().stages_for(tokens) // self.splits * self.splits

    @property
    def room(self) -> int:
        """Bytes of shared memory of one of the resident blocks, without the accumulators that are handed over."""
        block = (SHARED_BYTES + SYSTEM_BYTES) // self.resident - SYSTEM_BYTES
        return block - RESERVED - 4 * math.prod(self.partial)
