"""What `pack` computes, on what, and when an answer is right.

Inputs: x (T, H) N(0, 1) in the cell's dtype; order (R,) and inverse (T, k) int32 as `row_map` defines them, R the rows in
use. Output: packed (R, H), row r the token of assignment order[r], padding rows zero. Compared bit by bit.
In a quantised format (see `formats`) it is packed (R, H) of the format's elements and scales (R,) or (R, groups) float32. Padding
rows are zeros of scale 1.

Scales may be off by two roundings of float32, that of 1 / largest and that of the product, and are exact where they are 1.
An element may be off by half the distance of the format's numbers at its size, measured with the scale that was
written; where it differs from the reference it counts as a tie.
"""

import math

import torch
from torch import Tensor

from moe_routing_bench.benches.checks import Assignment, Check, Cost, exact, nbytes
from moe_routing_bench.grid.cell import Cell
from moe_routing_bench.workload.draw import draw_ids, generator, randn
from moe_routing_bench.workload.row_map import row_layout, row_map
from moe_routing_kernels import formats
from moe_routing_kernels.formats import dequantise, quantise
from moe_routing_kernels.pack import Pack


def problem(cell: Cell) -> Pack:
    """The sizes and formats of a cell; rows are of the activations' format where the bench does not read another."""
    rows = row_layout(cell)
    packed = cell.get("packed") or cell.dtype
    return Pack(rows.tokens, cell.hidden, rows.top_k, rows.rows, cell.dtype, packed, rows.padding)


def build(cell: Cell, seed: int, device: str) -> dict[str, Tensor]:
    """Draw the inputs of one seed."""
    rng, known = generator(seed, device), problem(cell)
    ids = draw_ids(cell, rng).contiguous()
    rows = row_map(row_layout(cell), ids.cpu().numpy())
    return {
        "x": randn((known.tokens, known.hidden), known.dtype, rng),
        "order": torch.from_numpy(rows.order).to(device),
        "inverse": torch.from_numpy(rows.inverse).to(device),
        "topk_ids": ids,
    }


def empty_outputs(cell: Cell, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    """Outputs of the right shape, not initialised."""
    known = problem(cell)
    return formats.empty_rows(known.packed_format, len(inputs["order"]), known.hidden, inputs["order"].device)


def reference(cell: Cell, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    """Index, then zero the padding."""
    known = problem(cell)
    if known.packed_format.quantised:
        return quantised_reference(known, inputs)
    order = inputs["order"].long()
    packed = inputs["x"][order.clamp_min(0) // known.top_k]
    packed[order < 0] = 0
    return {"packed": packed}


def check(cell: Cell, inputs: dict[str, Tensor], outputs: dict[str, Tensor], expected: dict[str, Tensor]) -> Check:
    """A copy has no rounding: every element equal."""
    known = problem(cell)
    if known.packed_format.quantised:
        return quantised_check(known, inputs, outputs, expected)
    return exact(outputs["packed"], expected["packed"], "packed")


def assignment(cell: Cell, inputs: dict[str, Tensor], expected: dict[str, Tensor]) -> Assignment:
    """Expert ids (T, k); the operation has no weights."""
    return Assignment(inputs["topk_ids"], inverse=inputs["inverse"])


def cost(cell: Cell, inputs: dict[str, Tensor], outputs: dict[str, Tensor], expected: dict[str, Tensor]) -> Cost:
    """Read each token that is sent anywhere once and one index per row; write every row once."""
    tokens = int((inputs["inverse"] >= 0).any(1).sum())
    row = nbytes(inputs["x"][:1])
    return Cost(tokens * row + nbytes(inputs["order"]), nbytes(*outputs.values()))


_SCALE_ERROR = 2.0**-23
_HALF = 0.5 + 2.0**-16  # of a step; x / scale itself is rounded to float32, and up to 16 steps long
_CHUNK = 1 << 25  # elements that are compared at a time: 128 MiB per float32 temporary


def quantised_reference(problem: Pack, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    """Quantise the tokens, the scales in float64; index both; then padding is 0 of scale 1."""
    form, order = problem.packed_format, inputs["order"].long()
    parts = [quantise(part.double(), form) for part in inputs["x"].split(_rows(problem))]
    source, empty = order.clamp_min(0) // problem.top_k, (order < 0)[:, None]
    packed = torch.cat([tokens.view(torch.uint8) for tokens, _ in parts])[source].masked_fill_(empty, 0)
    scales = torch.cat([scales for _, scales in parts])[source].masked_fill_(empty, 1).float()
    shape = form.scale_shape(len(order), problem.hidden)
    return {"packed": packed.view(form.torch_dtype), "scales": scales.view(shape)}


def quantised_check(
    problem: Pack, inputs: dict[str, Tensor], outputs: dict[str, Tensor], expected: dict[str, Tensor]
) -> Check:
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
