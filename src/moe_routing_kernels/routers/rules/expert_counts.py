"""Rules under which tokens have different numbers of experts, or experts that compute nothing."""

import torch
from torch import Tensor

from moe_routing_kernels.errors import pick
from moe_routing_kernels.routers import formulas, losses
from moe_routing_kernels.routers.learned import COMMON_LOSSES, Learned, Routing, by_column


class TopP(Learned):
    """Top-p routing: as many experts as it takes to reach a probability (Huang 2024, 2403.07652).

    It does not use `top_k`; the entropy loss keeps the number of experts down.
    """

    def __init__(self, *args, threshold: float) -> None:
        """`threshold` is the probability that the chosen experts must reach together."""
        super().__init__(*args)
        self.threshold = threshold

    def forward(self, x: Tensor, token_ids: Tensor, positions: Tensor) -> Routing:
        """Route; ids (T, E), best first, then -1."""
        logits = self.logits(x)
        scores = logits.softmax(1)
        ranked, order = scores.sort(dim=1, descending=True)
        enough = ranked.cumsum(1) - ranked >= self.threshold  # the experts before this one reach it
        ids, weights = order.int().masked_fill(enough, -1), ranked.masked_fill(enough, 0.0)
        return Routing(ids, weights, self.terms(logits, scores, ids, len(x)), scores)


class ReMoE(Learned):
    """ReMoE: ReLU gates that an L1 loss of adaptive strength makes sparse (2412.14711 sections 3.2 to 3.4).

    Its state is `strength`, the paper's λ, and since the last step the `active` gates of `seen` tokens. The paper and its code have one λ
    for the whole model, which follows the sparsity of all layers: the `scope` "model", once `learned.join` has joined the layers.
    """

    known_losses = (*COMMON_LOSSES, "l1")
    strength: Tensor
    active: Tensor
    seen: Tensor

    def __init__(self, *args, start: float, growth: float, scope: str) -> None:
        """`start` is the first strength, and `growth` the factor by which one step changes it."""
        super().__init__(*args)
        self.growth = growth
        self.global_state = pick("scope", scope, ("layer", "model")) == "model"
        self.register_buffer("strength", torch.tensor(start))
        self.register_buffer("active", torch.zeros(()))
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: Tensor, token_ids: Tensor, positions: Tensor) -> Routing:
        """Route; ids (T, E) with expert e in column e or -1."""
        logits = self.logits(x)
        gates = logits.relu()
        ids = by_column(gates > 0)
        load = losses.counts(ids, self.experts)
        lead = self.lead
        if self.training:
            lead.active.add_(load.sum())
            lead.seen.add_(len(ids))
        tiny = 1e-10  # gives a token without any expert even scores
        scores = (gates + tiny) / (gates + tiny).sum(1, keepdim=True)
        share = load * self.experts / (self.top_k * len(ids))
        terms = self.terms(logits, scores, ids, len(x), l1=lambda: lead.strength * (gates * share).sum(1).mean())
        return Routing(ids, gates, terms, scores)

    @torch.no_grad()
    def after_step(self) -> None:
        """Strengthen the loss while more than k of E gates are open, and weaken it while fewer are."""
        if self.lead is not self:
            return
        active, seen = losses.over_ranks(self.active), losses.over_ranks(self.seen)
        self.strength.mul_(self.growth ** torch.sign(active - seen * self.top_k))
        self.active.zero_()
        self.seen.zero_()


class NullExperts(Learned):
    """AdaMoE: top-k' over true and null experts, so that easy tokens use fewer true ones (2406.13233 section 3).

    Null experts have the ids E, E+1, ..., the kind "zero" and weight 0.
    """

    known_losses = (*COMMON_LOSSES, "null_switch")

    def __init__(self, *args, nulls: int | None) -> None:
        """`nulls` is E by default, and k' = k·(E + nulls)/E, so that even loads use k true experts per token."""
        experts, top_k = args[2:4]
        self.extra = ("zero",) * (experts if nulls is None else nulls)
        super().__init__(*args)
        self.picks = round(top_k * (experts + len(self.extra)) / experts)

    def forward(self, x: Tensor, token_ids: Tensor, positions: Tensor) -> Routing:
        """Route; weights are renormalised over the true experts, and are all 0 where there is none."""
        logits = self.logits(x)
        everything = logits.softmax(1)
        ids, picked = formulas.route_softmax_topk(logits, self.picks, renormalize=False)
        true = picked.masked_fill(ids >= self.experts, 0.0)
        weights = true / true.sum(1, keepdim=True).clamp(min=1e-10)
        scores = logits[:, : self.experts].softmax(1)
        terms = self.terms(logits, scores, ids, len(x), null_switch=lambda: self._null_switch(everything, ids))
        return Routing(ids, weights, terms, scores)

    def _null_switch(self, everything: Tensor, ids: Tensor) -> Tensor:
        """The switch loss over true and null experts.

        Null ones are all alike and need no balance, so each counts as their mean.
        """
        load = losses.counts(ids, everything.shape[1])
        nulls = load[self.experts :]
        return losses.balance(torch.cat([load[: self.experts], nulls.mean().expand_as(nulls)]), everything)


class MoEPlusPlus(Learned):
    """MoE++: a zero, a copy and two constant experts in addition to the true ones (2410.07348 section 3).

    It differs from the source in these points. The gating residual, which adds the logits of the layer before, and the factor 2 on the
    experts' input are left out; constant experts start at zero; a capacity limits true experts alone, where the source has one per kind.
    With τ = 0.75 trained tokens take about 1.2 true experts at k = 2, so that the rule has less compute than others of its k.

    The zero expert is the first of the extra ones; its weight is left out before renormalising.
    """

    extra = ("zero", "copy", "const", "const")
    known_losses = (*COMMON_LOSSES, "heterogeneous")

    def __init__(self, *args, share: float) -> None:
        """`share`, the paper's τ, is the weight of a zero-computation expert in the loss."""
        super().__init__(*args)
        self.share = share

    def forward(self, x: Tensor, token_ids: Tensor, positions: Tensor) -> Routing:
        """Route over E + 4 experts."""
        logits = self.logits(x)
        everything = logits.softmax(1)
        ids, picked = formulas.route_softmax_topk(logits, self.top_k, renormalize=False)
        used = picked.masked_fill(ids == self.experts, 0.0)
        weights = used / used.sum(1, keepdim=True).clamp(min=1e-10)
        scores = logits[:, : self.experts].softmax(1)
        terms = self.terms(logits, scores, ids, len(x), heterogeneous=lambda: self._heterogeneous(everything, ids))
        return Routing(ids, weights, terms, scores)

    def _heterogeneous(self, everything: Tensor, ids: Tensor) -> Tensor:
        """The switch loss with a smaller weight for experts that cost nothing, so that they are chosen more often."""
        weight = torch.ones_like(everything[0])
        weight[self.experts :].mul_(self.share)  # assigning a number would be a copy from the host
        return losses.balance(losses.counts(ids, everything.shape[1]), everything, weight)


class ExpertThreshold(Learned):
    """Expert threshold: a token goes to each expert whose logit reaches that expert's moving threshold (2603.11535).

    The threshold of a step is the logit with which an expert would have taken its T·k/E best tokens. Their moving average over past
    steps decides, with the correction of its start that the authors' code has, so that no other token does: the rule is causal. The
    weight is the sigmoid of the logit. The source first trains with the batch's own choice (expert choice), and bounds loads around it;
    both are left out.

    Its state is `average` (E,), `steps`, the number of its updates, and since the last step the thresholds `pending` (E,) of `forwards`.
    """

    average: Tensor
    steps: Tensor
    pending: Tensor
    forwards: Tensor

    def __init__(self, *args, momentum: float) -> None:
        """`momentum` is the share of the old average that a step keeps."""
        super().__init__(*args)
        self.momentum = momentum
        self.register_buffer("average", torch.zeros(self.experts))
        self.register_buffer("steps", torch.zeros(()))
        self.register_buffer("pending", torch.zeros(self.experts))
        self.register_buffer("forwards", torch.zeros(()))

    @property
    def threshold(self) -> Tensor:
        """The thresholds (E,) that decide; 0 before the first step."""
        return self.average / torch.where(self.steps > 0, 1 - self.momentum**self.steps, 1.0)

    def forward(self, x: Tensor, token_ids: Tensor, positions: Tensor) -> Routing:
        """Route; ids (T, E) with expert e in column e or -1."""
        logits = self.logits(x)
        taken = logits >= self.threshold
        if self.training:
            share = max(1, len(logits) * self.top_k // self.experts)
            self.pending.add_(logits.detach().topk(share, dim=0).values[-1])
            self.forwards.add_(1)
        ids, values = by_column(taken), logits.sigmoid()
        scores = formulas.distribution(values)
        return Routing(ids, values * taken, self.terms(logits, scores, ids, len(x)), scores)

    @torch.no_grad()
    def after_step(self) -> None:
        """Take the mean of this step's thresholds over all ranks into the average; without a forward pass nothing changes."""
        pending, forwards = losses.over_ranks(self.pending), losses.over_ranks(self.forwards)
        kept = torch.where(forwards > 0, self.momentum, 1.0)
        self.average.mul_(kept).add_((1 - kept) * pending / forwards.clamp(min=1))
        self.steps.add_((forwards > 0).float())
        self.pending.zero_()
        self.forwards.zero_()
