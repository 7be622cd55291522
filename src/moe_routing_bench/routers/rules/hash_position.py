"""Position modulo experts, second expert the next one: what the predecessor called `hash`. It sees no token."""

import torch
from torch import Tensor

from moe_routing_bench.routers import losses
from moe_routing_bench.routers.learned import Learned, Routing


class Router(Learned):
    """No parameters and no state."""

    takes_network = False
    known_losses = ()

    def forward(self, x: Tensor, token_ids: Tensor, positions: Tensor) -> Routing:
        """Expert (i + j) mod E for position i and choice j."""
        choice = torch.arange(self.top_k, device=x.device)
        ids = ((positions[:, None] + choice) % self.experts).int().repeat(len(x), 1)
        scores = losses.chosen(ids, self.experts) / self.top_k
        return Routing(ids, torch.full_like(ids, 1 / self.top_k, dtype=torch.float32), {}, scores)
