"""The formulas of gate rules: the choice of experts by their scores, and their weights. Sources:

- `softmax_topk`: Mixtral 2401.04088 eq. 2 and Qwen3 (renormalised over the k); OLMoE 2409.02060 (as is); DeepSeek-V2 2405.04434 section 2.1.2
  (group-limited).
- `sigmoid_topk`, with a selection bias and optional group limit, renormalised: DeepSeek-V3 2412.19437 eq. 13-16 and its released inference
  code (group score: sum of the two best biased scores); the bias is the auxiliary-loss-free balancing of 2408.15664.
- `sqrtsoftplus_topk`, the square root of softplus as the score, with a selection bias, renormalised: DeepSeek-V4 configuration files.
- `topk_sigmoid`, top-k of the logits, then the sigmoid of each chosen one as its weight: Llama 4 reference model.

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
    largest = logits.detach().amax(-1, keepdim=True).nan_to_num(nan=torch.nan)
    # An infinite difference becomes the largest finite one, so experts at +inf, or all of a token at -inf, share equally.
    return (logits - largest).nan_to_num(nan=torch.nan).softmax(-1)


def renormalised(scores: Tensor) -> Tensor:
    """Scores (..., k), none below 0, over their guarded sum."""
    scores = scores.clamp_max(MOST_SCORE)
    return scores / (scores.sum(-1, keepdim=True) + GUARD)


def distribution(scores: Tensor) -> Tensor:
    """Scores (T, E), none below 0, over their sum: rows sum to 1, with equal shares where all scores vanish."""
    scores = scores.clamp(LEAST_SCORE, MOST_SCORE)
    return scores / scores.sum(-1, keepdim=True)


def route_softmax_topk(
    logits: Tensor,
    top_k: int,
    bias: Tensor | None = None,
    *,
    renormalize: bool,
    groups: int = 1,
    keep_groups: int = 1,
    scale: float = 1.0,
) -> tuple[Tensor, Tensor]:
    """Ids (T, k) int32 and weights (T, k) float32 of the k largest logits (T, E), which have the k largest softmax scores.

    With `groups` > 1 only the `keep_groups` groups with the largest best score take part. Renormalised weights sum to
    `scale`. The rule has no selection bias.
    """
    assert bias is None, "softmax_topk has no selection bias"
    wide = logits if logits.dtype == torch.float64 else logits.float()
    ids = choose(wide, top_k, groups, keep_groups)
    weights = softmax(wide.gather(-1, ids)) if renormalize else softmax(wide).gather(-1, ids)
    return ids.int(), (weights * scale).float()


def route_sigmoid_topk(
    logits: Tensor, top_k: int, bias: Tensor | None = None, *, groups: int = 1, keep_groups: int = 1, scale: float = 1.0
) -> tuple[Tensor, Tensor]:
    """Ids (T, k) int32 and weights (T, k) float32: the unbiased sigmoid scores divided by their sum, times `scale`."""
    return select(score_sigmoid_topk(logits), top_k, bias, groups=groups, keep_groups=keep_groups, scale=scale)


def score_sigmoid_topk(logits: Tensor) -> Tensor:
    """The scores that experts are selected by, without the bias: (T, E) from logits (T, E)."""
    return torch.sigmoid(logits if logits.dtype == torch.float64 else logits.float())


def select(
    scores: Tensor, top_k: int, bias: Tensor | None, *, groups: int = 1, keep_groups: int = 1, scale: float = 1.0
) -> tuple[Tensor, Tensor]:
    """Choose by ``scores + bias`` and weigh by `scores`, as all rules with positive scores and a selection bias do."""
    ids = choose(scores if bias is None else scores + bias, top_k, groups, keep_groups, group_best=2)
    return ids.int(), (renormalised(scores.gather(-1, ids)) * scale).float()


# From here down sqrt(softplus(x)) is exp(x / 2) to 1e-17, which float32 holds where e^x vanishes and the slope of the root is infinite.
TAIL = -40.0


def route_sqrtsoftplus_topk(
    logits: Tensor, top_k: int, bias: Tensor | None = None, *, scale: float = 1.0
) -> tuple[Tensor, Tensor]:
    """Ids (T, k) int32 and weights (T, k) float32; weights are unbiased scores divided by their sum, times `scale`."""
    return select(score_sqrtsoftplus_topk(logits), top_k, bias, scale=scale)


def score_sqrtsoftplus_topk(logits: Tensor) -> Tensor:
    """The scores that experts are selected by, without the bias: (T, E) from logits (T, E)."""
    wide = logits if logits.dtype == torch.float64 else logits.float()
    tail = wide < TAIL
    low, rest = (
        wide.masked_fill(~tail, TAIL),
        wide.masked_fill(tail, 0),
    )  # each without the logits where its slope is not finite
    return torch.where(tail, (low / 2).exp(), torch.nn.functional.softplus(rest).sqrt())


def route_topk_sigmoid(
    logits: Tensor, top_k: int, bias: Tensor | None = None, *, scale: float = 1.0
) -> tuple[Tensor, Tensor]:
    """Ids (T, k) int32 and weights (T, k) float32 in (0, scale), which need not sum to `scale`.

    The rule has no selection bias.
    """
    assert bias is None, "topk_sigmoid has no selection bias"
    wide = logits if logits.dtype == torch.float64 else logits.float()
    ids = choose(wide, top_k)
    return ids.int(), (wide.gather(-1, ids).sigmoid() * scale).float()
