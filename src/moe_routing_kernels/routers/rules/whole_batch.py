"""Experts or slots that choose among all tokens, in training and in evaluation: not causal."""

import torch
from torch import Tensor, nn
from torch.nn.functional import normalize

from moe_routing_kernels.routers.learned import Learned, Routing, SoftRouting, by_column, without_autocast


class ExpertChoice(Learned):
    """Expert choice: each expert takes its T·k/E best tokens of the batch (2202.09368 section 3.2). Not causal.

    `top_k` is the paper's capacity factor, so that tokens have as many experts on average as in top-k.
    """

    def forward(self, x: Tensor, token_ids: Tensor, positions: Tensor) -> Routing:
        """Route; ids (T, E) with expert e in column e or -1, weights softmax probabilities."""
        logits = self.logits(x)
        scores = logits.softmax(1)
        picks = scores.detach().topk(max(1, len(scores) * self.top_k // self.experts), dim=0).indices
        taken = torch.zeros_like(scores, dtype=torch.bool).scatter_(0, picks, True)
        ids = by_column(taken)
        return Routing(ids, scores * taken, self.terms(logits, scores, ids, len(x)), scores)


class PseudoExpertChoice(Learned):
    """The predecessor's `expert_choice`: a few picks per expert, and plain top-k for all other tokens. A control.

    With 64 picks top-k routes most tokens. Where a token has fewer than k picks, its empty slots took capacity there; here
    they stay empty. The rule is not causal: an expert's picks depend on the whole batch.

    The predecessor's had no balance loss with a gradient, so this one has none.
    """

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


class SoftMoE(Learned):
    """Soft MoE: slots mix the tokens of a sequence, and tokens mix the slots (2308.00951 section 2). It is not causal.

    Its parameters are `slots` (D, E · slots per expert), Φ in the paper, and `scale`, which section 2.3 introduces.
    """

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
