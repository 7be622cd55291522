"""Number formats: how elements of rows and weights are stored, which of them share a scale, and how they are quantised.

This table has the formats of activations, packed rows and unquantised weights; `formats.weights` has the formats of quantised
weights. A quantised format of rows stores `element`s and one scale per `group` neighbouring elements of a row: value = element *
scale, with scale = amax / largest, so that a group's largest element becomes the largest number of the format. The last group of a
row may be shorter. A group whose amax is below `LEAST_AMAX`, such as a padding row, has scale 1 and elements 0. Values are rounded
to nearest even and saturated.
Sources: Micikevicius et al., FP8 formats for deep learning, arXiv:2209.05433, section 3; scales of 128 elements of a
token: DeepSeek-V3, arXiv:2412.19437, section 3.3.2.

Snakemake reads the table, so torch is imported only by the functions that take tensors.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch
    from torch import Tensor

ROW = -1  # `group` of a format with one scale per row
LEAST_AMAX = 2.0**-117  # below it amax / 448 could be subnormal in float32, and 448 / amax infinite


@dataclass(frozen=True)
class Format:
    """A number format.

    `element` is the torch dtype that elements are stored in, `bits` the bits of an element. `roundoff` is half the relative
    distance of two neighbouring normal numbers, `least_normal` the smallest normal and `largest` the largest finite
    number of the element. `group` neighbouring elements share a scale of torch dtype `scale` (`ROW`: the whole row);
    None: no scales. `zero_point` is the torch dtype of zero points, None where a format is symmetric.
    """

    name: str
    element: str
    bits: int
    roundoff: float
    largest: float
    least_normal: float
    group: int | None = None
    scale: str | None = None
    zero_point: str | None = None

    @property
    def quantised(self) -> bool:
        """Whether elements need scales."""
        return self.group is not None

    @property
    def bytes(self) -> int:
        """Bytes of an element, without its share of a scale."""
        return self.bits // 8

    @property
    def torch_dtype(self) -> "torch.dtype":
        """The dtype of the elements. Imports torch."""
        import torch

        return getattr(torch, self.element)

    def group_of(self, columns: int) -> int:
        """Elements that share a scale in rows of `columns` elements."""
        assert self.group is not None, f"{self.name} has no scales"
        return columns if self.group == ROW else self.group

    def scales_per_row(self, columns: int) -> int:
        """Scales of a row of `columns` elements; 0 without scales."""
        return math.ceil(columns / self.group_of(columns)) if self.quantised else 0

    def scale_shape(self, rows: int, columns: int) -> tuple[int, ...]:
        """Shape of the scales of (rows, columns) elements: (rows,) with one scale per row, else (rows, groups)."""
        return (rows,) if self.group == ROW else (rows, self.scales_per_row(columns))

    def row_bytes(self, columns: int) -> int:
        """Bytes of a row of `columns` elements, its scales included."""
        scale_bytes = 4 * self.scales_per_row(columns)  # every scale here is a float32
        return columns * self.bits // 8 + scale_bytes


_TABLE = (
    Format("bf16", "bfloat16", 16, 2.0**-8, 3.3895313892515355e38, 2.0**-126),
    Format("fp16", "float16", 16, 2.0**-11, 65504.0, 2.0**-14),
    Format("fp32", "float32", 32, 2.0**-24, 3.4028234663852886e38, 2.0**-126),
    Format("fp8_row", "float8_e4m3fn", 8, 2.0**-4, 448.0, 2.0**-6, group=ROW, scale="float32"),
    Format("fp8_block128", "float8_e4m3fn", 8, 2.0**-4, 448.0, 2.0**-6, group=128, scale="float32"),
)
FORMATS: Mapping[str, Format] = MappingProxyType({entry.name: entry for entry in _TABLE})
PLAIN = tuple(entry.name for entry in _TABLE if not entry.quantised)
QUANTISED = tuple(entry.name for entry in _TABLE if entry.quantised)


def name_of(dtype: "torch.dtype") -> str:
    """The plain format of a torch dtype; KeyError where the table has none."""
    return {entry.element: entry.name for entry in _TABLE if not entry.quantised}[str(dtype).removeprefix("torch.")]


def empty_rows(number_format: Format, rows: int, columns: int, device: "torch.device | str") -> "dict[str, Tensor]":
    """``packed`` (rows, columns), and ``scales`` float32 of `Format.scale_shape` where there are scales; not initialised."""
    import torch

    rows_and_scales = {"packed": torch.empty(rows, columns, dtype=number_format.torch_dtype, device=device)}
    if number_format.quantised:
        rows_and_scales["scales"] = torch.empty(
            number_format.scale_shape(rows, columns), dtype=torch.float32, device=device
        )
    return rows_and_scales


def quantise(x: "Tensor", number_format: Format) -> "tuple[Tensor, Tensor]":
    """x (R, C) -> elements (R, C) and scales (R, groups) of x's precision, at least float32.

    The scales have two dimensions for every format; `Format.scale_shape` is the shape in which they are stored.
    """
    import torch

    size, wide = number_format.group_of(x.shape[1]), x if x.dtype == torch.float64 else x.float()
    amax = torch.nn.functional.pad(wide.abs(), (0, -x.shape[1] % size)).unflatten(1, (-1, size)).amax(2)
    scales = torch.where(amax < LEAST_AMAX, 1, amax / number_format.largest)
    # By index: torch 2.13 compiles a slice of repeat_interleave wrongly for a CPU (a shorter last group is not written).
    quotient = wide / scales[:, torch.arange(x.shape[1], device=x.device) // size]
    return quotient.float().clamp(-number_format.largest, number_format.largest).to(number_format.torch_dtype), scales


def dequantise(elements: "Tensor", scales: "Tensor", number_format: Format) -> "Tensor":
    """Elements (R, C) times the scales (R,) or (R, groups) of their groups -> (R, C) float32."""
    import torch

    columns = elements.shape[1]
    index = torch.arange(columns, device=elements.device) // number_format.group_of(columns)
    return elements.float() * scales.view(len(elements), -1)[:, index]
