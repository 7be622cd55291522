"""What `routing` computes, on what, and when an answer is right.

Inputs: logits (T, E) float32 whose top-k is the drawn assignment, bias (E,) where the rule has one, zeros in what is timed, x (T, H).
Output: combined (T, H): every token times the sum of its kept weights. The router's projection is outside the boundary.
"""

import torch
from torch import Tensor

from moe_routing_bench.benches.checks import Assignment, Check, Cost, both, close, nbytes, rounded, tolerance
from moe_routing_bench.benches.gate import definition as gate
from moe_routing_bench.grid.cell import Cell
from moe_routing_bench.workload.draw import draw_routing, generator, randn, selection_bias
from moe_routing_bench.workload.row_map import row_layout, row_map
from moe_routing_kernels.formats import FORMATS
from moe_routing_kernels.routers import ROUTERS
from moe_routing_kernels.routing import Routing


def problem(cell: Cell) -> Routing:
    """The sizes and formats of a cell."""
    return Routing(row_layout(cell), cell.hidden, cell.dtype, cell.router)


def build(cell: Cell, seed: int, device: str) -> dict[str, Tensor]:
    """Draw the inputs of one seed."""
    inputs = {
        "logits": draw_routing(cell, seed, device).logits,
        "x": randn((cell.tokens, cell.hidden), cell.dtype, generator(seed, device)),
    }
    if ROUTERS[cell.router].bias:
        inputs["bias"] = selection_bias(cell.experts, seed, device)
    return inputs


def empty_outputs(cell: Cell, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    """Outputs of the right shape, not initialised."""
    return {"combined": torch.empty_like(inputs["x"])}


def routed(cell: Cell, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    """Ids and weights of the rule in float64, and the row map of the ids in compact rows."""
    ids, weights = ROUTERS[cell.router].load()(inputs["logits"].double(), cell.top_k, inputs.get("bias"))
    return _mapped(cell, ids, weights)


def _mapped(cell: Cell, ids: Tensor, weights: Tensor) -> dict[str, Tensor]:
    """Ids and weights, and the row map of the ids in compact rows."""
    known = row_map(row_layout(cell), ids.cpu().numpy())
    return {"topk_ids": ids, "topk_weights": weights, "inverse": torch.from_numpy(known.inverse).to(ids.device)}


def own_choice(
    cell: Cell, inputs: dict[str, Tensor], outputs: dict[str, Tensor], expected: dict[str, Tensor]
) -> dict[str, Tensor] | None:
    """What `routed` is of the choice that `outputs` show, where it is right but not that of `expected`; else None.

    Who breaks a tie otherwise sends a token to another expert, and where there is a capacity drops others for it: what `combined` should
    be follows from its own choice.
    """
    ids, weights = outputs["topk_ids"], outputs["topk_weights"]
    same = ids.sort(1).values.equal(expected["topk_ids"].sort(1).values)
    return None if same or gate.check(cell, inputs, outputs, expected).error else _mapped(cell, ids, weights)


def reference(cell: Cell, inputs: dict[str, Tensor], known: dict[str, Tensor] | None = None) -> dict[str, Tensor]:
    """Token times its kept weight, in float32 (float64 for float32 inputs). `known` is a choice of experts, by default the rule's."""
    known = known or routed(cell, inputs)
    wide = torch.float64 if cell.dtype == "fp32" else torch.float32
    kept = torch.where(known["inverse"] >= 0, known["topk_weights"], 0.0).to(wide).sum(1, keepdim=True)
    return known | {"combined": kept * inputs["x"].to(wide)}


SHOWN = ("topk_ids", "topk_weights", "packed")  # besides the output: without them its route cannot be checked


def check(cell: Cell, inputs: dict[str, Tensor], outputs: dict[str, Tensor], expected: dict[str, Tensor]) -> Check:
    """The choice of experts, and one rounding to the cell's dtype; in float32 also those of the weights and the sum.

    Where weights sum to 1, combined is x however it was routed: an implementation has to show its choice and the packed rows.
    """
    if hidden := [name for name in SHOWN if name not in outputs]:
        return Check(error=f"{', '.join(hidden)}: not shown, so that its route cannot be checked")
    known = own_choice(cell, inputs, outputs, expected)
    want = (reference(cell, inputs, known) if known else expected)["combined"]
    roundings = 8 + 2 * cell.top_k if cell.dtype == "fp32" else 1
    bound = rounded(want, want.abs(), cell.dtype, 0, 6 * tolerance("fp32", gate.ROUNDINGS + 2 * cell.top_k))
    combined = close(outputs["combined"], want, tolerance(cell.dtype, roundings), "combined", bound)
    return both(gate.check(cell, inputs, outputs, expected), combined)


def assignment(cell: Cell, inputs: dict[str, Tensor], expected: dict[str, Tensor]) -> Assignment:
    """Expert ids (T, k) and weights (T, k) that the rule chose."""
    return Assignment(expected["topk_ids"], expected["topk_weights"], expected["inverse"])


def cost(cell: Cell, inputs: dict[str, Tensor], outputs: dict[str, Tensor], expected: dict[str, Tensor]) -> Cost:
    """The sum of the stages: the packed rows are what experts consume, so writing and reading them is compulsory."""
    inverse, row = expected["inverse"], FORMATS[cell.dtype].row_bytes(cell.hidden)
    kept, tokens = int((inverse >= 0).sum()), int((inverse >= 0).any(1).sum())
    indices = nbytes(inverse)
    gate = Cost(nbytes(inputs["logits"]), 2 * indices)
    permute = Cost(indices, 2 * indices)
    pack = Cost(tokens * row + indices, kept * row)
    return gate + permute + pack + Cost(kept * row + 2 * indices, nbytes(outputs["combined"]))
