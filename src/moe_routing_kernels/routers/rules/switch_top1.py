"""Switch routing: one expert, weighted by its probability, with input jitter (2101.03961 sections 2.1 and 2.4)."""

import torch
from torch import Tensor

from moe_routing_kernels.routers import softmax_topk
from moe_routing_kernels.routers.learned import Learned, Routing


class Router(Learned):
    """The weight is p rather than 1, because the router's gradient comes from it."""

    def __init__(self, *args, jitter: float) -> None:
        """In training each element of the router's input is scaled by U(1 − jitter, 1 + jitter)."""
        super().__init__(*args)
        self.jitter = jitter

    def forward(self, x: Tensor, token_ids: Tensor, positions: Tensor) -> Routing:
        """Route to the best expert."""
        if self.training and self.jitter:
            x = x.float() * torch.empty_like(x, dtype=torch.float32).uniform_(1 - self.jitter, 1 + self.jitter)
        logits = self.logits(x)
        ids, weights = softmax_topk.route(logits, 1, renormalize=False)
        scores = logits.softmax(1)
        return Routing(ids, weights, self.terms(logits, scores, ids, len(x)), scores)
