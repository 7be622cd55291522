"""Rules that look at the whole batch: in training alone, to balance loads, or always.

The first choose by the logits alone in evaluation, and are causal there. In the others experts or slots choose among all tokens, in
evaluation too: these are not causal.
"""

import math

import torch
from torch import Tensor, nn
from torch.nn.functional import normalize

from moe_routing_kernels.errors import bad
from moe_routing_kernels.routers import learned
from moe_routing_kernels.routers.learned import Learned, Routing, SoftRouting, by_column, without_autocast

LEAST_BID = 0.1  # by how much a bid exceeds indifference, in standard deviations of the scores


class Base(Learned):
    """BASE layers: a balanced assignment of tokens in training, the best expert in evaluation (2103.16716).

    The weight is σ(h): with a residual around the layer this is the paper's mixture of expert and identity.

    The last layer starts orthogonal with gain 0.1, so that experts differ from the first step on.
    """

    def __init__(self, *args, rounds: int) -> None:
        """The auction has `rounds`.

        Tokens that it has not assigned by then fill the free places in the order of positions.
        """
        super().__init__(*args)
        self.rounds = rounds
        assert self.network is not None
        nn.init.orthogonal_(learned.last_of(self.network).weight, gain=0.1)

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


class Sinkhorn(Learned):
    """Sinkhorn routing (S-BASE): training chooses from a balanced transport plan, evaluation from the logits.

    Sources: Clark 2022, 2202.01169 section 3.1; weights and evaluation as in Megatron-LM. The number of rounds is fixed.

    The plan has no gradient: it only chooses.
    """

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


class TokenRounding(Learned):
    """Token rounding: top-k with each expert's load rounded to a multiple of the GEMM tile (SonicMoE 2512.14080 section 5).

    It does so in training only; evaluation is plain top-k, and causal.

    It rounds to the nearest multiple.
    """

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
