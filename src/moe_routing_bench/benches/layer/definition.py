"""What `layer` computes, on what, and when an answer is right.

Inputs: those of `routing`, and w13 (E, 2 I, H), w2 (E, H, I) in the cell's dtype, scaled by one over the square root of the
fan-in; all input sets of a cell share the weights. Output: combined (T, H).
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from moe_routing_bench.benches.checks import Check, Cost, close, nbytes, tolerance
from moe_routing_bench.benches.routing import definition as routing
from moe_routing_bench.grid import Cell
from moe_routing_bench.workload import generator, randn

build = routing.build
empty_outputs = routing.empty_outputs
assignment = routing.assignment


def shared(cell: Cell, seed: int, device: str) -> dict[str, Tensor]:
    """The experts' weights, drawn once a cell."""
    rng, experts = generator(seed, device), cell.experts or 0
    hidden, inner = cell.hidden or 0, cell.intermediate or 0
    return {
        "w13": randn((experts, 2 * inner, hidden), cell.dtype or "", rng).mul_(hidden**-0.5),
        "w2": randn((experts, hidden, inner), cell.dtype or "", rng).mul_(inner**-0.5),
    }


def reference(cell: Cell, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    """Expert by expert in float32 (float64 for float32 inputs), TF32 off."""
    known = routing.routed(cell, inputs)
    wide = torch.float64 if cell.dtype == "fp32" else torch.float32
    total = torch.zeros_like(inputs["x"], dtype=wide)
    kept = known["inverse"] >= 0
    for expert in range(cell.experts or 0):
        token, slot = ((known["topk_ids"] == expert) & kept).nonzero(as_tuple=True)
        if len(token):
            gate, up = (inputs["x"][token].to(wide) @ inputs["w13"][expert].to(wide).T).chunk(2, dim=-1)
            y = (F.silu(gate) * up) @ inputs["w2"][expert].to(wide).T
            total.index_add_(0, token, y * known["topk_weights"][token, slot].to(wide).unsqueeze(1))
    return known | {"combined": total}


def check(cell: Cell, inputs: dict[str, Tensor], outputs: dict[str, Tensor], expected: dict[str, Tensor]) -> Check:
    """Gate and up, their activation and product, the down product and the sum are rounded one after the other."""
    roundings = 6
    if cell.dtype == "fp32":
        roundings += 2 * ((cell.hidden or 0) + (cell.intermediate or 0)) + 2 * (cell.top_k or 0)
    return close(outputs["combined"], expected["combined"], tolerance(cell.dtype or "", roundings), "combined")


def cost(cell: Cell, inputs: dict[str, Tensor], outputs: dict[str, Tensor], expected: dict[str, Tensor]) -> Cost:
    """Scores, tokens and the weights of every expert that has a token read once, outputs written once; 6 H I a row."""
    kept = expected["inverse"] >= 0
    active = int(expected["topk_ids"][kept].unique().numel())
    weights = (nbytes(inputs["w13"], inputs["w2"]) // (cell.experts or 1)) * active
    flops = 6 * int(kept.sum()) * (cell.hidden or 0) * (cell.intermediate or 0)
    return Cost(nbytes(inputs["logits"], inputs["x"]) + weights, nbytes(outputs["combined"]), flops)
