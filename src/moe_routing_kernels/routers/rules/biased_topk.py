"""Top-k of scores plus a selection bias that follows the loads.

Rules: deepseek_v3_small, sigmoid_renorm, sqrtsoftplus_renorm and loss_free_bias.

Sources: 2408.15664 algorithm 1 (the update), DeepSeek-V3 2412.19437 eq. 13-20; the choice is `routers/sigmoid_topk.py`.
"""

import torch
from torch import Tensor

from moe_routing_kernels import routers
from moe_routing_kernels.errors import pick
from moe_routing_kernels.routers import choice, losses, sigmoid_topk, sqrtsoftplus_topk
from moe_routing_kernels.routers.learned import Learned, Routing

SCORES = {"sigmoid": sigmoid_topk.score, "sqrtsoftplus": sqrtsoftplus_topk.score}


class Router(Learned):
    """Its state is `bias` (E,) and `load` (E,), the number of tokens of each expert since the last step."""

    bias: Tensor
    load: Tensor

    def __init__(
        self, *args, score: str, renormalize: bool, groups: int, keep_groups: int, scale: float, rate: float
    ) -> None:
        """A step adds `rate` to a bias or takes it away. Raises `UserError` where the groups do not fit."""
        super().__init__(*args)
        self.limits = {"groups": groups, "keep_groups": keep_groups, "scale": scale}
        routers.GateRule(self.rule.name, "sigmoid_topk", self.rule.summary, self.limits, True).check(
            self.experts, self.top_k
        )
        self.score, self.renormalize, self.rate = SCORES[pick("score", score, SCORES)], renormalize, rate
        self.register_buffer("bias", torch.zeros(self.experts))
        self.register_buffer("load", torch.zeros(self.experts))

    def forward(self, x: Tensor, token_ids: Tensor, positions: Tensor) -> Routing:
        """Choose by score and bias, and weigh by the score alone."""
        logits = self.logits(x)
        values = self.score(logits)
        ids, weights = sigmoid_topk.select(values, self.top_k, self.bias, **self.limits)
        if not self.renormalize:
            weights = values.gather(1, ids.long()) * self.limits["scale"]
        if self.training:
            self.load.add_(losses.counts(ids, self.experts))
        scores = choice.distribution(values)
        return Routing(ids, weights, self.terms(logits, scores, ids, len(x)), scores)

    @torch.no_grad()
    def after_step(self) -> None:
        """Raise the bias of experts below the mean load by `rate`, and lower that of experts above it."""
        load = losses.over_ranks(self.load)
        self.bias.add_(torch.sign(load.mean() - load), alpha=self.rate)
        self.load.zero_()
