"""What `pack` computes where it quantises to fp8, and when an answer is right.

x (T, H) bfloat16 -> packed (R, H) float8_e4m3fn and scales (R, ceil(H / 128)) float32, or (R,) with one scale a row.
scale = amax / 448 of the row, or of each 128 of its elements (the last group of a row may be shorter), so that the
largest element becomes the largest number of the format; packed = x / scale, rounded to nearest even, saturated. A
group that is zero, as padding rows are, or smaller than 2^-117 has scale 1. Format: Micikevicius et al., FP8 formats
for deep learning, arXiv:2209.05433, section 3; scales of 128 elements of a token: DeepSeek-V3, arXiv:2412.19437,
section 3.3.2.

Scales may be off by two roundings of float32, that of 1 / 448 and that of the product, and are exact where they are 1.
An element may be off by half the distance of fp8 numbers at its size, measured with the scale that was written; where it
differs from the reference it counts as a tie.
"""

import math

import torch
from torch import Tensor

from moe_routing_bench.benches.checks import Check
from moe_routing_bench.grid import FP8, Cell

LARGEST = 448.0  # of e4m3
LEAST_NORMAL = 2.0**-6  # of e4m3
LEAST_AMAX = 2.0**-117  # below it amax / 448 could be subnormal in float32, 448 / amax infinite: such a group is zero
ROUNDOFF = 2.0**-4  # of e4m3: half of the distance of two numbers, relative
_SCALE_ERROR = 2.0**-23
_HALF = 0.5 + 2.0**-16  # of a step; x / scale itself is rounded to float32, and up to 16 steps long
_CHUNK = 1 << 25  # elements that are compared at a time: 128 MiB a float32 temporary


def group(cell: Cell) -> int:
    """Elements of a row that share a scale."""
    return FP8[cell.dtype or ""] or cell.hidden or 0


def groups(cell: Cell) -> int:
    """Scales of a row."""
    return math.ceil((cell.hidden or 0) / group(cell))


def unsupported() -> str | None:
    """Why the current CUDA device has no conversion to e4m3, or None; also where there is no device to ask."""
    if torch.cuda.is_available() and (have := torch.cuda.get_device_capability()) < (8, 9):
        return f"conversion to float8_e4m3fn needs compute capability 8.9, this GPU has {have[0]}.{have[1]}"
    return None


def empty_outputs(cell: Cell, rows: int, device: torch.device) -> dict[str, Tensor]:
    """packed (R, H) float8_e4m3fn and scales (R,) or (R, ceil(H / 128)) float32, not initialised."""
    packed = torch.empty(rows, cell.hidden or 0, dtype=torch.float8_e4m3fn, device=device)
    return {"packed": packed, "scales": torch.empty(_scale_shape(cell, rows), device=device)}


def quantise(x: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """x (T, H) -> (T, H) float8_e4m3fn and scales (T, ceil(H / size)) of x's precision, at least float32."""
    wide = x if x.dtype == torch.float64 else x.float()
    amax = torch.nn.functional.pad(wide.abs(), (0, -x.shape[1] % size)).unflatten(1, (-1, size)).amax(2)
    scales = torch.where(amax < LEAST_AMAX, 1, amax / LARGEST)
    # By index: torch 2.13 compiles a slice of repeat_interleave wrongly for a CPU (the last, shorter group is not written).
    quotient = wide / scales[:, torch.arange(x.shape[1], device=x.device) // size]
    return quotient.float().clamp(-LARGEST, LARGEST).to(torch.float8_e4m3fn), scales


def reference(cell: Cell, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    """Quantise the tokens, the scales in float64; index both; then padding is 0 of scale 1."""
    order, top_k = inputs["order"].long(), cell.top_k or 1
    parts = [quantise(part.double(), group(cell)) for part in inputs["x"].split(_rows(cell))]
    source = order.clamp_min(0) // top_k
    packed = torch.cat([tokens.view(torch.uint8) for tokens, _ in parts])[source].masked_fill_((order < 0)[:, None], 0)
    scales = torch.cat([scales for _, scales in parts])[source].masked_fill_((order < 0)[:, None], 1).float()
    return {"packed": packed.view(torch.float8_e4m3fn), "scales": scales.view(_scale_shape(cell, len(order)))}


def check(cell: Cell, inputs: dict[str, Tensor], outputs: dict[str, Tensor], expected: dict[str, Tensor]) -> Check:
    """Scales within two roundings, elements within half a step. The errors reported are those of packed * scale against x."""
    got, want = outputs["scales"], expected["scales"]
    off = ~((got - want).abs() <= torch.where(want == 1, 0, _SCALE_ERROR * want))  # NaN compares false
    wrong = ties = 0
    error, size, largest = 0.0, 0.0, 0.0
    x, order, top_k = inputs["x"], inputs["order"].long(), cell.top_k or 1
    got = got.view(len(order), -1)
    for first in range(0, len(order), _rows(cell)):
        rows = slice(first, first + _rows(cell))
        source = order[rows]
        exact = x[source.clamp_min(0) // top_k].masked_fill_((source < 0)[:, None], 0).float()
        scales = got[rows].repeat_interleave(group(cell), dim=1)[:, : exact.shape[1]]
        packed = outputs["packed"][rows].float()
        step = torch.exp2(torch.frexp((exact / scales).abs().clamp_min(LEAST_NORMAL)).exponent - 4.0)
        difference = (packed * scales - exact).abs()
        wrong += int((~(difference <= _HALF * step * scales)).sum())
        ties += int((packed != expected["packed"][rows].float()).sum())
        error, size = error + float(difference.square().sum()), size + float(exact.square().sum())
        largest = max(largest, float(difference.max()))
    bad_scales = int(off.sum())
    texts = [
        f"scales: {bad_scales} of {off.numel()} differ" if bad_scales else "",
        f"packed: {wrong} of {outputs['packed'].numel()} elements are not nearest to x / scale" if wrong else "",
    ]
    return Check(
        math.sqrt(error / max(size, 1e-30)), largest, ROUNDOFF, wrong + bad_scales, ties - wrong if ties > wrong else 0,
        "; ".join(filter(None, texts)) or None,
    )  # fmt: skip


def _scale_shape(cell: Cell, rows: int) -> tuple[int, ...]:
    return (rows,) if FP8[cell.dtype or ""] is None else (rows, groups(cell))


def _rows(cell: Cell) -> int:
    """Rows that are compared at a time."""
    return max(1, _CHUNK // (cell.hidden or 1))
