"""What `pack` computes where rows are quantised (see `formats`), and when an answer is right.

x (T, H) -> packed (R, H) of the format's elements and scales (R,) or (R, groups) float32. Padding
rows are zeros of scale 1.

Scales may be off by two roundings of float32, that of 1 / largest and that of the product, and are exact where they are 1.
An element may be off by half the distance of the format's numbers at its size, measured with the scale that was
written; where it differs from the reference it counts as a tie.
"""

import math

import torch
from torch import Tensor

from moe_routing_bench.benches.checks import Check
from moe_routing_kernels.formats import dequantise, quantise
from moe_routing_kernels.pack import Pack

_SCALE_ERROR = 2.0**-23
_HALF = 0.5 + 2.0**-16  # of a step; x / scale itself is rounded to float32, and up to 16 steps long
_CHUNK = 1 << 25  # elements that are compared at a time: 128 MiB per float32 temporary


def reference(problem: Pack, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    """Quantise the tokens, the scales in float64; index both; then padding is 0 of scale 1."""
    form, order = problem.packed_format, inputs["order"].long()
    parts = [quantise(part.double(), form) for part in inputs["x"].split(_rows(problem))]
    source, empty = order.clamp_min(0) // problem.top_k, (order < 0)[:, None]
    packed = torch.cat([tokens.view(torch.uint8) for tokens, _ in parts])[source].masked_fill_(empty, 0)
    scales = torch.cat([scales for _, scales in parts])[source].masked_fill_(empty, 1).float()
    shape = form.scale_shape(len(order), problem.hidden)
    return {"packed": packed.view(form.torch_dtype), "scales": scales.view(shape)}


def check(problem: Pack, inputs: dict[str, Tensor], outputs: dict[str, Tensor], expected: dict[str, Tensor]) -> Check:
    """Scales within two roundings, elements within half a step. The errors are those of packed * scale against x."""
    form, got, want = problem.packed_format, outputs["scales"], expected["scales"]
    off = ~((got - want).abs() <= torch.where(want == 1, 0, _SCALE_ERROR * want))  # NaN compares false
    wrong = ties = 0
    error, size, largest = 0.0, 0.0, 0.0
    x, order = inputs["x"], inputs["order"].long()
    for first in range(0, len(order), _rows(problem)):
        rows = slice(first, first + _rows(problem))
        source, packed = order[rows], outputs["packed"][rows]
        exact = x[source.clamp_min(0) // problem.top_k].masked_fill_((source < 0)[:, None], 0).float()
        scales = dequantise(torch.ones_like(exact), got[rows], form)
        # Between two powers of two the numbers are 2 * roundoff of the lower one apart.
        below = torch.exp2(torch.frexp((exact / scales).abs().clamp_min(form.least_normal)).exponent - 1.0)
        step = 2 * form.roundoff * below
        difference = (dequantise(packed, got[rows], form) - exact).abs()
        wrong += int((~(difference <= _HALF * step * scales)).sum())
        ties += int((packed.float() != expected["packed"][rows].float()).sum())
        error, size = error + float(difference.square().sum()), size + float(exact.square().sum())
        largest = max(largest, float(difference.max()))
    bad_scales = int(off.sum())
    texts = [
        f"scales: {bad_scales} of {off.numel()} differ" if bad_scales else "",
        f"packed: {wrong} of {outputs['packed'].numel()} elements are not nearest to x / scale" if wrong else "",
    ]
    return Check(
        math.sqrt(error / max(size, 1e-30)),
        largest,
        form.roundoff,
        wrong + bad_scales,
        ties - wrong if ties > wrong else 0,
        "; ".join(filter(None, texts)) or None,
    )


def _rows(problem: Pack) -> int:
    """Rows that are compared at a time."""
    return max(1, _CHUNK // problem.hidden)
