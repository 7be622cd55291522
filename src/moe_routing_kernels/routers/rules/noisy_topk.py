"""Noisy top-k gating (Shazeer 2017, 1701.06538 eq. 3-5; load loss: appendix A)."""

import torch
from torch import Tensor, nn

from moe_routing_kernels.errors import bad
from moe_routing_kernels.routers import losses, networks, softmax_topk
from moe_routing_kernels.routers.learned import COMMON_LOSSES, Learned, Routing

LEAST_SPREAD = 0.01  # keeps the load loss finite; the usual value in public code


class Router(Learned):
    """Training adds noise with a learned spread to the logits; evaluation adds none."""

    known_losses = (*COMMON_LOSSES, "importance", "load")

    def __init__(self, *args) -> None:
        """Both networks start at zero, so that noise alone decides and balances the first steps (appendix A)."""
        super().__init__(*args)
        if self.top_k == self.experts:
            raise bad(f"top_k for router {self.rule.name}", self.top_k, f"2 to {self.experts - 1}")
        assert self.network is not None
        self.noise = networks.last_layer(args[1], self.experts)
        for last in (self.noise, networks.last_of(self.network)):
            nn.init.zeros_(last.weight)

    def forward(self, x: Tensor, token_ids: Tensor, positions: Tensor) -> Routing:
        """Route by noisy logits; the importance loss is about the weights, the load loss about the choice."""
        clean = noisy = self.logits(x)
        spread = nn.functional.softplus(networks.in_float32(self.noise, x)) + LEAST_SPREAD
        if self.training:
            noisy = clean + torch.randn_like(clean) * spread
        ids, weights = softmax_topk.route(noisy, self.top_k, renormalize=True)
        scores = noisy.softmax(1)
        terms = self.terms(
            clean,
            scores,
            ids,
            len(x),
            importance=lambda: losses.importance(torch.zeros_like(scores).scatter(1, ids.long(), weights)),
            load=lambda: losses.load(clean, noisy, spread, self.top_k),
        )
        return Routing(ids, weights, terms, scores)
