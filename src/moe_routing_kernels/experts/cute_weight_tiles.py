"""The tiles of the weight gradients of `cute_weight_gradients`: their sizes, which expert and place each is, and the ring of stages."""

import math
from dataclasses import dataclass
from typing import Any

from moe_routing_kernels.experts.cute_tiles import RESERVED, SHARED_BYTES, SLAB, STEP, WARPGROUP

CHUNK = 64  # columns of the result that are stored at a time: 128 bytes, the width of the swizzle
THREADS = 3 * WARPGROUP  # one loads, two multiply
FORMS = {(2, 192): 1.0, (3, 128): 1.08, (2, 128): 1.15}  # slabs and columns of a tile: time of equal work


@dataclass(frozen=True)
class Reduction:
    """One product over rows: a (R, M), b (R, N) -> out (E, M, N). Sizes are multiples of 8."""

    height: int  # M
    width: int  # N
    experts: int
    slabs: int  # of 64 rows of a tile of the result
    columns: int  # of it, a multiple of 64

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
    """The expert of a tile, and its place from the top and from the left."""
    each = product.down * product.across
    expert, inside = tile // each, tile % each
    if product.height <= product.width:
        return expert, inside % product.down, inside // product.down
    return expert, inside // product.across, inside % product.across


def steps_of(first: Any, end: Any) -> Any:
    """Stages that the rows `first` to `end` take."""
    return (end - first + (STEP - 1)) // STEP
