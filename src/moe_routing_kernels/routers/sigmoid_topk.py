"""Sigmoid routing with a selection bias and optional group limit, renormalised.

Sources: DeepSeek-V3 2412.19437 eq. 13-16 and its released inference code (group score: sum of the two best biased
scores); the bias is the auxiliary-loss-free balancing of 2408.15664.
"""

import torch
from torch import Tensor

from moe_routing_kernels.routers.choice import choose, renormalised


def route(
    logits: Tensor, top_k: int, bias: Tensor | None = None, *, groups: int = 1, keep_groups: int = 1, scale: float = 1.0
) -> tuple[Tensor, Tensor]:
    """Ids (T, k) int32 and weights (T, k) float32: the unbiased sigmoid scores divided by their sum, times `scale`."""
    return select(score(logits), top_k, bias, groups=groups, keep_groups=keep_groups, scale=scale)


def score(logits: Tensor) -> Tensor:
    """The scores that experts are selected by, without the bias: (T, E) from logits (T, E)."""
    return torch.sigmoid(logits if logits.dtype == torch.float64 else logits.float())


def select(
    scores: Tensor, top_k: int, bias: Tensor | None, *, groups: int = 1, keep_groups: int = 1, scale: float = 1.0
) -> tuple[Tensor, Tensor]:
    """Choose by ``scores + bias`` and weigh by `scores`, as all rules with positive scores and a selection bias do."""
    ids = choose(scores if bias is None else scores + bias, top_k, groups, keep_groups, group_best=2)
    return ids.int(), (renormalised(scores.gather(-1, ids)) * scale).float()
