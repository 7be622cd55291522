"""Soft MoE: slots mix the tokens of a sequence, and tokens mix the slots (2308.00951 section 2). It is not causal."""

import torch
from torch import Tensor, nn
from torch.nn.functional import normalize

from moe_routing_kernels.routers.learned import Learned, SoftRouting
from moe_routing_kernels.routers.networks import without_autocast


class Router(Learned):
    """Its parameters are `slots` (D, E · slots per expert), Φ in the paper, and `scale`, which section 2.3 introduces."""

    takes_network = False
    known_losses = ()

    def __init__(self, *args, sequence: int) -> None:
        """`sequence` tokens have sequence·k/E slots per expert, at least one, which is the compute of top-k."""
        super().__init__(*args)
        dim = args[1]
        slots = self.experts * max(1, sequence * self.top_k // self.experts)
        self.slots = nn.Parameter(torch.randn(dim, slots) * dim**-0.5)
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor, token_ids: Tensor, positions: Tensor) -> SoftRouting:
        """Dispatch and combine weights (B, S, slots)."""
        with without_autocast(x):
            logits = normalize(x.float(), dim=-1) @ (self.scale * normalize(self.slots, dim=0))
        combine = logits.softmax(2)
        scores = combine.unflatten(2, (self.experts, -1)).sum(3).flatten(0, 1)
        return SoftRouting(logits.softmax(1), combine, {}, scores)
