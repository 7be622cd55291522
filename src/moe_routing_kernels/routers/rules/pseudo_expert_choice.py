"""The predecessor's `expert_choice`: a few picks per expert, and plain top-k for all other tokens. A control.

With 64 picks top-k routes most tokens. Where a token has fewer than k picks, its empty slots took capacity there; here
they stay empty. The rule is not causal: an expert's picks depend on the whole batch.
"""

import torch
from torch import Tensor

from moe_routing_kernels.routers.learned import Learned, Routing


class Router(Learned):
    """The predecessor's had no balance loss with a gradient, so this one has none."""

    def __init__(self, *args, picks: int) -> None:
        """An expert picks at most `picks` tokens."""
        super().__init__(*args)
        self.picks = picks

    def forward(self, x: Tensor, token_ids: Tensor, positions: Tensor) -> Routing:
        """Route; weights are the softmax over the logits of the experts that a token goes to."""
        logits = self.logits(x)
        count = min(self.picks, -(-len(logits) * self.top_k // self.experts))
        picks = logits.detach().topk(count, dim=0).indices
        picked = torch.zeros_like(logits, dtype=torch.bool).scatter_(0, picks, True)
        open_to = picked | ~picked.any(1, keepdim=True)
        top, ids = logits.masked_fill(~open_to, -torch.inf).topk(self.top_k, dim=1)
        scores, ids = logits.softmax(1), ids.int().masked_fill(top == -torch.inf, -1)
        return Routing(ids, top.softmax(1), self.terms(logits, scores, ids, len(x)), scores)
