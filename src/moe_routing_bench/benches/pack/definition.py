"""What `pack` computes, on what, and when an answer is right.

Inputs: x (T, H) N(0, 1) in the cell's dtype; order (R,) and inverse (T, k) int32 as `row_map` defines them, R the rows in
use. Output: packed (R, H), row r the token of assignment order[r], padding rows zero. Compared bit by bit.
In a quantised format packed has scales: see `quantised`.
"""

import torch
from torch import Tensor

from moe_routing_bench.benches.checks import Assignment, Check, Cost, exact, nbytes
from moe_routing_bench.benches.pack import quantised
from moe_routing_bench.grid.cell import Cell
from moe_routing_bench.workload.draw import draw_ids, generator, randn
from moe_routing_bench.workload.rows import row_layout, row_map
from moe_routing_kernels import formats
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
        return quantised.reference(known, inputs)
    order = inputs["order"].long()
    packed = inputs["x"][order.clamp_min(0) // known.top_k]
    packed[order < 0] = 0
    return {"packed": packed}


def check(cell: Cell, inputs: dict[str, Tensor], outputs: dict[str, Tensor], expected: dict[str, Tensor]) -> Check:
    """A copy has no rounding: every element equal."""
    known = problem(cell)
    if known.packed_format.quantised:
        return quantised.check(known, inputs, outputs, expected)
    return exact(outputs["packed"], expected["packed"], "packed")


def assignment(cell: Cell, inputs: dict[str, Tensor], expected: dict[str, Tensor]) -> Assignment:
    """Expert ids (T, k); the operation has no weights."""
    return Assignment(inputs["topk_ids"], inverse=inputs["inverse"])


def cost(cell: Cell, inputs: dict[str, Tensor], outputs: dict[str, Tensor], expected: dict[str, Tensor]) -> Cost:
    """Read each token that is sent anywhere once and one index per row; write every row once."""
    tokens = int((inputs["inverse"] >= 0).any(1).sum())
    row = nbytes(inputs["x"][:1])
    return Cost(tokens * row + nbytes(inputs["order"]), nbytes(*outputs.values()))
