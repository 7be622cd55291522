"""Top-k of scores plus a selection bias that follows the loads: it chooses experts and weighs none."""

import torch
from torch import Tensor

from moe_routing_kernels import routers
from moe_routing_kernels.errors import bad, pick
from moe_routing_kernels.routers import formulas, losses
from moe_routing_kernels.routers.formulas import select
from moe_routing_kernels.routers.learned import Learned, Routing

SCORES = {
    "sigmoid": formulas.score_sigmoid_topk,
    "sqrtsoftplus": formulas.score_sqrtsoftplus_topk,
    "softmax": formulas.softmax,
}


class BiasedTopk(Learned):
    """Top-k of scores plus a selection bias that follows the loads.

    Rules: deepseek_v3_small, sigmoid_renorm, sqrtsoftplus_renorm, loss_free_bias, softmax_bias_renorm, softmax_bias and softmax_groups, whose bias stays 0.

    Sources: 2408.15664 algorithm 1 (the update), DeepSeek-V3 2412.19437 eq. 13-20; the choice is `formulas.select`.

    DeepSeek-V3's sequence-wise loss (eq. 17 to 20) counts the top-k of the scores, without bias and groups, as Megatron-LM does; with
    `counted` "routed" it counts the experts that were chosen, so that a bias hides the imbalance from it.

    Its state is `bias` (E,) and `load` (E,), the number of tokens of each expert since the last step.
    """

    bias: Tensor
    load: Tensor

    def __init__(
        self,
        *args,
        score: str,
        renormalize: bool,
        groups: int,
        keep_groups: int,
        scale: float,
        rate: float,
        counted: str = "routed",
    ) -> None:
        """A step adds `rate` to a bias or takes it away. Raises `UserError` where the groups do not fit."""
        super().__init__(*args)
        self.counts_scores = pick("counted", counted, ("routed", "scores")) == "scores"
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
        counted = values.topk(self.top_k, dim=1).indices if self.counts_scores else ids
        terms = self.terms(logits, scores, ids, len(x), sequence=lambda: losses.sequence(scores, counted, len(x)))
        return Routing(ids, weights, terms, scores)

    @torch.no_grad()
    def after_step(self) -> None:
        """Raise the bias of experts below the mean load by `rate`, and lower that of experts above it."""
        load = losses.over_ranks(self.load)
        self.bias.add_(torch.sign(load.mean() - load), alpha=self.rate)
        self.load.zero_()


class QuantileBalancing(Learned):
    """Quantile balancing: the selection bias is the one that would have balanced the last step (Su 2026, kexue.fm 11619).

    It is a step of coordinate descent on the dual of the balanced assignment, one training step behind, and so causal. With the score
    "logits", `momentum` 0.9 and `centred` it is the form of Megatron-LM (pull request 5349), whose weights are the softmax over the k.

    Its state is `bias` (E,) = −β, `pending` (E,), the sum of a step's new biases, and `forwards`, their number.
    """

    bias: Tensor
    pending: Tensor
    forwards: Tensor

    def __init__(self, *args, momentum: float, score: str, centred: bool) -> None:
        """`momentum` is the share of the old bias that is kept. A `centred` bias has the mean 0, so that it moves no score on average."""
        super().__init__(*args)
        self.of_logits, self.centred = pick("score", score, ("sigmoid", "logits")) == "logits", centred
        if self.top_k == self.experts:
            raise bad(f"top_k for router {self.rule.name}", self.top_k, f"2 to {self.experts - 1}")
        self.momentum = momentum
        self.register_buffer("bias", torch.zeros(self.experts))
        self.register_buffer("pending", torch.zeros(self.experts))
        self.register_buffer("forwards", torch.zeros(()))

    def forward(self, x: Tensor, token_ids: Tensor, positions: Tensor) -> Routing:
        """Choose by score and bias, and weigh by the renormalised score, or by the softmax of the k logits."""
        logits = self.logits(x)
        values = logits if self.of_logits else logits.sigmoid()
        if self.of_logits:
            ids = formulas.choose(values + self.bias, self.top_k).int()
            weights = formulas.softmax(logits.gather(1, ids.long()))
        else:
            ids, weights = select(values, self.top_k, self.bias)
        if self.training:
            self.pending.add_(balancing_bias(values.detach(), self.bias, self.top_k))
            self.forwards.add_(1)
        scores = logits.softmax(1) if self.of_logits else formulas.distribution(values)
        return Routing(ids, weights, self.terms(logits, scores, ids, len(x)), scores)

    @torch.no_grad()
    def after_step(self) -> None:
        """Take over the mean of this step's biases over all ranks; without a forward pass nothing changes."""
        pending, forwards = losses.over_ranks(self.pending), losses.over_ranks(self.forwards)
        kept = torch.where(forwards > 0, self.momentum, 1.0)
        self.bias.mul_(kept).add_((1 - kept) * pending / forwards.clamp(min=1))
        if self.centred:
            self.bias.sub_(self.bias.mean())
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
