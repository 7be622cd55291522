"""The predecessor's `topk_hard`: top-k of a linear map that never trains, unweighted. A control for learned routing.

The predecessor's `top1` is this at k = 1. It added the experts up; here they are averaged, so that k does not change
the scale.
"""

import torch
from torch import Tensor

from moe_routing_kernels.routers.learned import Learned, Routing


class Router(Learned):
    """The parameters of its network take no gradient."""

    known_losses = ()

    def __init__(self, *args) -> None:
        """Freeze the network as it was drawn."""
        super().__init__(*args)
        self.requires_grad_(False)

    def forward(self, x: Tensor, token_ids: Tensor, positions: Tensor) -> Routing:
        """Route by detached logits, with weights 1/k."""
        logits = self.logits(x.detach())
        ids = logits.topk(self.top_k, dim=1).indices.int()
        return Routing(ids, torch.full_like(ids, 1 / self.top_k, dtype=torch.float32), {}, logits.softmax(1))
