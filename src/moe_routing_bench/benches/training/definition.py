"""What `training` computes, on what, and when an answer is right.

Inputs: those of `layer`, whose weights have the activations' format, and d_combined (T, H) N(0, 1), the gradient of the result.
Outputs: combined (T, H), and the gradients d_x (T, H), d_w13 (E, N, H) and d_w2 (E, H, I) of the formats of x and weights, and d_logits
(T, E) float32. The choice of experts has no gradient, nor has the rule's selection bias.

The reference is written out from the formulas of the derivatives. The gradients of weights are held against the reference expert
by expert: beside an expert with thousands of tokens, one with a few would be lost in the mean.
"""

import math

import torch
from torch import Tensor

from moe_routing_bench.benches.checks import Check, Cost, both, close, nbytes, tolerance
from moe_routing_bench.benches.experts import definition as experts
from moe_routing_bench.benches.routing import definition as routing
from moe_routing_bench.grid.cell import Cell
from moe_routing_bench.workload.draw import generator, randn
from moe_routing_bench.workload.row_map import row_layout
from moe_routing_kernels.activations import activation_of
from moe_routing_kernels.errors import bad
from moe_routing_kernels.gate import FUSED, FUSED_FORMULAS
from moe_routing_kernels.layer import Layer
from moe_routing_kernels.routers import ROUTERS

_GATE = 16  # roundings of float32, as in `gate`
_SCORE_TILE = 128  # elements of I that an implementation with `rounded_scores` sums at a time

shared = experts.shared
assignment = routing.assignment


def problem(cell: Cell) -> Layer:
    """The sizes of a cell; rows and weights have the activations' format."""
    formats = (cell.dtype, cell.dtype, cell.dtype)
    return Layer(row_layout(cell), cell.hidden, cell.intermediate, *formats, cell.router, cell.activation)


def build(cell: Cell, seed: int, device: str) -> dict[str, Tensor]:
    """Draw the inputs of one seed; by the seed after it the gradient of the result, which would be x otherwise."""
    inputs = routing.build(cell, seed, device)
    return inputs | {"d_combined": randn((cell.tokens, cell.hidden), cell.dtype, generator(seed + 1, device))}


def empty_outputs(cell: Cell, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    """Outputs of the right shape, not initialised."""
    gradients = {f"d_{name}": torch.empty_like(inputs[name]) for name in ("x", "logits", "w13", "w2")}
    return {"combined": torch.empty_like(inputs["x"])} | gradients


def reference(cell: Cell, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    """Expert by expert in float32 (float64 for float32 inputs), TF32 off; the gate in float64.

    d_logits is made of terms that cancel where their errors do not: `logit_terms` (T, E) and `logit_sums` (T, E) are how large they are.
    """
    known = routing.routed(cell, inputs)
    wide = torch.float64 if cell.dtype == "fp32" else torch.float32
    x, flow, weights = (one.to(wide) for one in (inputs["x"], inputs["d_combined"], known["topk_weights"]))
    combined, d_x = torch.zeros_like(x), torch.zeros_like(x)
    d_weights, sizes = torch.zeros_like(weights), torch.zeros_like(weights)
    d_w13, d_w2 = (torch.zeros_like(inputs[name], dtype=wide) for name in ("w13", "w2"))
    kept = known["inverse"] >= 0
    for expert in range(cell.experts):
        token, slot = ((known["topk_ids"] == expert) & kept).nonzero(as_tuple=True)
        if not len(token):
            continue
        own = {name: inputs[name][expert].to(wide) for name in ("w13", "w2", "b13", "b2") if name in inputs}
        scale = weights[token, slot].unsqueeze(1)
        inner, slopes = activated(cell.activation, x[token] @ own["w13"].T + own.get("b13", 0.0))
        y = inner @ own["w2"].T + own.get("b2", 0.0)
        combined.index_add_(0, token, scale * y)
        products = flow[token] * y
        d_weights[token, slot], sizes[token, slot] = products.sum(1), products.norm(dim=1)
        d_y = scale * flow[token]
        d_inner = d_y @ own["w2"]
        d_sums = slopes * d_inner.repeat(1, slopes.shape[1] // inner.shape[1])
        d_x.index_add_(0, token, d_sums @ own["w13"])
        d_w13[expert], d_w2[expert] = d_sums.T @ x[token], d_y.T @ inner
    ids, logits = known["topk_ids"].long(), inputs["logits"].double()
    d_logits, terms, sums = logit_gradient(cell, logits, ids, d_weights.double(), sizes.double())
    found = {"combined": combined, "d_x": d_x, "d_logits": d_logits, "d_w13": d_w13, "d_w2": d_w2}
    return known | found | {"logit_terms": terms, "logit_sums": sums}


def activated(activation: str, sums: Tensor) -> tuple[Tensor, Tensor]:
    """What an expert makes of the sums of its first product (n, N): inner (n, I), and the slope of inner by each sum (n, N)."""
    known = activation_of(activation)
    if known.value == "relu2":
        positive = sums.clamp(min=0)
        return positive**2, 2 * positive
    gate, up = sums.chunk(2, dim=1)
    inside = near = torch.ones_like(up)
    if known.limit is not None:
        inside, near = (gate <= known.limit).to(up.dtype), (up.abs() <= known.limit).to(up.dtype)
        gate, up = gate.clamp(max=known.limit), up.clamp(-known.limit, known.limit)
    if known.value == "gelu":
        outer = math.sqrt(2 / math.pi)
        bent = torch.tanh(outer * (gate + 0.044715 * gate**3))
        value = 0.5 * gate * (1 + bent)
        slope = 0.5 * (1 + bent) + 0.5 * gate * (1 - bent**2) * outer * (1 + 3 * 0.044715 * gate**2)
    else:
        share = 1 / (1 + torch.exp(-known.alpha * gate))
        value, slope = gate * share, share * (1 + known.alpha * gate * (1 - share))
    up = up + known.shift
    return value * up, torch.cat([slope * up * inside, value * near], 1)


def logit_gradient(
    cell: Cell, logits: Tensor, ids: Tensor, grad: Tensor, size: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """ids (T, k), and grad (T, k) of their weights with the size (T, k) of what it sums -> (T, E) each: the gradient of logits, and
    how large are the gradients that it sums, times their coefficients, and the terms that a gate sums in float32.

    Every rule weighs expert e by c s_e / D, where s is a score of its logit, c a constant, and D the sum of the scores of the
    chosen or of all experts, or 1. So ds_e is c g_e / D for a chosen one, less c (sum_j g_j s_j) / D^2 for each expert that D
    sums over; the coefficient of g_e in it is c (1 - s_e / D) / D.
    """
    rule = ROUTERS[cell.router]
    if rule.formula not in FUSED_FORMULAS:
        raise bad(
            "router of training", cell.router, ", ".join(FUSED), "the gradient of other rules is not defined here"
        )
    chosen = torch.zeros_like(logits).scatter_(1, ids, 1.0)
    if rule.formula == "softmax_topk":  # D absorbs any factor of the scores, so that none overflows
        score = slope = (logits - logits.amax(1, keepdim=True)).exp()
        summed = chosen if rule.options["renormalize"] else torch.ones_like(chosen)
    elif rule.formula == "sqrtsoftplus_topk":
        score = (1 + logits.exp()).log().sqrt()
        slope, summed = 1 / (1 + (-logits).exp()) / (2 * score), chosen
    else:
        score = 1 / (1 + (-logits).exp())
        slope, summed = score * (1 - score), chosen if rule.formula == "sigmoid_topk" else torch.zeros_like(chosen)
    total = (score * summed).sum(1, keepdim=True) if summed.any() else torch.ones_like(score[:, :1])
    factor, share = rule.options.get("scale", 1.0) * slope / total, score / total
    own, sizes = (torch.zeros_like(logits).scatter_(1, ids, one) for one in (grad, size))
    squares = ((sizes * share) ** 2).sum(1, keepdim=True) * summed + sizes**2 * (1 - 2 * share * summed)
    return (
        factor * (own - (own * share).sum(1, keepdim=True) * summed),
        factor * squares.clamp_min(0).sqrt(),
        factor * (sizes + (sizes * share).sum(1, keepdim=True) * summed),
    )


def roundings(cell: Cell, rounded_sums: bool, rounded_scores: bool) -> dict[str, int]:
    """Roundings in a row of each output in a plain implementation, of which an expert's own are R; for `swiglu` R is 5.

    combined: R and the weighted sum. d_w2: the weighted gradient, all of R but the down product, the product. d_w13: the weighted
    gradient, its way through w2, as many for the slopes as for the activation, the product. d_x: those, and the sum over choices.
    d_logits: R, the products with y, and the gradient of the weights; a gate in float32 apart. In float32 sums are counted as well, two for each term.
    """
    own, exact = experts.roundings(cell), cell.dtype == "fp32"
    k, tokens, hidden, inner = cell.top_k, cell.tokens, cell.hidden, cell.intermediate
    total = 1 + max(2 * k if exact else 0, k if rounded_sums else 0)
    long = 2 * exact
    # Each tile's sum is rounded, and then its sum with the others.
    tiles = 2 * math.ceil(inner / _SCORE_TILE) if rounded_scores else 0
    return {
        "combined": own + total,
        "d_x": own + 2 + total + long * (hidden + 2 * inner),
        "d_logits": own + 2 + tiles + long * hidden,
        "d_w13": own + 2 + long * (hidden + tokens),
        "d_w2": own + 1 + long * tokens,
    }


def check(
    cell: Cell,
    inputs: dict[str, Tensor],
    outputs: dict[str, Tensor],
    expected: dict[str, Tensor],
    rounded_sums: bool = False,
    rounded_scores: bool = False,
) -> Check:
    """Every output within its roundings, d_logits within those of its terms and of a gate in float32; d_w13 and d_w2 for each expert.

    `rounded_sums` says that each of the k terms and sums of combined and d_x is rounded to the activations' format, `rounded_scores`
    that so are the sums over tiles of I that the gradient of a weight is made of.
    """
    counted = roundings(cell, rounded_sums, rounded_scores)
    limits = {name: tolerance(cell.dtype, n) for name, n in counted.items()}
    result = Check()
    for name in ("combined", "d_x"):
        result = both(result, close(outputs[name], expected[name], limits[name], name))
    want, limit = expected["d_logits"], limits["d_logits"]
    # Added to both sides, this leaves their difference as it is, and what that is held against has the size of the terms.
    terms = expected["logit_terms"] + tolerance("fp32", _GATE) / limit * expected["logit_sums"]
    shift = terms.copysign(want)
    result = both(result, close(outputs["d_logits"].double() + shift, want + shift, limit, "d_logits"))
    for name in ("d_w13", "d_w2"):
        for expert in range(cell.experts):
            if result.error:  # of hundreds of comparisons the others are not worth their time
                return result
            what = f"{name} of expert {expert}"
            result = both(result, close(outputs[name][expert], expected[name][expert], limits[name], what))
    return result


def cost(cell: Cell, inputs: dict[str, Tensor], outputs: dict[str, Tensor], expected: dict[str, Tensor]) -> Cost:
    """Scores, tokens, the gradient and the weights of every expert that has a token read once; result and all gradients written
    once, those of every expert; the experts' products once forward and, by rows and by weights, twice backward."""
    kept = expected["inverse"] >= 0
    active = int(expected["topk_ids"][kept].unique().numel())
    read = nbytes(inputs["logits"], inputs["x"], inputs["d_combined"]) + experts.weight_bytes(cell, inputs) * active
    forward = experts.products(cell, int(kept.sum()))
    backward = (((rows, columns, terms), (terms, rows, columns)) for rows, terms, columns in forward)
    return Cost(read, nbytes(*outputs.values()), sum(backward, forward))
