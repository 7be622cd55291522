"""BASE layers: a balanced assignment of tokens in training, the best expert in evaluation (2103.16716).

The weight is σ(h): with a residual around the layer this is the paper's mixture of expert and identity.
"""

import torch
from torch import Tensor, nn

from moe_routing_kernels.routers import networks
from moe_routing_kernels.routers.learned import Learned, Routing

LEAST_BID = 0.1  # by how much a bid exceeds indifference, in standard deviations of the scores


class Router(Learned):
    """The last layer starts orthogonal with gain 0.1, so that experts differ from the first step on."""

    def __init__(self, *args, rounds: int) -> None:
        """The auction has `rounds`.

        Tokens that it has not assigned by then fill the free places in the order of positions.
        """
        super().__init__(*args)
        self.rounds = rounds
        assert self.network is not None
        nn.init.orthogonal_(networks.last_of(self.network).weight, gain=0.1)

    def forward(self, x: Tensor, token_ids: Tensor, positions: Tensor) -> Routing:
        """Route each token to one expert."""
        logits = self.logits(x)
        ids = balanced_assignment(logits.detach(), self.rounds) if self.training else logits.argmax(1)
        scores, chosen = logits.softmax(1), ids[:, None]
        terms = self.terms(logits, scores, chosen, len(x))
        return Routing(chosen.int(), logits.gather(1, chosen).sigmoid(), terms, scores)


def balanced_assignment(values: Tensor, rounds: int) -> Tensor:
    """An expert for each token, (T,) int64, at most ⌈T/E⌉ tokens per expert, with nearly the largest sum of values (T, E).

    This is an auction (Bertsekas) in which each expert bids for as many tokens as it has places. A token goes to the
    highest bidder, and its price becomes that bid. A bid is a little more than what would make the token worth no more
    to the expert than its best alternative.
    """
    tokens, experts = values.shape
    places = -(-tokens // experts)
    if experts == 1:
        return values.argmax(1)
    values = values.T / values.std(correction=0).clamp(min=1e-10)
    absent = places * experts - tokens  # dummy tokens, worth the same to all experts, so that every place is taken
    values = torch.cat([values, values.min().expand(experts, absent)], dim=1)
    price, owner = torch.zeros_like(values[0]), torch.full_like(values[0], -1, dtype=torch.long)
    names = torch.arange(experts, device=values.device)[:, None]
    for _ in range(rounds):
        worth, owned = values - price, owner == names
        ranked = worth.masked_fill(owned, torch.inf).topk(places + 1, dim=1)
        preferred, alternative = ranked.indices[:, :-1], ranked.values[:, -1:]
        offers = values.gather(1, preferred) - alternative + LEAST_BID
        bids = torch.full_like(values, -torch.inf).scatter(1, preferred, offers).masked_fill(owned, -torch.inf)
        best, bidder = bids.max(0)
        sold = best > -torch.inf
        price, owner = torch.where(sold, best, price), torch.where(sold, bidder, owner)
    free = places - (owner == names).sum(1)
    left = owner < 0
    filled = torch.searchsorted(free.cumsum(0), left.cumsum(0)).clamp(max=experts - 1)
    return torch.where(left, filled, owner)[:tokens]
