"""Shared by the rules: the choice of experts by their scores, and weights whose sums may vanish or be infinite.

Where a score is infinite or a sum of scores vanishes, a weight is the limit that the models' own code approaches:

- Experts at the largest score share a softmax equally where that score is infinite; the others get 0.
- A sum that renormalises is ``sum + 1e-20`` (DeepSeek-V3's modeling file), so weights vanish with the scores.
- Scores beyond 2^100 count as 2^100, so experts at +inf share the weight equally.
"""

import torch
from torch import Tensor

GUARD = 1e-20
LEAST_SCORE = 1e-30  # of a distribution over all experts
MOST_SCORE = 2.0**100  # far above the score of every finite logit, and 32 of them have a finite sum in float32


def choose(
    scores: Tensor, top_k: int, groups: int = 1, keep_groups: int = 1, group_best: int = 1, ordered: bool = False
) -> Tensor:
    """Ids (T, k) of the `top_k` largest scores (T, E), largest first, among the `keep_groups` best of `groups` groups.

    The score of a group is the sum of its `group_best` largest scores. Where `ordered`, the lowest ids come first among
    equal scores, of groups and of experts; else ties are in the order of `torch.topk`, which is faster.
    """
    if groups == 1:
        return _largest(scores, top_k, ordered)
    by_group = scores.unflatten(-1, (groups, -1))
    kept = _largest(by_group.topk(group_best, dim=-1).values.sum(-1), keep_groups, ordered)
    left_out = torch.ones_like(by_group[..., 0], dtype=torch.bool).scatter_(-1, kept, False)
    left_out = left_out.unsqueeze(-1).expand_as(by_group).flatten(-2)
    if not ordered:
        return _largest(scores.masked_fill(left_out, -torch.inf), top_k, ordered)
    by_score = _largest(scores, scores.shape[-1], ordered)
    kept_first = left_out.gather(-1, by_score).byte().argsort(dim=-1, stable=True)  # a kept expert may be at -inf, too
    return by_score.gather(-1, kept_first[..., :top_k])


def _largest(scores: Tensor, count: int, ordered: bool) -> Tensor:
    """Ids (..., count) of the largest of scores (..., E)."""
    if ordered:
        return scores.argsort(dim=-1, descending=True, stable=True)[..., :count]
    return scores.topk(count, dim=-1).indices


def softmax(logits: Tensor) -> Tensor:
    """Softmax over the last dimension, and its limit where the largest logit is infinite."""
    largest = logits.amax(-1, keepdim=True)
    infinite = largest.isinf()
    at_largest = (logits == largest).to(logits.dtype)
    limit = at_largest / at_largest.sum(-1, keepdim=True).clamp_min(1)
    return torch.where(infinite, limit, logits.masked_fill(infinite, 0).softmax(-1))


def renormalised(scores: Tensor) -> Tensor:
    """Scores (..., k), none below 0, over their guarded sum."""
    scores = scores.clamp_max(MOST_SCORE)
    return scores / (scores.sum(-1, keepdim=True) + GUARD)


def distribution(scores: Tensor) -> Tensor:
    """Scores (T, E), none below 0, over their sum: rows sum to 1, with equal shares where all scores vanish."""
    scores = scores.clamp(LEAST_SCORE, MOST_SCORE)
    return scores / scores.sum(-1, keepdim=True)
