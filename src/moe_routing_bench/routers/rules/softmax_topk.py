"""Top-k of a softmax in its variants: softk (Mixtral), qwen3, topk_prenorm (OLMoE), deepseek_v2.

Sources: as in the table; the choice itself is the inference rule `routers/softmax_topk.py`.
"""

from torch import Tensor

from moe_routing_bench import routers
from moe_routing_bench.routers import losses
from moe_routing_bench.routers.learned import COMMON_LOSSES, Learned, Routing


class Router(Learned):
    """Softmax top-k with optional renormalisation and group limit."""

    known_losses = (*COMMON_LOSSES, "device")

    def __init__(self, *args, renormalize: bool, groups: int, keep_groups: int, scale: float) -> None:
        """Raises `UserError` where the groups do not fit."""
        super().__init__(*args)
        options = {"renormalize": renormalize, "groups": groups, "keep_groups": keep_groups, "scale": scale}
        inference = routers.Router(self.rule.name, "softmax_topk", self.rule.summary, options)
        inference.check(self.experts, self.top_k)
        self.route, self.groups = inference.load(), groups

    def forward(self, x: Tensor, token_ids: Tensor, positions: Tensor) -> Routing:
        """Route by the logits alone."""
        logits = self.logits(x)
        ids, weights = self.route(logits, self.top_k)
        scores = logits.softmax(1)
        terms = self.terms(logits, scores, ids, len(x), device=lambda: losses.device(scores, ids, self.groups))
        return Routing(ids, weights, terms, scores)
