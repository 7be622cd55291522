"""The gate rules: formulas (`formulas`, or a module of their own), and one table line per rule. Nothing here imports torch.

Contract: ``route(logits, top_k, bias=None, **options) -> (topk_ids (T, k) int32, topk_weights (T, k) float32)`` for
logits (T, E) in float32, float64 or bfloat16. A selection bias changes which experts are chosen, never their weights.
A rule that selects by something other than the logits (plus the bias) defines ``score(logits) -> (T, E)``.
Rules are plain torch; run in float64 they are also the reference of the `gate` bench. A name may carry another factor on
the weights than its rule has: ``sigmoid_renorm_x2.827`` is `sigmoid_renorm` with the scale 2.827 of Kimi-K2.
"""

import functools
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any

from moe_routing_kernels import declarations
from moe_routing_kernels.errors import bad, positive
from moe_routing_kernels.implementations import load, module_of


@dataclass(frozen=True)
class GateRule:
    """A rule that turns given logits into expert ids and weights, with its options.

    `module` is a module of this package, or ``module:entry``, whose functions end in that name. `bias` says that the rule takes a selection bias. The options `groups` and `keep_groups`, where a rule has them,
    limit its choice to the best groups of neighbouring experts. A rule of another package (`declarations`) is named by its
    reference; its `module` is the declaration's, after a colon, so that it is none of the formulas here.
    """

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
        """The scores that experts are selected by, without a selection bias: (T, E) from logits (T, E)."""
        return getattr(self._module(), "score", lambda logits: logits)(logits)

    @property
    def scale(self) -> float:
        """The factor on the weights."""
        return self.options.get("scale", 1.0)

    @property
    def foreign(self) -> bool:
        """Whether it is of another package."""
        return ":" in self.name

    @property
    def formula(self) -> str:
        """The name of its formula, which fused kernels know it by; empty for a rule of another package."""
        return "" if self.foreign else self.module.rpartition(":")[2]

    def code(self) -> str:
        """The hashes of the code of a rule of another package, and that package's version."""
        return declarations.code(self.name, (self.name.partition(":")[0], module_of(self._place())))

    def _place(self) -> str:
        if self.foreign:
            return declarations.absolute(self.module.removeprefix(":"), self.name)
        return f"{__name__}.{self.module}"

    def _module(self) -> Any:
        return load(self._place())

    def check(self, experts: int, top_k: int) -> None:
        """Raise `UserError` when the rule cannot choose `top_k` of `experts`."""
        groups, keep = self.options.get("groups", 1), self.options.get("keep_groups", 1)
        if experts % groups or experts // groups < 2 <= groups:
            allowed = f"a multiple of its {groups} groups, at least two per group"
            raise bad(f"experts for router {self.name}", experts, allowed)
        most = experts // groups * keep
        if top_k > most:
            raise bad(f"top_k for router {self.name}", top_k, f"at most {most}: {keep} of {groups} groups are kept")


_TABLE = (
    GateRule(
        "softmax_topk_renorm",
        "formulas:softmax_topk",
        "top-k of logits, softmax over the k (Mixtral, Qwen3, gpt-oss)",
        {"renormalize": True},
    ),
    GateRule(
        "softmax_topk",
        "formulas:softmax_topk",
        "softmax over all, top-k as is (OLMoE, Qwen1.5-MoE, Jamba)",
        {"renormalize": False},
    ),
    GateRule(
        "deepseek_v2",
        "formulas:softmax_topk",
        "softmax, the 3 best of 8 groups by their best expert, x16",
        {"renormalize": False, "groups": 8, "keep_groups": 3, "scale": 16.0},
    ),
    GateRule(
        "deepseek_v3",
        "formulas:sigmoid_topk",
        "sigmoid + selection bias, the 4 best of 8 groups by their two best, renormalised, x2.5",
        {"groups": 8, "keep_groups": 4, "scale": 2.5},
        bias=True,
    ),
    GateRule(
        "sigmoid_renorm",
        "formulas:sigmoid_topk",
        "sigmoid + selection bias, renormalised (MiniMax; Kimi-K2 and GLM with a scale)",
        bias=True,
    ),
    GateRule(
        "sqrtsoftplus_renorm",
        "formulas:sqrtsoftplus_topk",
        "sqrt(softplus) + selection bias, renormalised, x1.5 (DeepSeek-V4)",
        {"scale": 1.5},
        bias=True,
    ),
    GateRule("llama4", "formulas:topk_sigmoid", "top-k of logits, sigmoid of each (Llama 4)"),
)


POSITIVE = "a positive finite number, or None for the rule's own"
# The name of a rule of the table with another scale; `repr` of the number is its one spelling.
SCALED = r"(\w+?)_x(\d[\d.]*(?:e[+-]?\d+)?)"


def scaled(name: str, scale: float | None) -> str:
    """The name of rule `name` whose weights are multiplied by `scale` in place of the rule's factor; None keeps the rule's.

    Raises `UserError` for a scale that is not positive and finite, and for a rule of another package.
    """
    if scale is None:
        return name
    if not positive(scale):
        raise bad("scale", scale, POSITIVE)
    if ROUTERS[name].foreign:
        raise bad("scale", scale, f"None: {name} is a rule of another package, which scales weights itself")
    base = match[1] if (match := re.fullmatch(SCALED, name)) else name
    return base if ROUTERS[base].scale == scale else f"{base}_x{float(scale)!r}".removesuffix(".0")


class _Rules(dict[str, GateRule]):
    """The table by name. References and names with a scale are looked up when asked for."""

    def __contains__(self, name: object) -> bool:
        """Whether it is a name of the table, with a scale or without, or a reference."""
        if super().__contains__(name) or ":" in str(name):
            return True
        match = re.fullmatch(SCALED, str(name))
        return bool(match and super().__contains__(match[1]) and str(name) == _spelled(match))

    def __missing__(self, name: str) -> GateRule:
        """Read a reference or a name with a scale. KeyError for any other text, `UserError` where a reference names no rule."""
        if name not in self:
            raise KeyError(name)
        if ":" in name:
            return _declared(name)
        base, _, scale = name.rpartition("_x")
        return replace(self[base], name=name, options={**self[base].options, "scale": float(scale)})


def _spelled(match: re.Match[str]) -> str:
    """The one name of a rule with a scale; empty where the scale is that of the rule, or no positive finite number."""
    try:
        scale = float(match[2])
    except ValueError:
        return ""
    return scaled(match[1], scale) if positive(scale) else ""


@functools.cache
def _declared(reference: str) -> GateRule:
    declared = declarations.read(reference, GateRule)[reference]
    rule = replace(declared, name=reference, module=f":{declared.module}")
    rule.code()  # raises where a module is missing
    return rule


ROUTERS: Mapping[str, GateRule] = MappingProxyType(_Rules({router.name: router for router in _TABLE}))
