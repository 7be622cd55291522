"""The routing rules: one rule a file, one table line each; nothing here imports torch.

Contract: ``route(logits, top_k, bias=None, **options) -> (topk_ids (T, k) int32, topk_weights (T, k) float32)`` for
logits (T, E) in float32, float64 or bfloat16. A selection bias changes which experts are chosen, never their weights.
A file whose rule chooses by something else than logits (plus bias) says by what: ``score(logits) -> (T, E)``.
Rules are plain torch and double as the reference of the `gate` bench (run in float64).
"""

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType, ModuleType
from typing import Any

from moe_routing_bench.errors import bad


@dataclass(frozen=True)
class Router:
    """A rule with its options. `bias` says that it takes a selection bias; `groups` and `keep_groups` limit its choice."""

    name: str
    module: str
    summary: str
    options: Mapping[str, Any] = field(default_factory=dict)
    bias: bool = False

    def load(self) -> Callable:
        """The rule as a function of (logits, top_k, bias), its options bound."""
        route = self._module().route
        return lambda logits, top_k, bias=None: route(logits, top_k, bias, **self.options)

    def score(self, logits: Any) -> Any:
        """What experts are chosen by, without a selection bias: (T, E) of logits (T, E)."""
        return getattr(self._module(), "score", lambda logits: logits)(logits)

    def _module(self) -> ModuleType:
        return importlib.import_module(f"{__name__}.{self.module}")

    def check(self, experts: int, top_k: int) -> None:
        """Raise `UserError` when the rule cannot choose `top_k` of `experts`."""
        groups, keep = self.options.get("groups", 1), self.options.get("keep_groups", 1)
        if experts % groups or experts // groups < 2 <= groups:
            raise bad(
                f"experts for router {self.name}", experts, f"a multiple of its {groups} groups, at least two a group"
            )
        if top_k > experts // groups * keep:
            raise bad(
                f"top_k for router {self.name}",
                top_k,
                f"at most {experts // groups * keep}: {keep} of {groups} groups are kept",
            )


_TABLE = (
    Router("softmax_topk_renorm", "softmax_topk", "top-k of logits, softmax over the k (Mixtral, Qwen3, gpt-oss)", {"renormalize": True}),
    Router("softmax_topk", "softmax_topk", "softmax over all, top-k as is (OLMoE, Qwen1.5-MoE, Jamba)", {"renormalize": False}),
    Router(
        "deepseek_v2", "softmax_topk", "softmax, the 3 best of 8 groups by their best expert, x16",
        {"renormalize": False, "groups": 8, "keep_groups": 3, "scale": 16.0},
    ),
    Router(
        "deepseek_v3", "sigmoid_topk", "sigmoid + selection bias, the 4 best of 8 groups by their two best, renormalised, x2.5",
        {"groups": 8, "keep_groups": 4, "scale": 2.5}, bias=True,
    ),
    Router("sigmoid_renorm", "sigmoid_topk", "sigmoid + selection bias, renormalised (Kimi-K2, GLM, MiniMax)", bias=True),
    Router("sqrtsoftplus_renorm", "sqrtsoftplus_topk", "sqrt(softplus) + selection bias, renormalised (DeepSeek-V4)", {"scale": 1.5}, bias=True),
    Router("llama4", "topk_sigmoid", "top-k of logits, sigmoid of each (Llama 4)"),
)  # fmt: skip
ROUTERS: Mapping[str, Router] = MappingProxyType({router.name: router for router in _TABLE})
