"""What `router` computes, on what, and when an answer is right.

Inputs: x (T, H) and router_weight (E, H) in the cell's dtype; bias (E,) float32 for rules with a selection bias, zeros in what is timed.
Outputs: topk_ids (T, k) int32, topk_weights (T, k) float32, in any order within a row, by the cell's rule from logits
x @ router_weight.T that are accumulated in float32 and not rounded to a narrower dtype.
"""

import torch
from torch import Tensor

from moe_routing_bench.benches.checks import Check, Cost, both, close, nbytes, tolerance
from moe_routing_bench.benches.gate import definition as gate
from moe_routing_bench.grid.cell import Cell
from moe_routing_bench.workload.draw import draw_routing, generator, randn, selection_bias
from moe_routing_kernels.formats import FORMATS
from moe_routing_kernels.router import Router
from moe_routing_kernels.routers import ROUTERS

assignment, empty_outputs = gate.assignment, gate.empty_outputs

_TIE = 1e-6  # as in gate: scores this near are equal in float32, however exact their logits
_REACHED = 1e-2  # of the largest eigenvalue of W W^T: logits along smaller ones would need huge tokens


def problem(cell: Cell) -> Router:
    """The sizes and formats of a cell."""
    return Router(cell.tokens, cell.hidden, cell.experts, cell.top_k, cell.dtype, cell.router)


def build(cell: Cell, seed: int, device: str) -> dict[str, Tensor]:
    """Draw the inputs of one seed: N(0, 1) tokens, moved so that their logits are those of the drawn assignment.

    Of all such tokens these are the nearest: x + (L - x W^T) (W W^T)^-1 W for the drawn logits L. Rounding to the cell's
    dtype then moves a logit by about 1e-3 (bf16), which changes a choice here and there. With E near H or above, L is
    reached only in part.
    """
    rng, hidden = generator(seed + 1, device), cell.hidden
    weight = randn((cell.experts, hidden), "fp32", rng).mul_(hidden**-0.5).to(FORMATS[cell.dtype].torch_dtype)
    wide = weight.float()
    x = randn((cell.tokens, hidden), "fp32", rng)
    inverse = torch.linalg.pinv(wide.double() @ wide.double().T, rtol=_REACHED, hermitian=True).float()
    x += (draw_routing(cell, seed, device).logits - x @ wide.T) @ inverse @ wide
    inputs = {"x": x.to(weight.dtype), "router_weight": weight}
    if ROUTERS[cell.router].bias:
        inputs["bias"] = selection_bias(cell.experts, seed, device)
    return inputs


def reference(cell: Cell, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    """Product and rule in float64; also `bound` (T, 1), by which any float32 logit of a token may be off.

    A sum of H products takes 2 H roundings, relative to its partial sums. These are as large as the logit, or as terms of
    its size and of random sign make them, sqrt(sum x^2 w^2).
    """
    x, weight = inputs["x"].double(), inputs["router_weight"].double()
    logits = x @ weight.T
    ids, weights = ROUTERS[cell.router].load()(logits, cell.top_k, inputs.get("bias"))
    partial = (x.square() @ weight.square().T).sqrt() + logits.abs()
    bound = _TIE + 6 * tolerance("fp32", 2 * cell.hidden) * partial.amax(1, keepdim=True)
    return {"topk_ids": ids, "topk_weights": weights, "logits": logits, "bound": bound}


def check(cell: Cell, inputs: dict[str, Tensor], outputs: dict[str, Tensor], expected: dict[str, Tensor]) -> Check:
    """Rows are compared as sets of (id, weight), with the rule's answer to logits that are off by no more than `bound`.

    Other ids than the reference's are a declared tie when the rule chooses them too, once logits are moved towards them by
    `bound`. A weight changes by at most the errors of two logits (relative; every rule's score grows no faster than exp), so
    2 `bound`, and as much again in such a row. In all other rows together the errors of sums of float32 are far below those of
    factors or logits of fewer bits: there they may be a third of `bound`, which is six times what is usual.
    """
    ids, weights = outputs["topk_ids"].long(), outputs["topk_weights"]
    ordered, place = ids.sort(dim=1)
    if malformed := gate.no_choice(ordered, cell.experts):
        return malformed
    want, want_place = expected["topk_ids"].long().sort(dim=1)
    want_weights = expected["topk_weights"].gather(1, want_place)
    other = (ordered != want).any(1)
    if bool(other.any()):
        logits, bound = expected["logits"][other], expected["bound"][other]
        want[other], want_weights[other] = gate.if_moved(cell, logits, inputs.get("bias"), ordered[other], bound)
    wrong, changed = int((ordered != want).any(1).sum()), int(other.sum())
    if wrong:
        return Check(
            mismatches=wrong, ties=changed - wrong, error=f"topk_ids: {wrong} of {len(ids)} rows hold other experts"
        )
    got, most = weights.gather(1, place), float(expected["bound"].max())
    found, limit = Check(ties=changed), tolerance("fp32") + 4 * most
    if changed:
        found = both(found, close(got[other], want_weights[other], limit, "topk_weights"))
    if changed < len(ids):
        got, want_weights = got[~other], want_weights[~other]
        usual = tolerance("fp32", gate.ROUNDINGS) + most / 3
        bound = 6 * limit * (want_weights.square().mean().sqrt() + want_weights)
        found = both(found, close(got, want_weights, usual, "topk_weights", bound))
    return found


def cost(cell: Cell, inputs: dict[str, Tensor], outputs: dict[str, Tensor], expected: dict[str, Tensor]) -> Cost:
    """Read tokens and weight once, write ids and weights once; a product and a sum for each of T H E."""
    experts, hidden = inputs["router_weight"].shape
    return Cost(nbytes(*inputs.values()), nbytes(*outputs.values()), ((cell.tokens, hidden, experts),))
