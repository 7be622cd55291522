"""One forward pass of a model whose experts are computed in one of the library's forms, or by `moe_routing_bench.ops`.

What every layer's experts were given and answered is returned with the result, for the check. These tensors exist anyway: to keep them costs
memory, not time.
"""

from collections.abc import Callable

from torch import Tensor

from moe_routing_bench.benches.model import library
from moe_routing_bench.benches.model.architectures import Model
from moe_routing_bench.kernels.experts.common import unaligned
from moe_routing_bench.kernels.layer import Layer
from moe_routing_bench.kernels.permute.layout import RowLayout
from moe_routing_bench.ops import transformers as ours

HANDED = ("x", "topk_ids", "topk_weights", "y")  # the experts' arguments and answer


def unsupported(problem: Model, *, form: str) -> str | None:
    """Why this problem cannot run, or None."""
    return unaligned(layer(problem)) if form == "grouped_mm" else None


def bind(
    problem: Model,
    *,
    form: str,
    ids: Tensor,
    weights: Tensor,
    keys: Tensor | None = None,
    values: Tensor | None = None,
    hidden: Tensor,
    logits: Tensor,
) -> Callable[[], dict[str, Tensor]]:
    """Bind ids (B, S) int64, weights (W,), keys and values (L, B, heads, C, D); the call returns hidden (T, H), logits (B, V) float32 and, for
    layer i, x.i (T, H), topk_ids.i and topk_weights.i (T, k), and y.i (T, H).

    The library allocates all of them, so the bound outputs are not written.
    """
    if form == ours.NAME:
        ours.register()
    model, seen = library.over(problem, weights, form), list[tuple[Tensor, ...]]()
    for _, module in library.experts(model):
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
    formats = (problem.dtype, problem.dtype, problem.dtype)
    return Layer(layout, problem.hidden, problem.intermediate, *formats, "softmax_topk_renorm")


def precompile(problem: Model, arch: str, *, form: str) -> None:
    """Put the kernels in CuTe DSL that the operators choose into the cache; needs no GPU."""
    from moe_routing_bench.ops import compilation

    if form == ours.NAME:
        compilation.layer(layer(problem), arch)
