"""What the shared experts of `layer` compute, on what, and when an answer is right.

Inputs: x (T, H) of the layer, never quantised; shared_w13 (N, H), shared_w2 (H, I) and, where they are gated, shared_gate (H,) in the
cell's weight format, or that of the activations where it is a quantised one, scaled by one over the square root of the fan-in. Output: residual (T, H) of the activations' format.
"""

import torch
from torch import Tensor

from moe_routing_bench.benches.checks import Check, Cost, close, nbytes, tolerance
from moe_routing_bench.benches.experts import definition as experts
from moe_routing_bench.grid.cell import Cell
from moe_routing_bench.workload.draw import generator, randn
from moe_routing_kernels.shared_experts import SharedExperts

_WEIGHTS = ("shared_w13", "shared_w2", "shared_gate")
_GATE_ROUNDINGS = 3  # of the product, of the score, and of what is multiplied by it


def problem(cell: Cell) -> SharedExperts:
    """The sizes and formats of a cell."""
    weights = experts.plain_weights(cell)
    width, gate = cell.shared_intermediate, cell.get("shared_gate")
    return SharedExperts(cell.tokens, cell.hidden, width, cell.dtype, weights, cell.activation, gate)


def shared(cell: Cell, seed: int, device: str) -> dict[str, Tensor]:
    """The weights, drawn once per cell, by the seed after that of the first tokens: neither tokens nor routed experts have it."""
    rng, weights = generator(seed + 1, device), experts.plain_weights(cell)
    hidden, inner = cell.hidden, cell.shared_intermediate
    wide = 2 * inner if experts.problem(_alone(cell)).gated else inner
    drawn = {
        "shared_w13": randn((wide, hidden), weights, rng).mul_(experts.spread(cell) * hidden**-0.5),
        "shared_w2": randn((hidden, inner), weights, rng).mul_(inner**-0.5),
    }
    if "shared_gate" in cell:
        drawn["shared_gate"] = randn((hidden,), weights, rng).mul_(hidden**-0.5)
    return drawn


def empty_outputs(cell: Cell, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    """Outputs of the right shape, not initialised."""
    return {"residual": torch.empty_like(inputs["x"])}


def reference(cell: Cell, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    """In float32 (float64 for float32 activations), TF32 off."""
    x = inputs["x"].to(torch.float64 if cell.dtype == "fp32" else torch.float32)
    weights = {name: inputs[f"shared_{name}"].unsqueeze(0) for name in ("w13", "w2")}
    y = experts.apply(_alone(cell), x, weights, 0)
    if "shared_gate" in cell:
        y *= torch.sigmoid(x @ inputs["shared_gate"].to(x.dtype)).unsqueeze(1)
    return {"residual": y}


def roundings(cell: Cell) -> int:
    """Roundings in a row to the activations' format; in float32 also those of the sums."""
    gate = _GATE_ROUNDINGS + (2 * cell.hidden if cell.dtype == "fp32" else 0)
    return experts.roundings(_alone(cell)) + ("shared_gate" in cell) * gate


def check(cell: Cell, inputs: dict[str, Tensor], outputs: dict[str, Tensor], expected: dict[str, Tensor]) -> Check:
    """All rows, within the roundings of a plain implementation."""
    return close(outputs["residual"], expected["residual"], tolerance(cell.dtype, roundings(cell)), "residual")


def cost(cell: Cell, inputs: dict[str, Tensor]) -> Cost:
    """What a layer has to do for them besides its other work, which reads x and writes the sum: the weights read once, and the
    products. That with the gate's vector is too small to be one of the products."""
    read = nbytes(*(inputs[name] for name in _WEIGHTS if name in inputs))
    gate = 2 * cell.tokens * cell.hidden if "shared_gate" in cell else 0
    return Cost(read, 0, experts.products(_alone(cell), cell.tokens), gate)


def _alone(cell: Cell) -> Cell:
    """The cell in which the shared experts are the routed ones, for what is said of those."""
    return cell.but(intermediate=cell.shared_intermediate, weights=experts.plain_weights(cell))
