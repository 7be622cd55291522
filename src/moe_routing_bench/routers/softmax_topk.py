"""Softmax routing: Mixtral and Qwen3 (renormalised over the k), OLMoE (as is), DeepSeek-V2 (group-limited).

Sources: Mixtral 2401.04088 eq. 2; OLMoE 2409.02060; DeepSeek-V2 2405.04434 section 2.1.2.
"""

import torch
from torch import Tensor


def route(
    logits: Tensor,
    top_k: int,
    bias: Tensor | None = None,
    *,
    renormalize: bool,
    groups: int = 1,
    keep_groups: int = 1,
    scale: float = 1.0,
) -> tuple[Tensor, Tensor]:
    """Ids (T, k) int32 and weights (T, k) float32 of the k largest softmax scores of logits (T, E).

    With `groups` > 1 only the `keep_groups` groups with the largest best score take part. Renormalised weights sum to
    `scale`. The rule has no selection bias.
    """
    assert bias is None, "softmax_topk has no selection bias"
    wide = logits if logits.dtype == torch.float64 else logits.float()
    if renormalize and groups == 1:
        top, ids = wide.topk(top_k, dim=-1)
        return ids.int(), (top.softmax(-1) * scale).float()
    scores = wide.softmax(-1)
    if groups > 1:
        by_group = scores.unflatten(-1, (groups, -1))
        kept = by_group.amax(-1).topk(keep_groups, dim=-1).indices
        mask = torch.zeros_like(by_group[..., 0], dtype=torch.bool).scatter_(-1, kept, True)
        scores = by_group.masked_fill(~mask.unsqueeze(-1), -1.0).flatten(-2)
    top, ids = scores.topk(top_k, dim=-1)
    if renormalize:
        top = top / top.sum(-1, keepdim=True)
    return ids.int(), (top * scale).float()
