"""gate: logits (T, E) to the k chosen expert ids (T, k) int32 and their weights (T, k) float32.

Fused kernels take routing rules as constants that are known when a kernel is compiled (`FusedRule`).
"""

from dataclasses import dataclass

from moe_routing_kernels.implementations import Candidate
from moe_routing_kernels.routers import ROUTERS


@dataclass(frozen=True)
class Gate:
    """Tensors: logits (T, E) of `dtype`, bias (E,) float32 or None; topk_ids (T, k) int32, topk_weights (T, k) float32."""

    tokens: int
    experts: int
    top_k: int
    dtype: str  # format of the logits
    router: str  # routing rule, a name of `routers.ROUTERS`


IMPLEMENTATIONS = (
    Candidate("torch", "torch_gate"),
    Candidate("torch_compile", "torch_gate", requires=("compiler",), options={"compiled": True}),
    Candidate("triton", "triton_gate", requires=("gpu", "triton"), rank=2),
    Candidate("cute", "cute_gate", requires=("nvidia", "cutlass"), rank=1),
)


MAX_EXPERTS, MAX_TOP_K, WARP = 1024, 32, 32
# Formulas of rules that have a fused form, and the rules of the table that are in one.
FUSED_FORMULAS = ("softmax_topk", "topk_sigmoid", "sigmoid_topk", "sqrtsoftplus_topk")
FUSED = tuple(name for name, router in ROUTERS.items() if router.formula in FUSED_FORMULAS)


@dataclass(frozen=True)
class FusedRule:
    """How logits become a choice of experts and weights.

    `select` is the score that experts are chosen by, to which the selection bias is added where there is one: the logit
    itself, its sigmoid, or the square root of its softplus. `weigh` is the weight of a chosen expert: a softmax over the
    chosen or over all experts, or the expert's own score. Weights are divided by their sum where `renormalize`, and multiplied
    by `scale`. Only the `keep_groups` best of `groups` groups of experts take part; a group's score is the sum of its
    `group_best` best experts' scores.
    """

    select: str  # "logit" | "sigmoid" | "sqrtsoftplus"
    weigh: str  # "softmax_chosen" | "softmax_all" | "sigmoid" | "sqrtsoftplus"
    renormalize: bool = False
    biased: bool = False
    scale: float = 1.0
    groups: int = 1
    keep_groups: int = 1
    group_best: int = 1


def rule_of(name: str) -> FusedRule:
    """The routing rule `name` as constants of a fused kernel; KeyError where there is none."""
    router = ROUTERS[name]
    shared = {name: router.options[name] for name in ("scale", "groups", "keep_groups") if name in router.options}
    if router.formula == "softmax_topk":
        weigh = "softmax_chosen" if router.options["renormalize"] else "softmax_all"
        return FusedRule("logit", weigh, **shared)
    if router.formula == "topk_sigmoid":
        return FusedRule("logit", "sigmoid", **shared)
    score = {"sigmoid_topk": "sigmoid", "sqrtsoftplus_topk": "sqrtsoftplus"}[router.formula]
    return FusedRule(score, score, renormalize=True, biased=router.bias, group_best=2, **shared)


def unsupported(problem: Gate) -> str | None:
    """Why the fused kernels cannot run a problem, or None."""
    if problem.experts > MAX_EXPERTS or problem.top_k > MAX_TOP_K:
        return f"the fused gate takes up to {MAX_EXPERTS} experts and k up to {MAX_TOP_K}"
    try:
        rule = rule_of(problem.router)
    except KeyError:
        return f"no fused kernel for router {problem.router}"
    if WARP % rule.groups:
        return f"the fused gate takes groups that divide a warp, not {rule.groups}"
    return None
