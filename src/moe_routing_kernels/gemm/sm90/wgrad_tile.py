"""The configuration and the schedule of `wgrad` GEMMs: sizes of tiles, their resources, and the expert and place of each."""

import math
from dataclasses import dataclass
from typing import Any

from moe_routing_kernels.gemm.sm90.tile import MMA_M, RESERVED, SHARED_BYTES, TILE_K, WARPGROUP

EPI_COLUMNS = 64  # of the result that are stored at a time: 128 bytes, the width of the swizzle
THREADS = 3 * WARPGROUP  # a producer, two consumers
TILES = {(2, 192): 1.0, (3, 128): 1.08, (2, 128): 1.15}  # MMAs of 64 rows, and columns of a tile: time of equal work


@dataclass(frozen=True)
class WgradGemm:
    """One GEMM that reduces over rows: a (R, M), b (R, N) -> out (E, M, N). Sizes are multiples of 8."""

    height: int  # M
    width: int  # N
    experts: int
    m_atoms: int  # MMAs of 64 rows of a tile of the result
    columns: int  # of a tile, a multiple of 64

    @property
    def rows(self) -> int:
        """Rows of a tile of the result."""
        return MMA_M * self.m_atoms

    @property
    def down(self) -> int:
        """Tiles below each other."""
        return math.ceil(self.height / self.rows)

    @property
    def across(self) -> int:
        """Tiles side by side."""
        return math.ceil(self.width / self.columns)

    @property
    def tiles(self) -> int:
        """Tiles of all experts."""
        return self.down * self.across * self.experts

    @property
    def stage_bytes(self) -> int:
        """Bytes of a stage: 64 rows of both operands."""
        return (self.rows + self.columns) * TILE_K * 2

    @property
    def stages(self) -> int:
        """As many as fit with the buffers of both warpgroups, and the offsets."""
        rest = SHARED_BYTES - RESERVED - 2 * self.rows * EPI_COLUMNS * 2 - 4 * (self.experts + 1)
        return rest // self.stage_bytes


def wgrad_gemm(height: int, width: int, experts: int) -> WgradGemm:
    """The GEMM with the tile that covers (M, N) soonest: wide ones read less of shared memory."""

    def cost(tile: tuple[int, int]) -> float:
        m_atoms, columns = tile
        rows = MMA_M * m_atoms
        return math.ceil(height / rows) * rows * math.ceil(width / columns) * columns * TILES[tile]

    return WgradGemm(height, width, experts, *min(TILES, key=cost))


def locate(tile: Any, gemm: WgradGemm) -> tuple[Any, Any, Any]:
    """The expert of a tile, and its place from the top and from the left."""
    each = gemm.down * gemm.across
    expert, inside = tile // each, tile % each
    if gemm.height <= gemm.width:
        return expert, inside % gemm.down, inside // gemm.down
    return expert, inside // gemm.across, inside % gemm.across


def k_tiles_of(first: Any, end: Any) -> Any:
    """Stages that the rows `first` to `end` take."""
    return (end - first + (TILE_K - 1)) // TILE_K
