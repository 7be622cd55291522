"""Quantised experts in a model of the transformers library: an implementation of the bench `experts` between permute, pack and combine of `ops`.

The library's own forms, and `ops.transformers`, take plain weights.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from moe_routing_bench.benches.bench import find
from moe_routing_kernels import ops
from moe_routing_kernels.experts import Experts
from moe_routing_kernels.formats import FORMATS
from moe_routing_kernels.implementations import reason
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


def unsupported(problem: Experts, name: str, target: Target | None = None) -> str | None:
    """Why an implementation of `experts` cannot run this problem on a target (None: on any), or None."""
    return reason(_BENCH.load(name), problem, target, _BENCH[name].options)


def precompile(problem: Experts, arch: str, name: str) -> None:
    """Put its kernels into the cache where it has any; needs no GPU."""
    module = _BENCH.load(name)
    if hasattr(module, "precompile") and not unsupported(problem, name):
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
