"""Top-k of scores plus a selection bias that follows the loads: it chooses experts and weighs none."""

import torch
from torch import Tensor

from moe_routing_kernels import routers
from moe_routing_kernels.errors import bad, pick
from moe_routing_kernels.routers import formulas, losses
from moe_routing_kernels.routers.formulas import select
from moe_routing_kernels.routers.learned import Learned, Routing

SCORES = {"sigmoid": formulas.score_sigmoid_topk, "sqrtsoftplus": formulas.score_sqrtsoftplus_topk}


class BiasedTopk(Learned):
    """Top-k of scores plus a selection bias that follows the loads.

    Rules: deepseek_v3_small, sigmoid_renorm, sqrtsoftplus_renorm and loss_free_bias.

    Sources: 2408.15664 algorithm 1 (the update), DeepSeek-V3 2412.19437 eq. 13-20; the choice is `routers/sigmoid_topk.py`.

    Its state is `bias` (E,) and `load` (E,), the number of tokens of each expert since the last step.
    """

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
        ids, weights = formulas.select(values, self.top_k, self.bias, **self.limits)
        if not self.renormalize:
            weights = values.gather(1, ids.long()) * self.limits["scale"]
        if self.training:
            self.load.add_(losses.counts(ids, self.experts))
        scores = formulas.distribution(values)
        return Routing(ids, weights, self.terms(logits, scores, ids, len(x)), scores)

    @torch.no_grad()
    def after_step(self) -> None:
        """Raise the bias of experts below the mean load by `rate`, and lower that of experts above it."""
        load = losses.over_ranks(self.load)
        self.bias.add_(torch.sign(load.mean() - load), alpha=self.rate)
        self.load.zero_()


class QuantileBalancing(Learned):
    """Quantile balancing: the selection bias is the one that would have balanced the last step (Su 2026, kexue.fm 11619).

    It is a step of coordinate descent on the dual of the balanced assignment, one training step behind, and so causal.

    Its state is `bias` (E,) = −β, `pending` (E,), the sum of a step's new biases, and `forwards`, their number.
    """

    bias: Tensor
    pending: Tensor
    forwards: Tensor

    def __init__(self, *args, momentum: float) -> None:
        """`momentum` is the share of the old bias that is kept."""
        super().__init__(*args)
        if self.top_k == self.experts:
            raise bad(f"top_k for router {self.rule.name}", self.top_k, f"2 to {self.experts - 1}")
        self.momentum = momentum
        self.register_buffer("bias", torch.zeros(self.experts))
        self.register_buffer("pending", torch.zeros(self.experts))
        self.register_buffer("forwards", torch.zeros(()))

    def forward(self, x: Tensor, token_ids: Tensor, positions: Tensor) -> Routing:
        """Choose by score and bias, and weigh by the renormalised score."""
        logits = self.logits(x)
        values = logits.sigmoid()
        ids, weights = select(values, self.top_k, self.bias)
        if self.training:
            self.pending.add_(balancing_bias(values.detach(), self.bias, self.top_k))
            self.forwards.add_(1)
        scores = formulas.distribution(values)
        return Routing(ids, weights, self.terms(logits, scores, ids, len(x)), scores)

    @torch.no_grad()
    def after_step(self) -> None:
        """Take over the mean of this step's biases over all ranks; without a forward pass nothing changes."""
        pending, forwards = losses.over_ranks(self.pending), losses.over_ranks(self.forwards)
        kept = torch.where(forwards > 0, self.momentum, 1.0)
        self.bias.mul_(kept).add_((1 - kept) * pending / forwards.clamp(min=1))
        self.pending.zero_()
        self.forwards.zero_()


def balancing_bias(values: Tensor, bias: Tensor, top_k: int) -> Tensor:
    """The bias (E,) with which T·k/E tokens would prefer each expert, from scores (T, E) and the old bias.

    A token takes the experts whose biased score is above α, its (k+1)-th largest biased score. β_e is the (T·k/E +
    1)-th largest difference of score and α: exactly T·k/E tokens exceed it.
    """
    tokens, experts = values.shape
    alpha = (values + bias).topk(top_k + 1, dim=1).values[:, -1:]
    return -(values - alpha).topk(tokens * top_k // experts + 1, dim=0).values[-1]
