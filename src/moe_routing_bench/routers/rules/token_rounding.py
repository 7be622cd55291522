"""Token rounding: top-k with every expert's load rounded to a multiple of the GEMM tile (SonicMoE 2512.14080 section 5).

In training only: evaluation is plain top-k, and causal.
"""

import torch
from torch import Tensor

from moe_routing_bench.errors import bad
from moe_routing_bench.routers.learned import Learned, Routing


class Router(Learned):
    """Rounds to the nearest multiple."""

    def __init__(self, *args, tile: int) -> None:
        """`tile` rows of a GEMM tile."""
        super().__init__(*args)
        self.tile = tile

    def forward(self, x: Tensor, token_ids: Tensor, positions: Tensor) -> Routing:
        """Route; ids (T, E) with expert e in column e or -1. Raises `UserError` for fewer tokens than a tile, in training."""
        logits = self.logits(x)
        scores = logits.softmax(1)
        top, best = scores.topk(self.top_k, dim=1)
        taken = torch.zeros_like(scores, dtype=torch.bool).scatter_(1, best, True)
        if self.training:
            taken = rounded(scores.detach(), taken, self.tile)
        experts = torch.arange(self.experts, device=x.device, dtype=torch.int32)
        ids = torch.where(taken, experts, -1)
        weights = scores * taken / top.sum(1, keepdim=True)
        return Routing(ids, weights, self.terms(logits, scores, ids, len(x)), scores)


def rounded(scores: Tensor, taken: Tensor, tile: int) -> Tensor:
    """The choice `taken` (T, E) bool with multiples of `tile` tokens an expert: the worst dropped, or the best added."""
    tokens = len(scores)
    if tokens < tile:
        raise bad("tokens for router token_rounding", tokens, f"at least one tile of {tile}")
    target = ((taken.sum(0) + tile // 2) // tile * tile).clamp(max=tokens // tile * tile)
    order = (scores + taken).argsort(dim=0, descending=True, stable=True)  # taken tokens first: scores are below 1
    rank = order.argsort(dim=0)
    return rank < target
