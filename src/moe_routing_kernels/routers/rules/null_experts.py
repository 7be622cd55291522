"""AdaMoE: top-k' over true and null experts, so that easy tokens use fewer true ones (2406.13233 section 3)."""

import torch
from torch import Tensor

from moe_routing_kernels.routers import losses, softmax_topk
from moe_routing_kernels.routers.learned import COMMON_LOSSES, Learned, Routing


class Router(Learned):
    """Null experts have the ids E, E+1, ..., the kind "zero" and weight 0."""

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
        ids, picked = softmax_topk.route(logits, self.picks, renormalize=False)
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
