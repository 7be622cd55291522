"""Token rounding: top-k with each expert's load rounded to a multiple of the GEMM tile (SonicMoE 2512.14080 section 5).

It does so in training only; evaluation is plain top-k, and causal.
"""

import torch
from torch import Tensor

from moe_routing_kernels.errors import bad
from moe_routing_kernels.routers.learned import Learned, Routing, by_column


class Router(Learned):
    """It rounds to the nearest multiple."""

    def __init__(self, *args, tile: int) -> None:
        """A GEMM tile has `tile` rows."""
        super().__init__(*args)
        self.tile = tile

    def forward(self, x: Tensor, token_ids: Tensor, positions: Tensor) -> Routing:
        """Route.

        Ids (T, E) with expert e in column e or -1. Raises `UserError` in training for fewer tokens than a tile.
        """
        logits = self.logits(x)
        scores = logits.softmax(1)
        top, best = scores.topk(self.top_k, dim=1)
        taken = torch.zeros_like(scores, dtype=torch.bool).scatter_(1, best, True)
        relative = scores / top.sum(1, keepdim=True)
        if self.training:
            taken = rounded(torch.where(taken, relative, scores - 1).detach(), taken.sum(0), self.tile)
        ids = by_column(taken)
        return Routing(ids, relative * taken, self.terms(logits, scores, ids, len(x)), scores)


def rounded(priority: Tensor, load: Tensor, tile: int) -> Tensor:
    """The choice (T, E) bool with `load` (E,) rounded to multiples of `tile`, by falling `priority` (T, E).

    Tokens that chose an expert have a positive priority, others a negative one. So the worst that chose it are
    dropped, or the best of the others are added.
    """
    tokens = len(priority)
    if tokens < tile:
        raise bad("tokens for router token_rounding", tokens, f"at least one tile of {tile}")
    target = ((load + tile // 2) // tile * tile).clamp(max=tokens // tile * tile)
    rank = priority.argsort(dim=0, descending=True, stable=True).argsort(dim=0)
    return rank < target
