"""MoE++: a zero, a copy and two constant experts in addition to the true ones (2410.07348 section 3).

The gating residual, which adds the logits of the layer before, is left out: a router here sees its own layer alone.
"""

import torch
from torch import Tensor

from moe_routing_kernels.routers import losses, softmax_topk
from moe_routing_kernels.routers.learned import COMMON_LOSSES, Learned, Routing


class Router(Learned):
    """The zero expert is the first of the extra ones; its weight is left out before renormalising."""

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
        ids, picked = softmax_topk.route(logits, self.top_k, renormalize=False)
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
