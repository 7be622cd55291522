"""Expert choice: each expert takes its T·k/E best tokens of the batch (2202.09368 section 3.2). Not causal."""

import torch
from torch import Tensor

from moe_routing_kernels.routers.learned import Learned, Routing, by_column


class Router(Learned):
    """`top_k` is the paper's capacity factor, so that tokens have as many experts on average as in top-k."""

    def forward(self, x: Tensor, token_ids: Tensor, positions: Tensor) -> Routing:
        """Route; ids (T, E) with expert e in column e or -1, weights softmax probabilities."""
        logits = self.logits(x)
        scores = logits.softmax(1)
        picks = scores.detach().topk(max(1, len(scores) * self.top_k // self.experts), dim=0).indices
        taken = torch.zeros_like(scores, dtype=torch.bool).scatter_(0, picks, True)
        ids = by_column(taken)
        return Routing(ids, scores * taken, self.terms(logits, scores, ids, len(x)), scores)
