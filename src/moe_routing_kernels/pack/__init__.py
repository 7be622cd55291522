"""pack: copy token rows (T, H) to the rows (R, H) of the experts that they are sent to, quantised where asked."""

import math
from dataclasses import dataclass

from moe_routing_kernels import formats
from moe_routing_kernels.implementations import Candidate
from moe_routing_kernels.target import Target

MAX_CHECKED_ROWS = 16
ELEMENT = "float8_e4m3fn"  # that kernels quantise to
LARGEST = 448.0  # of its numbers


@dataclass(frozen=True)
class Pack:
    """Tensors: x (T, H) of `dtype`, order (R,) and inverse (T, k) int32; packed (R, H) of `packed`, and scales where it
    has them."""

    tokens: int
    hidden: int
    top_k: int
    rows: int  # most rows that `order` may have; a bound `order` may be shorter
    dtype: str  # format of the tokens
    packed: str  # format of the rows; equal to `dtype` where rows are copied as they are
    padding: bool  # whether rows may be padding (order < 0), which is written as zeros

    @property
    def packed_format(self) -> formats.Format:
        """The format of the packed rows."""
        return formats.FORMATS[self.packed]

    @property
    def group(self) -> int:
        """Elements of a packed row that share a scale, where the format has scales."""
        return self.packed_format.group_of(self.hidden)

    @property
    def scales(self) -> int:
        """Scales of a packed row, where the format has scales."""
        return self.packed_format.scales_per_row(self.hidden)


def choose_checked_rows(problem: Pack, rows: int) -> int:
    """How many output rows the program or group of a token checks for padding: an even share of `rows`, at most
    `MAX_CHECKED_ROWS`; 0 where no row can be padding."""
    return min(MAX_CHECKED_ROWS, math.ceil(rows / problem.tokens)) if problem.padding else 0


IMPLEMENTATIONS = (
    Candidate("torch", "torch_pack"),
    Candidate("torch_compile", "torch_pack", requires=("compiler",), options={"compiled": True}),
    Candidate("triton", "triton_pack", requires=("gpu", "triton"), rank=2),
    Candidate("cute", "cute_pack", requires=("nvidia", "cutlass"), rank=1),
)


def other_element(packed: formats.Format) -> str | None:
    """Why kernels that write e4m3 elements with float32 scales cannot write this format, or None."""
    if (packed.element, packed.scale, packed.zero_point) != (ELEMENT, "float32", None):
        return f"the kernel writes {ELEMENT} with float32 scales, not {packed.name}"
    return None


def no_conversion(packed: formats.Format, target: Target | None = None) -> str | None:
    """Why a GPU by NVIDIA, the current one where no target is given, cannot convert to the format, or None."""
    target = target or Target.here()
    if packed.element == ELEMENT and target.vendor == "nvidia" and target.capability < (8, 9):
        major, minor = target.capability
        return f"conversion to {ELEMENT} needs compute capability 8.9, this GPU has {major}.{minor}"
    return None
