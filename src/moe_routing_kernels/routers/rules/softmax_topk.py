"""Top-k of a softmax in its variants: softk (Mixtral), qwen3, topk_prenorm (OLMoE) and deepseek_v2_small.

The table names the sources; the choice itself is that of the gate rules in `routers/softmax_topk.py`.
"""

from torch import Tensor

from moe_routing_kernels import routers
from moe_routing_kernels.routers import losses
from moe_routing_kernels.routers.learned import COMMON_LOSSES, Learned, Routing


class Router(Learned):
    """Softmax top-k, with a renormalisation and a limit to groups as its options say."""

    known_losses = (*COMMON_LOSSES, "device")

    def __init__(self, *args, renormalize: bool, groups: int, keep_groups: int, scale: float) -> None:
        """Raises `UserError` where the groups do not fit."""
        super().__init__(*args)
        options = {"renormalize": renormalize, "groups": groups, "keep_groups": keep_groups, "scale": scale}
        gate = routers.GateRule(self.rule.name, "softmax_topk", self.rule.summary, options)
        gate.check(self.experts, self.top_k)
        self.route, self.groups = gate.load(), groups

    def forward(self, x: Tensor, token_ids: Tensor, positions: Tensor) -> Routing:
        """Route by the logits alone."""
        logits = self.logits(x)
        ids, weights = self.route(logits, self.top_k)
        scores = logits.softmax(1)
        terms = self.terms(logits, scores, ids, len(x), device=lambda: losses.device(scores, ids, self.groups))
        return Routing(ids, weights, terms, scores)
