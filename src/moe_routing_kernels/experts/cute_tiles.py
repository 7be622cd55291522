"""The tiles of the grouped products of `cute_swapped`: their sizes, which expert and rows each is, and the ring of stages.

Every thread block counts the tiles itself: one warp reads the offsets, and each warp finds its tile in the counts by two votes. So
nothing is read on the host, and the grid is as large as any routing can need.
"""

import math
from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from moe_routing_kernels.cute import WARP
from moe_routing_kernels.experts import activation_of

STEP = 64  # elements of the inner dimension per stage: 128 bytes, the width of the swizzle
SLAB = 64  # rows of weights that a warpgroup's instruction takes
WARPGROUP = 4 * WARP
VECTOR = 8  # elements that a thread stores at a time: 16 bytes
GROUP = 8  # tiles of tokens that share weights in L2: up to 2048 tokens for one reading of them
SHARED_BYTES = 227 << 10  # that a thread block may have on sm_90
RESERVED = 2048  # of them, for barriers and alignment
MOST_STAGES = 24
ENOUGH_STAGES = 5  # of which one is multiplied and one released; a few more change little
REGISTERS = (40, 232)  # of a thread that loads, and of one that multiplies: 128 * 40 + 256 * 232 are 64512 of 65536
GATHER_REGISTERS = (56, 224)  # where threads that load hold the numbers of their rows; as many


@dataclass(frozen=True)
class Tile:
    """What a thread block computes at a time, or, ping-pong, each of its two warpgroups that multiply."""

    slabs: int  # of 64 rows of weights, per warpgroup
    warpgroups: int  # that multiply
    tokens: int  # a multiple of 8, at most 256, or 192 with two slabs
    pingpong: bool = False  # two warpgroups take tiles in turn: one multiplies while the other stores
    narrowest: int = 0  # tokens of its narrowest form: tiles share an expert's rows evenly; 0: it has one form
    grain: int = 8  # tokens by which its forms differ
    cluster: int = (
        1  # thread blocks that take neighbouring tiles of an expert, and each load a part of the weights for all
    )

    def __post_init__(self) -> None:
        """Check what the kernel takes for granted."""
        assert self.slabs in (1, 2) and self.warpgroups in (1, 2), "one or two warpgroups have 64 or 128 rows each"
        assert self.tokens % 8 == 0 and 8 <= self.tokens <= (256, 192)[self.slabs - 1], "sums fill the registers"
        assert self.warpgroups == 2 or not self.pingpong, "two take turns"
        assert self.narrowest % 8 == 0 and 0 <= self.narrowest <= self.tokens, "forms are multiples of 8 tokens"
        assert self.grain % 8 == 0 and (self.tokens - self.narrowest) % self.grain == 0, "the widest is one of them"
        assert self.cluster == 1 or (self.narrowest and GROUP % self.cluster == 0), "a cluster shares an expert's rows"

    @property
    def widths(self) -> tuple[int, ...]:
        """Tokens of each form of it, fewest first: what the matrix instructions multiply."""
        return tuple(range(self.narrowest or self.tokens, self.tokens + 1, self.grain))

    @property
    def span(self) -> int:
        """Tokens that a cluster takes at a time, at most."""
        return self.tokens * self.cluster

    @property
    def sharing(self) -> int:
        """Warpgroups that compute it."""
        return 1 if self.pingpong else self.warpgroups

    @property
    def rows(self) -> int:
        """Rows of weights."""
        return SLAB * self.slabs * self.sharing


@dataclass(frozen=True)
class Product:
    """One grouped product: weights (E, N, inner) -> out (R, columns), N being 2 columns where it is gated."""

    columns: int
    inner: int
    experts: int
    activation: str  # a name that `activation_of` knows; empty for none
    tile: Tile
    top_k: int = 0  # row r is that of the token order[r] // top_k; 0: rows lie in order
    biased: bool = False  # sums begin with biases (E, N)
    # Programmatic dependent launch: what it waits for that the kernel ahead of it writes, `rows`, or `offsets` and all else; and when
    # the kernel after it may start: with the blocks of this one (`early`), or once these have asked for all they load (`late`).
    waits: str = ""
    signals: str = ""

    def __post_init__(self) -> None:
        """Check what the kernel takes for granted."""
        assert self.waits in ("", "rows", "offsets") and self.signals in ("", "early", "late"), self
        assert not (self.top_k and self.waits == "rows"), "what orders rows is written with the offsets"
        assert not (self.top_k and self.signals == "late"), "a whole warpgroup loads"
        assert self.tile.cluster == 1 or not (self.waits or self.signals), "blocks that overlap start one by one"

    @property
    def gated(self) -> bool:
        """Whether the rows of weights are gates and ups."""
        return bool(self.activation) and activation_of(self.activation).gated

    @property
    def steps(self) -> int:
        """Stages that a tile takes."""
        return math.ceil(self.inner / STEP)

    @property
    def width(self) -> int:
        """Columns of the result that a warpgroup computes."""
        return SLAB * self.tile.slabs // (2 if self.gated else 1)

    @property
    def parts(self) -> int:
        """Tiles side by side in a row of the result."""
        return math.ceil(self.columns / (self.width * self.tile.sharing))

    @property
    def chunk(self) -> int:
        """Tokens that the epilogue transposes at a time: a divisor of the tile's, large, unless a stage more fits beside a smaller one."""
        eights = self.tile.tokens // 8
        chunks = [8 * n for n in range(1, 9) if eights % n == 0]
        return max(chunks, key=lambda chunk: (min(ENOUGH_STAGES, self.stages_beside(chunk)), chunk))

    @property
    def pitch(self) -> int:
        """Elements from token to token in the epilogue's buffer: an odd number of 16 bytes, so that no two of 8 tokens share banks."""
        return self.width + VECTOR

    @property
    def stage_bytes(self) -> int:
        """Bytes of a stage: weights, then token rows."""
        return (self.tile.rows + self.tile.tokens) * STEP * 2

    @property
    def loaded_bytes(self) -> int:
        """Bytes of a stage that TMA writes; threads write what they gather."""
        return self.stage_bytes - (self.tile.tokens * STEP * 2 if self.top_k else 0)

    @property
    def stages(self) -> int:
        """As many as fit beside the rest."""
        return self.stages_beside(self.chunk)

    def stages_beside(self, chunk: int) -> int:
        """Stages that fit beside buffers of `chunk` tokens."""
        buffers = chunk * self.pitch * 2 * self.tile.warpgroups
        tables = 2 * 4 * (self.experts + 1)
        return min(MOST_STAGES, (SHARED_BYTES - RESERVED - buffers - tables) // self.stage_bytes)

    @property
    def ahead(self) -> int:
        """Stages whose weights a second kernel asks for before the first one is over: no more than a tile takes."""
        return min(self.steps, self.stages) if self.waits == "rows" else 0

    @property
    def arrivals(self) -> int:
        """Arrivals at a stage's `full` barrier: that of the thread that asks TMA, and one per gathering thread."""
        return 1 + (WARPGROUP if self.top_k else 0)

    @property
    def registers(self) -> tuple[int, int]:
        """Registers of a thread that loads, and of one that multiplies."""
        return GATHER_REGISTERS if self.top_k else REGISTERS

    @property
    def threads(self) -> int:
        """Threads of a block: the producer's warpgroup, and those that multiply."""
        return WARPGROUP * (1 + self.tile.warpgroups)

    def most_tiles(self, rows: int) -> int:
        """The most tiles that `rows` rows can need: each expert's may leave one, or a cluster's, that is not full."""
        return (rows // self.tile.span + min(self.experts, rows)) * self.parts * self.tile.cluster


@cute.jit
def count_tiles(offsets: cute.Tensor, starts: cute.Tensor, first_tiles: cute.Tensor, product: cutlass.Constexpr):
    """By one warp: copy offsets (E + 1,) to `starts`, and write how many tiles of tokens, or clusters of them, precede each expert.

    A lane takes neighbouring experts, so that all its loads are in flight at a time.
    """
    lane = cute.arch.lane_idx()
    experts = cutlass.const_expr(product.experts)
    share = cutlass.const_expr(math.ceil(experts / WARP))
    begins = [offsets[cutlass.min(lane * share + i, experts)] for i in range(share + 1)]
    before = [Int32(0)]
    for i in cutlass.range_constexpr(share):
        tiles = (begins[i + 1] - begins[i] + (product.tile.span - 1)) // product.tile.span
        before.append(before[i] + tiles)
    total = before[share]
    for n in cutlass.range_constexpr(5):
        below = cute.arch.shuffle_sync_up(total, 1 << n)
        total = total + cutlass.select_(lane >= (1 << n), below, Int32(0))
    base = total - before[share]
    for i in cutlass.range_constexpr(share):
        expert = lane * share + i
        if expert < experts:
            starts[expert] = begins[i]
            first_tiles[expert] = base + before[i]
    if lane == WARP - 1:  # experts past the last have no tiles, so the last lane's sum is that of all
        starts[experts] = offsets[experts]
        first_tiles[experts] = total


def locate(tile: Any, starts: cute.Tensor, first_tiles: cute.Tensor, product: Product) -> tuple[Any, Any, Any, Any]:
    """Of a tile, by a whole warp: its expert, its first row, the end of its rows, and its part of the columns.

    Blocks of a cluster count its tiles as one, and each finds its own, which has no rows where the expert has too few.

    Tiles of an expert are taken in groups of up to GROUP tiles of tokens, part by part: what runs at a time shares weights
    and token rows. Where tiles have several forms, those of an expert share its rows in multiples of 8, and their end is their
    own; else it is the expert's. Who is longer then changes from part to part and from expert to expert: as blocks take every
    n-th tile, some would have none but long ones.
    """
    lane, experts = cute.arch.lane_idx(), product.experts
    share = math.ceil(experts / WARP)
    number = tile // product.parts  # as if the tiles of an expert stood part by part: right for the expert
    passed = first_tiles[cutlass.min((lane + 1) * share, experts)] <= number
    base = cute.arch.popc(cute.arch.vote_ballot_sync(passed)) * share
    passed = first_tiles[cutlass.min(base + lane + 1, experts)] <= number  # lanes past this share: none, as starts rise
    expert = base + cute.arch.popc(cute.arch.vote_ballot_sync(passed))
    expert = cute.arch.make_warp_uniform(expert)
    first, start, end = first_tiles[expert], starts[expert], starts[expert + 1]
    count = first_tiles[expert + 1] - first
    inside = tile - first * product.parts
    most = GROUP // product.tile.cluster
    group = inside // (most * product.parts)
    high = cutlass.min(count - group * most, most)
    inside = inside - group * (most * product.parts)
    if not product.tile.narrowest:
        return expert, start + (group * most + inside % high) * product.tile.tokens, end, inside // high
    part = inside // high
    number = group * most + (inside % high + part + expert) % high
    if product.tile.cluster > 1:
        number = number * product.tile.cluster + cute.arch.block_idx_in_cluster()
        count = count * product.tile.cluster
    row, last = start + first_of(number, end - start, count), start + first_of(number + 1, end - start, count)
    return expert, row, cutlass.min(last, end), part


def begin_at(product: Product) -> tuple[Any, Any]:
    """Of the calling thread block or its cluster: the first tile, and how far on the next one is."""
    block, blocks, cluster = cute.arch.block_idx()[0], cute.arch.grid_dim()[0], product.tile.cluster
    return (block, blocks) if cluster == 1 else (block // cluster, blocks // cluster)


def first_of(number: Any, rows: Any, count: Any) -> Any:
    """Where a tile begins that is one of `count` which share `rows` rows: some are 8 rows longer than others."""
    eights = (rows + 7) // 8
    return 8 * (number * (eights // count) + cutlass.min(number, eights % count))


def width_of(row: Any, end: Any, tile: Tile) -> Any:
    """The form that a tile of these rows has, in tokens."""
    if not tile.narrowest:
        return tile.tokens
    over = cutlass.max(end - row - tile.widths[0], 0)
    return tile.widths[0] + (over + tile.grain - 1) // tile.grain * tile.grain


def advance(index: Any, phase: Any, stages: int) -> tuple[Any, Any]:
    """The next stage of the ring, and its phase."""
    last = index == stages - 1
    return cutlass.select_(last, Int32(0), index + 1), cutlass.select_(last, phase ^ 1, phase)


def skip(index: Any, phase: Any, steps: int, stages: int) -> tuple[Any, Any]:
    """The stage `steps` further in the ring, and its phase."""
    index = index + steps % stages
    over = index >= stages
    phase = phase ^ (steps // stages % 2)
    return cutlass.select_(over, index - stages, index), cutlass.select_(over, phase ^ 1, phase)
