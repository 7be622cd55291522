"""Formats of quantised expert weights: how codes are stored, and which of them share a scale.

Names: ``int4_g128`` are integers of 4 bits with a scale per 128 neighbours along the last dimension, the K of GEMMs;
``int4z_g128`` have a zero point per group too, ``row`` is one group for a whole row, ``block128`` one for 128 x 128 elements. Floats are
named by exponent and mantissa bits. ``mxfp4`` is from the OCP microscaling formats 1.0, section 5.2; ``nvfp4`` is NVIDIA's.

Weights (E, N, K) are stored as

- elements: codes of 8 bits (E, N, K); narrower codes in uint8 (E, N, K * bits / 8), the first of a byte in its low bits;
- scales (E, N, groups), of 128 x 128 blocks (E, ceil(N / 128), ceil(K / 128)); the last group and block of a row may be shorter;
- zeros uint8 (E, N, groups) with zero points, one per byte; integers without them have the zero point 2 ** (bits - 1);
- global float32 (E,), by which the scales of ``nvfp4`` are multiplied, in float32.

An integer is (code - zero) * scale, a float element * scale. Scales are rounded to their format before codes are
chosen, so that only codes are rounded. Snakemake reads the table, so nothing here imports torch; `formats.quantisation` computes.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from moe_routing_kernels.formats import FORMATS, PLAIN, ROW

BLOCK = 128  # rows and columns that share a scale in formats of blocks
PARTS = ("scales", "zeros", "global")  # optional tensors of quantised weights, in addition to the elements
_SCALE_BYTES = {"float32": 4, "float8_e8m0fnu": 1, "float8_e4m3fn": 1}


@dataclass(frozen=True)
class WeightFormat:
    """A format of quantised weights.

    `codec` is the module of `formats` that chooses codes, `element` the torch dtype in which codes of `bits` bits are stored.
    `group` neighbours along K share a scale of torch dtype `scale` (None: the format of the activations), in `rows` rows each. `half_step`
    is the most that rounding a code moves an element, over the range of its group: its maximum minus its minimum with zero points,
    else twice its largest magnitude. `clipping` is how much of the range a scale that was rounded down cuts off, over the
    roundoff of scales, `scale_roundoff` (None: that of the activations).
    """

    name: str
    codec: str
    element: str
    bits: int
    group: int
    half_step: float
    rows: int = 1
    scale: str | None = None
    scale_roundoff: float | None = None
    clipping: float = 0.0
    zero_points: bool = False
    global_scale: bool = False

    def group_of(self, columns: int) -> int:
        """Neighbours that share a scale in rows of `columns` elements."""
        return columns if self.group == ROW else self.group

    def scale_shape(self, rows: int, columns: int) -> tuple[int, int]:
        """Shape of the scales of (rows, columns) weights of one expert."""
        return math.ceil(rows / self.rows), math.ceil(columns / self.group_of(columns))

    def packs(self, columns: int) -> bool:
        """Whether the codes of a row fill whole bytes."""
        return columns * self.bits % 8 == 0

    def bytes_of(self, rows: int, columns: int, dtype: str) -> int:
        """Bytes of (rows, columns) weights of one expert with activations of format `dtype`, scales and zero points included."""
        scale = _SCALE_BYTES[self.scale] if self.scale else FORMATS[dtype].bytes
        groups = math.prod(self.scale_shape(rows, columns))
        return rows * columns * self.bits // 8 + groups * (scale + self.zero_points) + 4 * self.global_scale

    def error_bound(self, dtype: str) -> float:
        """Most that quantising moves an element, over the range of its group, with activations of format `dtype`.

        It holds for groups whose scale, before it is rounded, is a normal number of its format.
        """
        roundoff = FORMATS[dtype].roundoff if self.scale_roundoff is None else self.scale_roundoff
        return self.half_step * (1 + roundoff) + self.clipping * roundoff


def _integer(bits: int, zero_points: bool, group: int) -> WeightFormat:
    """2 ** bits levels over the range. Without zero points the upper end is half a step short of it."""
    clipping = 1.0 if zero_points else 0.5
    name = f"int{bits}{'z' if zero_points else ''}_{'row' if group == ROW else f'g{group}'}"
    half_step = 0.5 / (2**bits - 1)
    return WeightFormat(name, "integers", "uint8", bits, group, half_step, clipping=clipping, zero_points=zero_points)


def _float8(kind: str, element: str, roundoff: float, where: str, group: int) -> WeightFormat:
    """The error of an element is at most its roundoff; relative to the range, which has both signs, that is half as much."""
    name, common = f"{kind}_{where}", ("float8", element, 8, group, roundoff / 2)
    if where == "block128":
        return WeightFormat(name, *common, rows=BLOCK, scale="float32", scale_roundoff=2.0**-24)
    return WeightFormat(name, *common)


_TABLE = (
    *(_integer(bits, zeros, group) for bits in (8, 4, 2) for zeros in (False, True) for group in (32, 64, 128, ROW)),
    *(
        _float8("e4m3", "float8_e4m3fn", 2.0**-4, *group)
        for group in (("g128", 128), ("row", ROW), ("block128", BLOCK))
    ),
    *(_float8("e5m2", "float8_e5m2", 2.0**-3, *group) for group in (("g128", 128), ("row", ROW), ("block128", BLOCK))),
    # Half of the step from 4 to 6 over the range of a group that has 4 as its largest number; 8 - 6 over that of one that has 8.
    WeightFormat("mxfp4", "float4", "uint8", 4, 32, 1 / 8, scale="float8_e8m0fnu", scale_roundoff=0.0),
    WeightFormat(
        "nvfp4", "float4", "uint8", 4, 16, 1 / 12, scale="float8_e4m3fn", scale_roundoff=2.0**-4, global_scale=True
    ),
)
WEIGHTS: Mapping[str, WeightFormat] = MappingProxyType({entry.name: entry for entry in _TABLE})
NAMES = (*PLAIN, *WEIGHTS)


def bits(name: str) -> int:
    """Bits of an element of a format of weights, quantised or not, or of rows. KeyError for an unknown name."""
    return WEIGHTS[name].bits if name in WEIGHTS else FORMATS[name].bits


def named(tensor: str) -> dict[str, str]:
    """The parts of a tensor of weights by the names of their tensors: ``w13_scales`` of ``w13``."""
    return {part: f"{tensor}_{part}" for part in PARTS}
