"""The tile of a thread block of a grouped GEMM, and its resources: stages, shared memory, registers, threads, barriers' arrivals.

The GEMMs swap A and B: weights stand on the M side of the MMA, which has steps of 64, and tokens on its N side, which has steps of 8.
With few rows per expert tiles are low: few tokens on the N side, one variant.
"""

import math
from dataclasses import dataclass

from moe_routing_kernels.activations import activation_of
from moe_routing_kernels.cute import WARP

MMA_M = 64  # rows of weights that a warpgroup's MMA takes
TILE_K = 64  # elements of K per stage: 128 bytes, the width of the swizzle
WARPGROUP = 4 * WARP
VECTOR = 8  # elements that a thread stores at a time: 16 bytes
WARP_BUFFER = 16 * 16  # elements of a warp that stores by itself: 16 tokens, 16 columns
GROUP = 8  # tiles of tokens that share weights in L2: up to 2048 tokens for one reading of them
SHARED_BYTES = 227 << 10  # that a thread block may have on sm_90
RESERVED = 2048  # of them, for barriers and alignment
MOST_STAGES = 24
ENOUGH_STAGES = 5  # of which one is multiplied and one released; a few more change little
REGISTERS = (40, 232)  # of a producer's thread, and of a consumer's: 128 * 40 + 256 * 232 are 64512 of 65536
GATHER_REGISTERS = (56, 224)  # where producers hold the numbers of their rows; as many


@dataclass(frozen=True)
class Tile:
    """The tile of a thread block or, ping-pong, of each of its two consumer warpgroups."""

    m_atoms: int  # MMAs of 64 rows of weights, per warpgroup
    warpgroups: int  # consumers
    tokens: int  # a multiple of 8, at most 256, or 192 with two MMAs
    pingpong: bool = (
        False  # two warpgroups take tiles in turn: one is in its main loop while the other is in its epilogue
    )
    narrowest: int = 0  # tokens of its narrowest variant: tiles share an expert's rows evenly; 0: it has one variant
    grain: int = 8  # tokens by which variants differ
    cluster: int = (
        1  # thread blocks that take neighbouring tiles of an expert, and each load a part of the weights for all
    )
    lag: int = 0  # stages by which the second of two warpgroups that share a tile follows the first
    by_warp: bool = False  # warps store by themselves, 16 columns each; gated: an MMA of gates and an MMA of their ups
    across: bool = False  # each of two warpgroups multiplies all weights of the tile and half of its tokens

    def __post_init__(self) -> None:
        """Check the kernel's assumptions."""
        assert self.m_atoms in ((3, 4) if self.across else (1, 2)), "a warpgroup has 64 or 128 rows, or all of the tile"
        assert self.warpgroups == 2 if self.across else self.warpgroups in (1, 2), "one or two warpgroups"
        most = 128 if self.across else (256, 192)[self.m_atoms - 1]
        assert self.tokens % 8 == 0 and 8 <= self.tokens <= most, "accumulators fill registers"
        assert not (self.across and (self.pingpong or self.narrowest)), "tiles across are shared and have one variant"
        assert self.warpgroups == 2 or not self.pingpong, "two take turns"
        assert self.narrowest % 8 == 0 and 0 <= self.narrowest <= self.tokens, "variants are multiples of 8 tokens"
        assert self.grain % 8 == 0 and (self.tokens - self.narrowest) % self.grain == 0, "the widest is one of them"
        assert self.cluster == 1 or (self.narrowest and GROUP % self.cluster == 0), "a cluster shares an expert's rows"
        assert not self.lag or self.sharing == 2, "of two that share a tile, the second follows"
        assert not self.by_warp or self.tokens % 16 == 0, "a warp stores 16 tokens at a time"

    @property
    def n_sizes(self) -> tuple[int, ...]:
        """Tokens of each variant, fewest first: N of its MMAs."""
        return tuple(range(self.narrowest or self.tokens, self.tokens + 1, self.grain))

    @property
    def span(self) -> int:
        """Tokens that a cluster takes at a time, at most."""
        return self.tokens * self.cluster

    @property
    def sharing(self) -> int:
        """Warpgroups that compute one tile."""
        return 1 if self.pingpong else self.warpgroups

    @property
    def parts(self) -> int:
        """Parts into which the warpgroups divide a tile's weights."""
        return 1 if self.across else self.sharing

    @property
    def m(self) -> int:
        """Rows of weights."""
        return MMA_M * self.m_atoms * self.parts


@dataclass(frozen=True)
class GroupedGemm:
    """One grouped GEMM: weights (E, N, inner) -> out (R, columns), N being 2 columns where it is gated; `inner` is K."""

    columns: int
    inner: int
    experts: int
    activation: str  # a name that `activation_of` knows; empty for none
    tile: Tile
    top_k: int = 0  # row r is that of the token order[r] // top_k; 0: rows lie in order
    biased: bool = False  # accumulators begin with biases (E, N)
    # Programmatic dependent launch: what it waits for that the kernel ahead of it writes, `rows`, or `offsets` and all else; and when
    # the kernel after it may start: with the blocks of this one (`early`), or once these have issued all their loads (`late`).
    waits: str = ""
    signals: str = ""

    def __post_init__(self) -> None:
        """Check the kernel's assumptions."""
        assert self.waits in ("", "rows", "offsets") and self.signals in ("", "early", "late"), self
        assert not (self.top_k and self.waits == "rows"), "the order of rows is written with the offsets"
        assert not (self.top_k and self.signals == "late"), "a whole warpgroup loads"
        assert self.tile.cluster == 1 or not (self.waits or self.signals), "blocks that overlap start one by one"
        assert not self.tile.lag or self.tile.lag < self.stages <= self.k_tiles, (
            "a lead is shorter than the ring, and that than a tile"
        )
        assert not (self.tile.lag or self.tile.by_warp) or type(self) is GroupedGemm, (
            "variants have other loops and stores"
        )
        assert not self.blocked or (self.columns % MMA_M == 0 and self.tile.m_atoms == 2), (
            "whole MMAs of gates and of ups"
        )

    @property
    def gated(self) -> bool:
        """Whether the rows of weights are gates and ups."""
        return bool(self.activation) and activation_of(self.activation).gated

    @property
    def blocked(self) -> bool:
        """Whether MMAs of 64 gates and of their 64 ups take turns among the rows of weights, rather than 8 gates and 8 ups."""
        return self.gated and self.tile.by_warp

    @property
    def transposed(self) -> bool:
        """Whether weights are (E, inner, columns): their rows run along K."""
        return False

    @property
    def wide(self) -> int:
        """N, rows of an expert's weights."""
        return (2 if self.gated else 1) * self.columns

    @property
    def tile_k(self) -> int:
        """Elements of K per stage."""
        return TILE_K

    @property
    def k_tiles(self) -> int:
        """Stages that a tile takes."""
        return math.ceil(self.inner / self.tile_k)

    @property
    def width(self) -> int:
        """Columns of the result that a warpgroup computes."""
        return MMA_M * self.tile.m_atoms // (2 if self.gated else 1)

    @property
    def m_tiles(self) -> int:
        """Tiles side by side in a row of the result."""
        return math.ceil(self.columns / (self.width * self.tile.parts))

    @property
    def epi_tokens(self) -> int:
        """Tokens that the epilogue transposes at a time: a divisor of the tile's, large, unless a smaller one leaves room for one more stage."""
        eights = self.tile.tokens // 8
        sizes = [8 * n for n in range(1, 9) if eights % n == 0]
        return max(sizes, key=lambda tokens: (min(ENOUGH_STAGES, self.stages_for(tokens)), tokens))

    @property
    def epi_pitch(self) -> int:
        """Elements from token to token in the epilogue's buffer: an odd number of 16 bytes, so that no two of 8 tokens share banks."""
        return self.width + VECTOR

    @property
    def epi_buffers(self) -> int:
        """Results that the epilogue holds of each token at a time."""
        return 1

    def epi_elements(self, tokens: int) -> int:
        """Elements of a warpgroup's buffer for `tokens` tokens at a time."""
        return 4 * WARP_BUFFER if self.tile.by_warp else tokens * self.epi_pitch * self.epi_buffers

    @property
    def stage_bytes(self) -> int:
        """Bytes of a stage: weights, then token rows."""
        return (self.tile.m + self.tile.tokens) * TILE_K * 2

    @property
    def tma_bytes(self) -> int:
        """Bytes of a stage that TMA writes; threads write the rows that they gather."""
        return self.stage_bytes - (self.tile.tokens * TILE_K * 2 if self.top_k else 0)

    @property
    def stages(self) -> int:
        """As many as fit into shared memory with the epilogue's buffers."""
        return self.stages_for(self.epi_tokens)

    def stages_for(self, tokens: int) -> int:
        """Stages that fit with buffers for `tokens` tokens."""
        buffers = 2 * self.epi_elements(tokens) * self.tile.warpgroups
        tables = 2 * 4 * (self.experts + 1)
        return min(MOST_STAGES, (self.room - buffers - tables) // self.stage_bytes)

    @property
    def room(self) -> int:
        """Bytes of shared memory that stages, the epilogue's buffers and the schedule's tables may have."""
        return SHARED_BYTES - RESERVED

    @property
    def prefetched(self) -> int:
        """Stages whose weights are loaded before the kernel ahead is over: no more than a tile takes."""
        return min(self.k_tiles, self.stages) if self.waits == "rows" else 0

    @property
    def arrivals(self) -> int:
        """Arrivals at a stage's `full` barrier: that of the thread that issues TMA, and one per gathering thread."""
        return 1 + (WARPGROUP if self.top_k else 0)

    @property
    def registers(self) -> tuple[int, int]:
        """Registers of a producer's thread, and of a consumer's."""
        return GATHER_REGISTERS if self.top_k else REGISTERS

    @property
    def slots(self) -> int:
        """Places that the epilogue takes in turn from tile to tile."""
        return 1

    @property
    def consumers(self) -> int:
        """Consumer warpgroups of a block."""
        return self.tile.warpgroups

    @property
    def producer(self) -> int:
        """The number of the producer's warpgroup; consumers are the others."""
        return 0

    @property
    def moves_registers(self) -> bool:
        """Whether the producer's warpgroup leaves registers to the consumers."""
        return self.tile.warpgroups > 1

    @property
    def threads(self) -> int:
        """Threads of a block: the producer's warpgroup, and the consumers."""
        return WARPGROUP * (1 + self.consumers)

    def most_tiles(self, rows: int) -> int:
        """The most tiles that `rows` rows can need: each expert's may leave one, or a cluster's, that is not full."""
        return (rows // self.tile.span + min(self.experts, rows)) * self.m_tiles * self.tile.cluster


FEW_ROWS = 56  # per expert, up to which weights' bytes set the time and tiles are low
FEW_SIZES = (8, 16, 24, 32, 48, 64)  # tokens of a low tile
# The cost of a tile in addition to its tokens, in tokens: loads of weights from shared memory, the epilogue.
PER_TILE = 32


def choose_low(mean: float, sizes: tuple[int, ...] = FEW_SIZES) -> int:
    """Tokens of a tile of one variant: the least expected cost where rows per expert are spread like a Poisson variable's."""
    return min(sizes, key=lambda tokens: _tiles(mean, tokens) * (tokens + PER_TILE))


def _tiles(mean: float, tokens: int) -> float:
    """Expected tiles of an expert that has a row: one, and one more for each multiple of `tokens` that its rows exceed."""
    spread = math.sqrt(2 * mean)
    return sum(
        0.5 * math.erfc((full * tokens + 0.5 - mean) / spread) if full else 1.0
        for full in range(math.ceil((mean + 4 * spread) / tokens) + 1)
    )
