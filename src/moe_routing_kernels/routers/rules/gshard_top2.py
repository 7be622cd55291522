"""GShard top-2 gating: chance decides by its weight whether the second expert is kept (2006.16668 algorithm 1)."""

import torch
from torch import Tensor

from moe_routing_kernels.routers import losses, softmax_topk
from moe_routing_kernels.routers.learned import COMMON_LOSSES, Learned, Routing


class Router(Learned):
    """Evaluation keeps both experts; training keeps the second with probability min(1, 2·g2)."""

    seated_by = "choice"  # algorithm 1 counts the first experts' loads before it dispatches to the second
    known_losses = (*COMMON_LOSSES, "first_choice")

    def forward(self, x: Tensor, token_ids: Tensor, positions: Tensor) -> Routing:
        """Route; leaving out the second expert does not change the weight of the first."""
        logits = self.logits(x)
        scores = logits.softmax(1)
        ids, weights = softmax_topk.route(logits, 2, renormalize=True)
        first = ids[:, :1]
        if self.training:
            dropped = torch.rand_like(weights) >= 2 * weights  # never the first: its weight is at least 1/2
            ids, weights = ids.masked_fill(dropped, -1), weights.masked_fill(dropped, 0.0)
        terms = self.terms(logits, scores, ids, len(x), first_choice=lambda: losses.switch(scores, first))
        return Routing(ids, weights, terms, scores)
