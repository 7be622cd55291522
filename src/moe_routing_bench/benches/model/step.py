"""One forward pass of a model whose experts are computed in one of the library's forms, by `moe_routing_kernels.ops`, or, where they are
quantised, by an implementation of the bench `experts` between permute, pack and combine of `ops`: the other two take plain weights.

What every layer's experts were given and answered is returned with the result, for the check. These tensors exist anyway: to keep them costs
memory, not time.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from moe_routing_bench.benches.bench import find
from moe_routing_bench.benches.model import weight_views
from moe_routing_bench.benches.model.published_models import Model
from moe_routing_kernels import ops
from moe_routing_kernels.experts import Experts
from moe_routing_kernels.experts.common import unaligned
from moe_routing_kernels.formats import FORMATS
from moe_routing_kernels.implementations import reason
from moe_routing_kernels.layer import Layer
from moe_routing_kernels.ops import preparation
from moe_routing_kernels.ops import transformers as ours
from moe_routing_kernels.permute import RowLayout
from moe_routing_kernels.target import Target

NAME = "moe_routing_bench_quantised"
_BENCH = find("experts")


def register() -> None:
    """Make the library know `experts` as an experts implementation."""
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS  # pyright: ignore[reportMissingImports]

    ALL_EXPERTS_FUNCTIONS.register(NAME, experts)


def experts(module: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """`module.gemms`, which are `Products`, on hidden_states (T, H), top_k_index (T, k) and top_k_weights (T, k) -> (T, H)."""
    _, offsets, order, inverse = ops.permute(top_k_index, module.num_experts)
    y = module.gemms(ops.pack(hidden_states, order, inverse), offsets)
    return ops.combine(y, inverse, top_k_weights)


def experts_unsupported(problem: Experts, name: str, target: Target | None = None) -> str | None:
    """Why an implementation of `experts` cannot run this problem on a target (None: on any), or None."""
    return reason(_BENCH.load(name), problem, target, _BENCH[name].options)


def precompile_experts(problem: Experts, arch: str, name: str) -> None:
    """Put its kernels into the cache where it has any; needs no GPU."""
    module = _BENCH.load(name)
    if hasattr(module, "precompile") and not experts_unsupported(problem, name):
        module.precompile(problem, arch, **_BENCH[name].options)


@dataclass(frozen=True)
class Products:
    """Both products of one layer by an implementation of `experts`, with the parts of their weights by its names.

    They are bound anew to the rows of each call, as operators are. What is made of the weights, and a workspace, is made by `bound` and kept.
    """

    problem: Experts
    name: str
    parts: Mapping[str, Tensor]
    kept: object = None  # a call, for what it holds

    def bind(self, rows: Tensor, offsets: Tensor, y: Tensor) -> Callable[[], dict[str, Tensor] | None]:
        """The call that multiplies rows (R, H), those of expert e from offsets[e] on, -> y (R, H), or returns y."""
        given: dict[str, Any] = {"packed": rows, "offsets": offsets, "y": y, **self.parts, **_BENCH[self.name].options}
        return _BENCH.load(self.name).bind(self.problem, **given)

    def __call__(self, rows: Tensor, offsets: Tensor) -> Tensor:
        """rows (R, H) and offsets (E + 1,) int32 -> y (R, H)."""
        y = torch.empty_like(rows)
        returned = self.bind(rows, offsets, y)()
        return returned["y"] if returned else y


def bound(problem: Experts, name: str, parts: Mapping[str, Tensor]) -> Products:
    """`Products` whose weights are as the implementation wants them."""
    found, device = Products(problem, name, parts), parts["w13"].device
    rows = torch.empty((problem.rows, problem.hidden), dtype=FORMATS[problem.dtype].torch_dtype, device=device)
    offsets = torch.zeros(problem.experts + 1, dtype=torch.int32, device=device)
    return replace(found, kept=found.bind(rows, offsets, torch.empty_like(rows)))


def of_layer(tensors: Mapping[str, Tensor], layer: int) -> dict[str, Tensor]:
    """The tensors of one layer among those of all, ``w13.3`` of the fourth as ``w13``."""
    found = ((name.rpartition("."), one) for name, one in tensors.items())
    return {name: one for (name, _, number), one in found if name and number == str(layer)}


HANDED = ("x", "topk_ids", "topk_weights", "y")  # the experts' arguments and answer


def unsupported(problem: Model, target: Target | None = None, *, form: str, experts: str = "") -> str | None:
    """Why this problem cannot run on a target (None: on any), or None."""
    if experts:
        return experts_unsupported(layer(problem).experts, experts, target)
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
    for name, known in ((ours.NAME, ours.register), (NAME, register)):
        if form == name:
            known()
    model, seen = weight_views.over(problem, weights, form), list[tuple[Tensor, ...]]()
    for i, (_, module) in enumerate(weight_views.experts(model)):
        if experts:
            module.gemms = bound(layer(problem).experts, experts, of_layer(parts, i))
        module.register_forward_hook(lambda _, given, y: seen.append((*given, y)))

    def run() -> dict[str, Tensor]:
        seen.clear()
        found: dict[str, Tensor] = weight_views.forward(model, ids, keys, values)
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
    if form in (ours.NAME, NAME):
        preparation.compile_layer(layer(problem), Target.named(arch), ids="int64", weights=problem.dtype)
    if experts:
        precompile_experts(layer(problem).experts, arch, experts)
