"""The routing rules of published architectures: which router here computes what the fields of a config.json ask for, or why none does."""

from collections.abc import Callable
from typing import Any, Protocol

from moe_routing_kernels.errors import shown


class Fields(Protocol):
    """What a rule reads: the values of fields, and where it notes what it took or cannot express."""

    def value(self, name: str, otherwise: Any = ...) -> Any:
        """The value of a field, or the class's default, which is then noted; `otherwise` where the class has no such field."""
        ...

    def given(self, name: str) -> tuple[bool, Any]:
        """Whether the file has a field, and its value."""
        ...

    def count(self, name: str, least: int = 1) -> int:
        """A number of things, 0 for null."""
        ...

    def flag(self, name: str, otherwise: Any = ...) -> bool:
        """The value of a field that is true or false."""
        ...

    def left(self, name: str) -> Any:
        """The value of a field that nothing has read so far, now taken as read."""
        ...

    def note(self, text: str) -> None:
        """Note what the preset leaves out or takes for granted."""

    def refuse(self, reason: str) -> None:
        """Note why the model cannot be measured."""


Rule = Callable[[Fields], str | None]


def always(router: str) -> Rule:
    """A rule that no field chooses."""

    def chosen(read: Fields) -> str:
        read.note(f"router {router}: no field says it, the architecture always routes so")
        return router

    return chosen


def refused(reason: str) -> Rule:
    """A rule that no router here has."""
    return lambda read: read.refuse(reason)


def softmax(read: Fields) -> str:
    """Softmax over all experts, and whether the chosen weights are renormalised."""
    return "softmax_topk_renorm" if read.flag("norm_topk_prob") else "softmax_topk"


# Fields of the score, of whether weights are renormalised, and of groups, as other codes name them.
_SCORES = ("scoring_func", "score_func", "score_function", "moe_router_activation", "moe_router_activation_func")
_RENORMALISED = ("norm_topk_prob", "moe_renormalize", "route_norm", "norm_expert_weight")
_GROUPS = (("n_group", "topk_group"), ("num_expert_group", "topk_group"), ("num_expert_groups", "num_limited_groups"))


def uncontradicted(read: Fields, router: str) -> str | None:
    """The router of a rule, or None, with the reason, where a field that the rule does not read asks for another."""
    score = "softmax" if router.startswith("softmax") or router == "deepseek_v2" else router.partition("_")[0]
    score = {"deepseek": "sigmoid", "llama4": "sigmoid"}.get(score, score)
    renormalised = router.endswith("_renorm") or router == "deepseek_v3"
    wanted: dict[str, Any] = {**dict.fromkeys(_SCORES, score), **dict.fromkeys(_RENORMALISED, renormalised)}
    others = {name: value for name in wanted if (value := read.left(name)) not in (None, wanted[name])}
    numbers = {name: read.left(name) for name in dict.fromkeys(name for pair in _GROUPS for name in pair)}
    others |= {name: numbers[name] for name, kept in _GROUPS if numbers[name] not in (None, 0, 1, numbers[kept])}
    for name, value in others.items():
        read.refuse(f"its {name} is {shown(value)}, which its architecture's rule, {router}, does not read")
    return None if others else router


_ROUTERS = {"sigmoid": "sigmoid_renorm", "sqrtsoftplus": "sqrtsoftplus_renorm"}  # of a score


def scored(first: str, *others: str, groups: bool = False, renormalised: bool = False) -> Rule:
    """A score for each expert on its own, a selection bias, and renormalised weights.

    `first` and `others` are the scores that the architecture can have; where it has one alone, a file need not say it. `groups`: it may keep the best
    groups of experts; `renormalised`: it always renormalises.
    """

    def chosen(read: Fields) -> str | None:
        function = read.value("scoring_func") if others else read.given("scoring_func")[1] or first
        method = read.given("topk_method")[1]
        if method not in (None, "noaux_tc"):
            return read.refuse(f"its topk_method is {shown(method)}, that of this architecture's rule noaux_tc")
        if function not in (first, *others):
            return read.refuse(
                f"its scoring_func is {shown(function)}, this architecture's rule has {' or '.join((first, *others))}"
            )
        rule = _ROUTERS[function]
        if not renormalised and not read.flag("norm_topk_prob"):
            return read.refuse(f"it does not renormalise the weights, which {rule} does")
        return grouped(read, function, rule) if groups else rule

    return chosen


def grouped(read: Fields, function: str, router: str) -> str | None:
    """The rule where the best of several groups of experts are kept; `router` where all are."""
    groups, kept = (read.count(name, 0) or 1 for name in ("n_group", "topk_group"))
    if groups == kept:
        return router
    if (groups, kept, function) == (8, 4, "sigmoid"):
        return "deepseek_v3"
    return read.refuse(f"its router keeps {kept} of {groups} groups, the rule deepseek_v3 4 of 8 by sigmoid")


def deepseek_v2(read: Fields) -> str | None:
    """Plain top-k, the best 3 of 8 groups, or, in later checkpoints, the rule of DeepSeek-V3."""
    method, function = read.value("topk_method"), read.given("scoring_func")[1] or "softmax"
    if method == "noaux_tc":
        return scored("sigmoid", groups=True)(read)
    if function != "softmax":
        return read.refuse(
            f"its topk_method {shown(method)} has scoring_func {shown(function)}, the rule of this method softmax"
        )
    renormalised = read.flag("norm_topk_prob", False)
    if method == "greedy":
        for name in ("n_group", "topk_group"):
            read.given(name)  # which this method does not use
        return "softmax_topk_renorm" if renormalised else "softmax_topk"
    if method != "group_limited_greedy":
        return read.refuse(f"its topk_method {shown(method)} is not among the routers")
    groups = read.count("n_group", 0), read.count("topk_group", 0), renormalised
    if groups == (8, 3, False):
        return "deepseek_v2"
    return read.refuse(
        f"its router keeps {groups[1]} of {groups[0]} groups, the rule deepseek_v2 3 of 8, not renormalised"
    )


def bailing(read: Fields) -> str | None:
    """Softmax, or, in later checkpoints, the rule of DeepSeek-V3."""
    function = read.given("score_function")[1] or "softmax"
    if function == "sigmoid":
        return scored("sigmoid", groups=True)(read)
    return softmax(read) if function == "softmax" else read.refuse(f"its score_function {shown(function)} is not known")


def softmax_groups(read: Fields) -> str | None:
    """Softmax, groups of experts by the sum of their two best."""
    groups, kept = (read.count(name, 0) or 1 for name in ("n_group", "topk_group"))
    if groups == kept:
        return "softmax_topk_renorm" if read.flag("norm_topk_prob", True) else "softmax_topk"
    return read.refuse(
        f"its router keeps {kept} of {groups} groups by the two best softmax scores, which no router here does"
    )


def dbrx(read: Fields) -> str | None:
    """Softmax over all experts; the field is the order of the norm that the chosen weights are divided by."""
    order = read.value("moe_normalize_expert_weights")
    if order in (1, None):
        return "softmax_topk_renorm" if order else "softmax_topk"
    return read.refuse(f"it divides the weights by their norm of order {shown(order)}, not by their sum")


def longcat(read: Fields) -> None:
    """Softmax with a selection bias, over experts and identities."""
    zero = read.value("zero_expert_num")
    others = f"{zero} zero (identity) experts share its softmax" if zero else "its softmax has a selection bias"
    read.refuse(f"{others}, which no router here has")


def cohere2(read: Fields) -> str | None:
    """Top-k of the logits, then softmax or sigmoid of those."""
    function = read.value("expert_selection_fn")
    if read.value("num_shared_experts") and read.value("shared_expert_combination_strategy") != "sum":
        read.refuse("it averages routed and shared experts, the layer bench adds them")
    if function == "softmax":
        read.given("norm_topk_prob")  # the sum is 1 either way
        return "softmax_topk_renorm"
    if function == "sigmoid":
        return "sigmoid_renorm" if read.flag("norm_topk_prob") else "llama4"
    return read.refuse(f"its expert_selection_fn {shown(function)} is not among the routers")


def laguna(read: Fields) -> str | None:
    """Sigmoid with a selection bias, of logits that may be capped."""
    if read.value("moe_router_logit_softcapping"):
        return read.refuse(
            f"its router caps logits at {shown(read.value('moe_router_logit_softcapping'))}, which no router here does"
        )
    if read.flag("moe_apply_router_weight_on_input"):
        read.refuse("it multiplies the experts' input by their weights, the layer bench their output")
    return always("sigmoid_renorm")(read)
