"""Sinkhorn routing (S-BASE): training chooses from a balanced transport plan, evaluation from the logits.

Sources: Clark 2022, 2202.01169 section 3.1; weights and evaluation as in Megatron-LM. The number of rounds is fixed.
"""

import math

import torch
from torch import Tensor

from moe_routing_kernels.routers.learned import Learned, Routing


class Router(Learned):
    """The plan has no gradient: it only chooses."""

    def __init__(self, *args, rounds: int) -> None:
        """The plan is scaled by rows and columns in `rounds`."""
        super().__init__(*args)
        self.rounds = rounds

    def forward(self, x: Tensor, token_ids: Tensor, positions: Tensor) -> Routing:
        """Route; weights are softmax probabilities, or a sigmoid where a token has one expert."""
        logits = self.logits(x)
        plan = log_plan(logits.detach(), self.rounds) if self.training else logits
        ids = plan.topk(self.top_k, dim=1).indices
        scores = logits.softmax(1)
        weights = (logits.sigmoid() if self.top_k == 1 else scores).gather(1, ids)
        return Routing(ids.int(), weights, self.terms(logits, scores, ids, len(x)), scores)


def log_plan(logits: Tensor, rounds: int) -> Tensor:
    """The logarithm of exp(logits) (T, E), scaled so that columns sum to 1/E and rows nearly to 1/T."""
    plan = logits
    for _ in range(rounds):
        plan = plan - torch.logsumexp(plan, 1, keepdim=True) - math.log(logits.shape[0])
        plan = plan - torch.logsumexp(plan, 0, keepdim=True) - math.log(logits.shape[1])
    return plan
