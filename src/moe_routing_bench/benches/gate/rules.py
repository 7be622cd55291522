"""What a fused gate kernel needs to know of a routing rule: the compile-time half of `routers/<rule>.py`."""

from dataclasses import dataclass
from typing import Any

from moe_routing_bench.routers import ROUTERS

MAX_EXPERTS, MAX_TOP_K, WARP = 1024, 32, 32


@dataclass(frozen=True)
class Rule:
    """How scores become a choice and weights.

    `select` is what experts are chosen by (with the selection bias where there is one): the logit itself, its sigmoid,
    or the square root of its softplus. `weigh` is what a chosen expert weighs: a softmax over the chosen or over all
    experts, or a score of its own; scores are divided by their sum where `renormalize`. All are multiplied by `scale`.
    Only the `keep_groups` best of `groups` groups take part; a group counts as its `group_best` best experts' sum.
    """

    select: str  # "logit" | "sigmoid" | "sqrtsoftplus"
    weigh: str  # "softmax_chosen" | "softmax_all" | "sigmoid" | "sqrtsoftplus"
    renormalize: bool = False
    biased: bool = False
    scale: float = 1.0
    groups: int = 1
    keep_groups: int = 1
    group_best: int = 1


def rule_of(cell: Any) -> Rule:
    """The rule of a cell's router; KeyError for one that has no fused form."""
    router = ROUTERS[cell.router]
    shared = {name: router.options[name] for name in ("scale", "groups", "keep_groups") if name in router.options}
    if router.module == "softmax_topk":
        weigh = "softmax_chosen" if router.options["renormalize"] else "softmax_all"
        return Rule("logit", weigh, **shared)
    if router.module == "topk_sigmoid":
        return Rule("logit", "sigmoid", **shared)
    score = {"sigmoid_topk": "sigmoid", "sqrtsoftplus_topk": "sqrtsoftplus"}[router.module]
    return Rule(score, score, renormalize=True, biased=router.bias, group_best=2, **shared)


def supports(cell: Any) -> str | None:
    """Why the fused kernels cannot run a cell, or None."""
    if cell.experts > MAX_EXPERTS or cell.top_k > MAX_TOP_K:
        return f"the fused gate takes up to {MAX_EXPERTS} experts and k up to {MAX_TOP_K}"
    try:
        rule = rule_of(cell)
    except KeyError:
        return f"no fused kernel for router {cell.router}"
    if WARP % rule.groups:
        return f"the fused gate takes groups that divide a warp, not {rule.groups}"
    return None
