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
ELEMENTWISE = ("sigmoid", "sqrtsoftplus")  # scores of an expert that do not depend on the logits of others


class BiasedTopk(Learned):
    """Top-k of scores plus a selection bias that follows the loads.

    Rules: deepseek_v3_small, sigmoid_renorm, sqrtsoftplus_renorm, loss_free_bias, softmax_bias_renorm, softmax_bias and softmax_groups, whose bias stays 0.

    Sources: 2408.15664 algorithm 1 (the update), DeepSeek-V3 2412.19437 eq. 13-20; the choice is `formulas.select`.

    DeepSeek-V3's sequence-wise loss (eq. 17 to 20) counts the top-k of the scores, without bias and groups, as Megatron-LM does; with
    `counted` "routed" it counts the experts that were chosen, so that a bias hides the imbalance from it.

    With a `shared` expert its logit is one more, after those that are chosen from, and its score is part of the sum that renormalises, as in
    `InklingTopkRouter` of transformers: every token has the id E last, of the kind "shared".

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
        shared: bool = False,
    ) -> None:
        """A step adds `rate` to a bias or takes it away. Raises `UserError` where the groups do not fit, and for a shared expert without a
        renormalisation or with softmax scores, which depend on all logits.
        """
        if shared and not (renormalize and score in ELEMENTWISE):
            allowed = f"renormalize with a score of {' or '.join(ELEMENTWISE)}"
            raise bad(f"a jointly normalised shared expert for router {args[0].name}", score, allowed)
        self.extra = ("shared",) * shared
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
        everything = self.score(logits)
        values = everything[:, : self.experts]
        ids, weights = formulas.select(values, self.top_k, self.bias, **self.limits)
        if not self.renormalize:
            weights = values.gather(1, ids.long()) * self.limits["scale"]
        if self.training:
            self.load.add_(losses.counts(ids, self.experts))
        scores = formulas.distribution(values)
        counted = values.topk(self.top_k, dim=1).indices if self.counts_scores else ids
        terms = self.terms(logits, scores, ids, len(x), sequence=lambda: losses.sequence(scores, counted, len(x)))
        if self.extra:
            ids = torch.cat([ids, torch.full_like(ids[:, :1], self.experts)], 1)
            weights = formulas.renormalised(everything.gather(1, ids.long())) * self.limits["scale"]
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


class ZeroExperts(Learned):
    """LongCat-Flash: top-k' over true and identity experts, with a selection bias that a proportional controller moves.

    Source: LongCat-Flash 2509.01322 section 2.1; `LongcatFlashTopkRouter` of transformers. A step adds μ (k / (k' E) − T_e / (k' T)) to
    the bias of each true expert, whose load T_e then tends to T·k/E, so that tokens take k true experts on average. The biases of identity
    experts stay 0. Identity experts have the ids E, E+1, ... and the kind "copy". The balance loss over groups of devices is left out.

    Its state is `bias` (E + zeros,), `load` (E,), the tokens of each true expert since the last step, and `seen`, the number of all tokens.
    """

    bias: Tensor
    load: Tensor
    seen: Tensor

    def __init__(self, *args, zeros: int | None, scale: float, rate: float) -> None:
        """`zeros` is E/2 by default, as in the source, and k' = k·(E + zeros)/E; `rate` is μ."""
        experts, top_k = args[2:4]
        self.extra = ("copy",) * (max(1, experts // 2) if zeros is None else zeros)
        super().__init__(*args)
        self.picks = round(top_k * (experts + len(self.extra)) / experts)
        self.scale, self.rate = scale, rate
        self.register_buffer("bias", torch.zeros(experts + len(self.extra)))
        self.register_buffer("load", torch.zeros(experts))
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: Tensor, token_ids: Tensor, positions: Tensor) -> Routing:
        """Choose by probability and bias over E + zeros experts, ids (T, k'), and weigh by the probability alone."""
        logits = self.logits(x)
        everything = formulas.softmax(logits)
        ids = formulas.choose(everything + self.bias, self.picks).int()
        if self.training:
            self.load.add_(losses.counts(ids, self.experts))
            self.seen.add_(len(ids))
        scores = formulas.softmax(logits[:, : self.experts])
        weights = everything.gather(1, ids.long()) * self.scale
        return Routing(ids, weights, self.terms(logits, scores, ids, len(x)), scores)

    @torch.no_grad()
    def after_step(self) -> None:
        """Move the bias of each true expert by `rate` times what its share of the choices lacks; without a token nothing changes."""
        load, seen = losses.over_ranks(self.load), losses.over_ranks(self.seen)
        share = load / (self.picks * seen.clamp(min=1))
        lacks = torch.where(seen > 0, self.top_k / (self.picks * self.experts) - share, 0.0)
        self.bias[: self.experts].add_(lacks, alpha=self.rate)
        self.load.zero_()
        self.seen.zero_()
