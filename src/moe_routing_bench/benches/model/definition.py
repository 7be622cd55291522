"""What `model` computes, on what, and when an answer is right.

Inputs: ids (B, S) int64, uniform; to decode, keys and values (L, B, heads, C, D) of the context, N(0, 1); weights (W,), all parameters of the
model one after another, which all input sets share. Quantised experts are not among them: those of layer i are drawn in the format of the
activations, quantised, and given as w13.i, w2.i and the parts beside them (`formats.weights`). Products keep the variance of what they are given. Outputs: hidden (T, H), behind the
last norm, and the logits of the last position of each sequence (B, V) float32.

Roundings of bf16 change which experts a token is sent to where two are nearly tied, and what follows with them: of 48 narrow layers with 64
experts, a third of the choices differed from those in float32, and hidden by 12 %, in every implementation. So an answer is held against
float32 on the routes that it took itself, where that was 3 %. Every layer's experts are computed again, one by one, from the tokens, ids and
weights that they were given; then the model in float32, with the answers of those experts in place of its own, is held against hidden and
logits. It takes a layer's weight as it needs it. Only the experts differ between implementations: which of them
the library's routers choose is not checked.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from moe_routing_bench.benches.checks import Assignment, Check, Cost, both, close, nbytes, tolerance
from moe_routing_bench.benches.experts import definition as experts
from moe_routing_bench.benches.model import weight_views
from moe_routing_bench.benches.model.published_models import Model, architecture
from moe_routing_bench.benches.model.step import HANDED, of_layer
from moe_routing_bench.grid.cell import Cell
from moe_routing_bench.workload.draw import generator, randn

_ROUNDINGS = 8  # of a layer in a row: norm, projection, attention, projection, sum; norm, product, sum
Answer = Callable[[int, Tensor, Tensor, Tensor], Tensor]  # of a layer's experts: layer, x, ids, weights -> y


def problem(cell: Cell) -> Model:
    """The sizes of a cell. Raises `UserError` for a preset of which only the experts are known."""
    sizes = (cell.hidden, cell.intermediate, cell.experts, cell.top_k)
    formats = (cell.dtype, cell.get("weights") or cell.dtype)
    return Model(architecture(cell.model), cell.tokens, cell.phase == "decode", *sizes, *formats)


def build(cell: Cell, seed: int, device: str) -> dict[str, Tensor]:
    """Draw the inputs of one seed."""
    rng, wanted = generator(seed, device), problem(cell)
    shape = (wanted.sequences, cell.tokens // wanted.sequences)
    inputs = {"ids": torch.randint(wanted.architecture.vocabulary, shape, generator=rng, device=device)}
    if wanted.decode:
        kept = zip(("keys", "values"), weight_views.cache_shapes(wanted), strict=True)
        inputs |= {name: randn((wanted.architecture.layers, *one), cell.dtype, rng) for name, one in kept}
    return inputs


def shared(cell: Cell, seed: int, device: str) -> dict[str, Tensor]:
    """The weights, drawn once per cell and where they are used: they may take half of the memory of a GPU."""
    wanted, rng = problem(cell), generator(seed, device)
    weights = torch.empty(weight_views.length(wanted), dtype=weight_views.dtype(wanted), device=device)
    drawn = {"weights": weight_views.draw(wanted, weights, rng)}
    if wanted.quantised:
        for layer, _ in enumerate(weight_views.experts(weight_views.skeleton(wanted, "eager"))):
            drawn |= {f"{name}.{layer}": part for name, part in _quantised(cell, rng).items()}
    return drawn


def _quantised(cell: Cell, rng: torch.Generator) -> dict[str, Tensor]:
    """The parts of one layer's w13 (E, 2 I, H) and w2 (E, H, I), by the names of `experts`."""
    inner, hidden, found = cell.intermediate, cell.hidden, dict[str, Tensor]()
    for name, size in (("w13", (2 * inner, hidden)), ("w2", (hidden, inner))):
        plain = randn((cell.experts, *size), cell.dtype, rng).mul_(size[1] ** -0.5)
        found |= experts.quantised(cell, name, plain)
    return found


def empty_outputs(cell: Cell, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    """Outputs of the right shape, not initialised."""
    wanted, weights = problem(cell), inputs["weights"]
    logits = weights.new_empty((wanted.sequences, wanted.architecture.vocabulary), dtype=torch.float32)
    return {"hidden": weights.new_empty((cell.tokens, cell.hidden)), "logits": logits}


def reference(cell: Cell, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    """What the model chooses in float32: topk_ids and topk_weights (L', T, k) of its L' layers with experts.

    `check` holds the outputs against float32 on the routes that were taken.
    """
    weights, seen = _experts_weights(cell, inputs), list[tuple[Tensor, Tensor]]()

    def answer(layer: int, x: Tensor, ids: Tensor, scales: Tensor) -> Tensor:
        seen.append((ids, scales))
        return mixture(cell, weights[layer], x, ids, scales)

    in_float32(cell, inputs, answer)
    ids, scales = zip(*seen, strict=True)
    return {"topk_ids": torch.stack(ids), "topk_weights": torch.stack(scales)}


def in_float32(cell: Cell, inputs: dict[str, Tensor], answer: Answer) -> dict[str, Tensor]:
    """hidden (T, H) and logits (B, V) of the model in float32, TF32 off, whose experts give the answers of `answer`."""
    model = weight_views.over(problem(cell), inputs["weights"], "eager", wide=True)
    for layer, (_, module) in enumerate(weight_views.experts(model)):
        module.forward = lambda *given, layer=layer: answer(layer, *given).float()
    kept = (inputs[name].float() if name in inputs else None for name in ("keys", "values"))
    return weight_views.forward(model, inputs["ids"], *kept)


def _experts_weights(cell: Cell, inputs: dict[str, Tensor]) -> list[dict[str, Tensor]]:
    """w13 (E, 2 I, H) and w2 (E, H, I) of every layer with experts, views into the weights; of quantised ones the parts."""
    found = weight_views.over(problem(cell), inputs["weights"], "eager")
    if problem(cell).quantised:
        return [of_layer(inputs, layer) for layer, _ in enumerate(weight_views.experts(found))]
    return [{"w13": one.gate_up_proj, "w2": one.down_proj} for _, one in weight_views.experts(found)]


def mixture(cell: Cell, weights: dict[str, Tensor], x: Tensor, ids: Tensor, scales: Tensor) -> Tensor:
    """One layer's experts, one by one: x (T, H), ids and scales (T, k) -> (T, H) in float32 (float64 for float32 cells)."""
    wide, plain = torch.float64 if cell.dtype == "fp32" else torch.float32, cell.but(activation="swiglu")
    total = torch.zeros_like(x, dtype=wide)
    for expert in ids.unique().tolist():
        token, slot = (ids == expert).nonzero(as_tuple=True)
        y = experts.apply(plain, x[token].to(wide), weights, expert)
        total.index_add_(0, token, y * scales[token, slot].to(wide).unsqueeze(1))
    return total


def roundings(cell: Cell, rounded_terms: bool, rounded_sums: bool) -> tuple[int, int]:
    """Roundings in a row of a layer's experts and, their answers given, of the model; in float32 also those of the sums."""
    own, wanted = experts.roundings(cell.but(activation="swiglu")) + 1, problem(cell)
    exact, layers = cell.dtype == "fp32", wanted.architecture.layers
    own += max(2 * cell.top_k if exact else 0, cell.top_k if rounded_sums else 0, rounded_terms)
    return own, layers * (_ROUNDINGS + (4 * cell.hidden if exact else 0))


def check(
    cell: Cell,
    inputs: dict[str, Tensor],
    outputs: dict[str, Tensor],
    expected: dict[str, Tensor],
    rounded_terms: bool = False,
    rounded_sums: bool = False,
) -> Check:
    """Each layer's experts on what they were given, then the model around their answers; see above.

    `rounded_terms` says that each of the k terms of a token is rounded to the activations' format before they are summed, `rounded_sums`
    that each sum of them is as well.
    """
    weights = _experts_weights(cell, inputs)
    own, whole = (tolerance(cell.dtype, n) for n in roundings(cell, rounded_terms, rounded_sums))
    result, answers = Check(), list[Tensor]()
    for layer, one in enumerate(weights):
        if missing := [f"{name}.{layer}" for name in HANDED if f"{name}.{layer}" not in outputs]:
            return both(result, Check(error=f"{missing[0]} was not returned: experts were not run"))
        x, ids, scales, y = (outputs[f"{name}.{layer}"] for name in HANDED)
        result = both(result, close(y, mixture(cell, one, x, ids, scales), own, f"experts of layer {layer}"))
        if result.error:
            return result
        answers.append(y.float())
    want = in_float32(cell, inputs, lambda layer, *_: answers[layer])
    for name, one in want.items():
        result = both(result, close(outputs[name], one, whole, name))
    return result


def assignment(cell: Cell, inputs: dict[str, Tensor], expected: dict[str, Tensor]) -> Assignment:
    """Expert ids and weights (T, k) of the middle one of the layers with experts."""
    middle = len(expected["topk_ids"]) // 2
    return Assignment(expected["topk_ids"][middle], expected["topk_weights"][middle])


def cost(cell: Cell, inputs: dict[str, Tensor], outputs: dict[str, Tensor], expected: dict[str, Tensor]) -> Cost:
    """Token ids, the cache, embeddings of the tokens and all other parameters but experts without a token read once; outputs written once;
    products with parameters, of the logits those of the last positions. Attention's own products are not counted."""
    always, products = weight_views.counts(problem(cell))
    active, one = sum(len(layer.unique()) for layer in expected["topk_ids"]), 3 * cell.hidden * cell.intermediate
    always += len(inputs["ids"].unique()) * cell.hidden
    routed = active * nbytes(*_experts_weights(cell, inputs)[0].values()) // cell.experts
    each = products + len(expected["topk_ids"]) * cell.top_k * one
    given = nbytes(*(inputs[name] for name in ("ids", "keys", "values") if name in inputs))
    flops = 2 * (cell.tokens * each + outputs["logits"].numel() * cell.hidden)
    read = given + always * inputs["weights"].element_size() + routed
    return Cost(read, nbytes(outputs["hidden"], outputs["logits"]), (), flops)
