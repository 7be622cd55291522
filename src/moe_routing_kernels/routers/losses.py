"""Losses that balance or steady a router, as plain functions that return a scalar without its coefficient.

Notation: T tokens, E experts; `scores` (T, E) float32 with rows that sum to 1; `ids` (T, K) integer, -1 in an empty
slot. Counts carry no gradient; the gradient comes through the scores by which they are multiplied.
"""

import torch
import torch.distributed as dist
from torch import Tensor


def chosen(ids: Tensor, experts: int) -> Tensor:
    """Which experts each token goes to: (T, experts) float32 of 0 and 1, from ids (T, K)."""
    slots = ids.long()
    outside = (slots < 0) | (slots >= experts)  # empty slots, and zero-computation experts where these do not count
    mask = torch.zeros(ids.shape[0], experts + 1, device=ids.device)
    return mask.scatter_(1, slots.masked_fill(outside, experts), 1.0)[:, :experts]


def counts(ids: Tensor, experts: int) -> Tensor:
    """How many tokens go to each expert: (experts,) float32, from ids (T, K)."""
    return chosen(ids, experts).sum(0)


def over_ranks(total: Tensor) -> Tensor:
    """Sum a tensor over all data-parallel ranks, in place; a single process leaves it as it is."""
    if dist.is_available() and dist.is_initialized():
        dist.all_reduce(total)
    return total


def cv_squared(values: Tensor) -> Tensor:
    """Squared coefficient of variation of values (E,)."""
    return values.var(correction=0) / values.mean().square().clamp(min=1e-10)


def importance(weights: Tensor) -> Tensor:
    """CV² of the weights (T, E) summed over tokens, 0 where an expert is not chosen (Shazeer 1701.06538 section 4)."""
    return cv_squared(weights.sum(0))


def load(clean: Tensor, noisy: Tensor, spread: Tensor, top_k: int) -> Tensor:
    """CV² of a smooth estimate of the load (Shazeer 1701.06538 appendix A, eq. 8-11).

    P(x, e) is the probability that expert e is among the k best when its noise alone is drawn again:
    Φ((clean_e − the k-th largest of the other noisy logits) / spread_e). All tensors are (T, E); top_k must be below E.
    """
    best = noisy.topk(top_k + 1, dim=1).values
    inside = noisy >= best[:, top_k - 1 : top_k]
    threshold = torch.where(inside, best[:, top_k:], best[:, top_k - 1 : top_k])
    return cv_squared(torch.special.ndtr((clean - threshold) / spread).sum(0))


def balance(load: Tensor, scores: Tensor, weight: Tensor | float = 1.0) -> Tensor:
    """E · Σ_e w_e · f_e · P_e for loads (..., E) and scores (..., T, E).

    Here f is the share of the load and P the mean score.
    """
    share = weight * load / load.sum(-1, keepdim=True).clamp(min=1.0)
    return scores.shape[-1] * (share.detach() * scores.mean(-2)).sum(-1)


def switch(scores: Tensor, ids: Tensor) -> Tensor:
    """E · Σ f·P, which is 1 when balanced (Switch 2101.03961 eq. 4-6; f is over the T·K choices, as in Megatron-LM)."""
    return balance(counts(ids, scores.shape[1]), scores)


def global_batch(scores: Tensor, ids: Tensor) -> Tensor:
    """The switch loss with the load of all data-parallel ranks; P stays local (2501.11873)."""
    return balance(over_ranks(counts(ids, scores.shape[1])), scores)


def sequence(scores: Tensor, ids: Tensor, batch: int) -> Tensor:
    """The switch loss per sequence, averaged over sequences (DeepSeek-V3 2412.19437 eq. 17-20)."""
    by_sequence = chosen(ids, scores.shape[1]).unflatten(0, (batch, -1)).sum(1)
    return balance(by_sequence, scores.unflatten(0, (batch, -1))).mean()


def device(scores: Tensor, ids: Tensor, groups: int) -> Tensor:
    """The switch loss over groups of neighbouring experts, the devices (DeepSeek-V2 2405.04434 eq. 26-28)."""
    load = counts(ids, scores.shape[1]).unflatten(0, (groups, -1)).sum(1)
    return balance(load, scores.unflatten(1, (groups, -1)).sum(2))


def z(logits: Tensor) -> Tensor:
    """The mean of logsumexp² over tokens, which keeps logits (T, E) small (ST-MoE 2202.08906 eq. 5)."""
    return logits.logsumexp(1).square().mean()


def entropy(scores: Tensor) -> Tensor:
    """The mean entropy of the rows in nats; minimising it makes choices sharp (2403.07652)."""
    return -(scores * scores.clamp(min=1e-30).log()).sum(1).mean()  # entr has an infinite gradient at 0
