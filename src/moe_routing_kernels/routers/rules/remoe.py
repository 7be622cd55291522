"""ReMoE: ReLU gates that an L1 loss of adaptive strength makes sparse (2412.14711 sections 3.2 to 3.4)."""

import torch
from torch import Tensor

from moe_routing_kernels.routers import losses
from moe_routing_kernels.routers.learned import COMMON_LOSSES, Learned, Routing, by_column


class Router(Learned):
    """Its state is `strength`, the paper's λ, and since the last step the `active` gates of `seen` tokens."""

    known_losses = (*COMMON_LOSSES, "l1")
    strength: Tensor
    active: Tensor
    seen: Tensor

    def __init__(self, *args, start: float, growth: float) -> None:
        """`start` is the first strength, and `growth` the factor by which one step changes it."""
        super().__init__(*args)
        self.growth = growth
        self.register_buffer("strength", torch.tensor(start))
        self.register_buffer("active", torch.zeros(()))
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: Tensor, token_ids: Tensor, positions: Tensor) -> Routing:
        """Route; ids (T, E) with expert e in column e or -1."""
        logits = self.logits(x)
        gates = logits.relu()
        ids = by_column(gates > 0)
        load = losses.counts(ids, self.experts)
        if self.training:
            self.active.add_(load.sum())
            self.seen.add_(len(ids))
        tiny = 1e-10  # gives a token without any expert even scores
        scores = (gates + tiny) / (gates + tiny).sum(1, keepdim=True)
        share = load * self.experts / (self.top_k * len(ids))
        terms = self.terms(logits, scores, ids, len(x), l1=lambda: self.strength * (gates * share).sum(1).mean())
        return Routing(ids, gates, terms, scores)

    @torch.no_grad()
    def after_step(self) -> None:
        """Strengthen the loss while more than k of E gates are open, and weaken it while fewer are."""
        active, seen = losses.over_ranks(self.active), losses.over_ranks(self.seen)
        self.strength.mul_(self.growth ** torch.sign(active - seen * self.top_k))
        self.active.zero_()
        self.seen.zero_()
