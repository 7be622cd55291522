"""One forward pass of a model whose experts are computed in one of the library's forms, by `moe_routing_kernels.ops`, or, where they are
quantised, by an implementation of the bench `experts`.

What every layer's experts were given and answered is returned with the result, for the check. These tensors exist anyway: to keep them costs
memory, not time.
"""

from collections.abc import Callable

from torch import Tensor

from moe_routing_bench.benches.model import library, quantised
from moe_routing_bench.benches.model.architectures import Model
from moe_routing_kernels.experts.common import unaligned
from moe_routing_kernels.layer import Layer
from moe_routing_kernels.ops import compilation
from moe_routing_kernels.ops import transformers as ours
from moe_routing_kernels.permute.layout import RowLayout
from moe_routing_kernels.target import Target

HANDED = ("x", "topk_ids", "topk_weights", "y")  # the experts' arguments and answer


def unsupported(problem: Model, target: Target | None = None, *, form: str, experts: str = "") -> str | None:
    """Why this problem cannot run on a target (None: on any), or None."""
    if experts:
        return quantised.unsupported(layer(problem).experts, experts, target)
    if problem.quantised:
        return f"takes weights of the activations' format, not {problem.weights}"
    return unaligned(layer(problem)) if form == "grouped_mm" else None


def bind(
    problem: Model,
    *,
    form: str,
    experts: str = "",
    ids: Tensor,
    weights: Tensor,
    keys: Tensor | None = None,
    values: Tensor | None = None,
    hidden: Tensor,
    logits: Tensor,
    **parts: Tensor,
) -> Callable[[], dict[str, Tensor]]:
    """Bind ids (B, S) int64, weights (W,), keys and values (L, B, heads, C, D), and for quantised experts of layer i the parts w13.i, w2.i and
    so on, which `experts` multiplies with; the call returns hidden (T, H), logits (B, V) float32 and, for
    layer i, x.i (T, H), topk_ids.i and topk_weights.i (T, k), and y.i (T, H).

    The library allocates all of them, so the bound outputs are not written.
    """
    for known in (ours, quantised):
        if form == known.NAME:
            known.register()
    model, seen = library.over(problem, weights, form), list[tuple[Tensor, ...]]()
    for i, (_, module) in enumerate(library.experts(model)):
        if experts:
            module.gemms = quantised.bound(layer(problem).experts, experts, quantised.of_layer(parts, i))
        module.register_forward_hook(lambda _, given, y: seen.append((*given, y)))

    def run() -> dict[str, Tensor]:
        seen.clear()
        found: dict[str, Tensor] = library.forward(model, ids, keys, values)
        for i, one in enumerate(seen):
            found |= {f"{name}.{i}": tensor for name, tensor in zip(HANDED, one, strict=True)}
        return found

    return run


def layer(problem: Model) -> Layer:
    """The layer of experts of a model."""
    layout = RowLayout(problem.tokens, problem.top_k, problem.experts)
    formats = (problem.dtype, problem.dtype, problem.weights)
    return Layer(layout, problem.hidden, problem.intermediate, *formats, "softmax_topk_renorm")


def precompile(problem: Model, arch: str, *, form: str, experts: str = "") -> None:
    """Put the kernels in CuTe DSL that the operators choose, and those of `experts`, into the cache; needs no GPU."""
    if form in (ours.NAME, quantised.NAME):
        compilation.layer(layer(problem), Target.named(arch), ids="int64", weights=problem.dtype)
    if experts:
        quantised.precompile(layer(problem).experts, arch, experts)
