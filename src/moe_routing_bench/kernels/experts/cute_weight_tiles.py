"""The tiles of the weight gradients of `cute_weight_gradients`: their sizes, which expert and place each is, and the ring of stages."""

import math
from dataclasses import dataclass
from typing import Any

import cutlass.cute as cute
from cutlass import Int32

from moe_routing_bench.kernels.experts.cute_tiles import RESERVED, SHARED_BYTES, SLAB, STEP, WARPGROUP

CHUNK = 64  # columns of the result that are stored at a time: 128 bytes, the width of the swizzle
THREADS = 3 * WARPGROUP  # one loads, two multiply
FORMS = {(2, 192): 1.0, (3, 128): 1.12, (2, 128): 1.15}  # slabs and columns of a tile: time of equal work


@dataclass(frozen=True)
class Reduction:
    """One product over rows: a (R, M), b (R, N) -> out (E, M, N). Sizes are multiples of 8."""

    height: int  # M
    width: int  # N
    experts: int
    slabs: int  # of 64 rows of a tile of the result
    columns: int  # of it, a multiple of 64
    paired: bool = False  # two thread blocks take tiles above each other, and each brings both half of the rows of b

    def __post_init__(self) -> None:
        """Check what the kernel takes for granted."""
        assert not self.paired or self.down % 2 == 0, f"pairs of tiles cover all: {self}"

    @property
    def rows(self) -> int:
        """Rows of a tile of the result."""
        return SLAB * self.slabs

    @property
    def down(self) -> int:
        """Tiles below each other."""
        return math.ceil(self.height / self.rows)

    @property
    def across(self) -> int:
        """Tiles beside each other."""
        return math.ceil(self.width / self.columns)

    @property
    def tiles(self) -> int:
        """Tiles of all experts."""
        return self.down * self.across * self.experts

    @property
    def stage_bytes(self) -> int:
        """Bytes of a stage: 64 rows of both operands."""
        return (self.rows + self.columns) * STEP * 2

    @property
    def stages(self) -> int:
        """As many as fit beside the buffers of both warpgroups, and the offsets."""
        rest = SHARED_BYTES - RESERVED - 2 * self.rows * CHUNK * 2 - 4 * (self.experts + 1)
        return rest // self.stage_bytes


def reduction(height: int, width: int, experts: int) -> Reduction:
    """The product with the tile that covers (M, N) soonest: wide ones read less of shared memory."""

    def cost(form: tuple[int, int]) -> float:
        slabs, columns = form
        covered = math.ceil(height / (SLAB * slabs)) * SLAB * slabs * math.ceil(width / columns) * columns
        return covered * FORMS[form]

    return Reduction(height, width, experts, *min(FORMS, key=cost))


def locate(tile: Any, product: Reduction) -> tuple[Any, Any, Any]:
    """The expert of a tile, or of a pair of them, and its place from the top and from the left."""
    down = product.down // 2 if product.paired else product.down
    each = down * product.across
    expert, inside = tile // each, tile % each
    if product.height <= product.width:
        return expert, inside % down, inside // down
    return expert, inside // product.across, inside % product.across


def own(product: Reduction) -> tuple[Any, Any, Any, int]:
    """The calling block's first tile and its stride, in tiles or pairs, which of a pair it is, and how many there are."""
    block, blocks = cute.arch.block_idx()[0], cute.arch.grid_dim()[0]
    if product.paired:
        return block // 2, blocks // 2, block % 2, product.tiles // 2
    return block, blocks, Int32(0), product.tiles


def steps_of(first: Any, end: Any) -> Any:
    """Stages that the rows `first` to `end` take."""
    return (end - first + (STEP - 1)) // STEP
