"""Softmax routing: Mixtral and Qwen3 (renormalised over the k), OLMoE (as is), DeepSeek-V2 (group-limited).

Sources: Mixtral 2401.04088 eq. 2; OLMoE 2409.02060; DeepSeek-V2 2405.04434 section 2.1.2.
"""

import torch
from torch import Tensor

from moe_routing_kernels.routers.choice import choose, softmax


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
    """Ids (T, k) int32 and weights (T, k) float32 of the k largest logits (T, E), which have the k largest softmax scores.

    With `groups` > 1 only the `keep_groups` groups with the largest best score take part. Renormalised weights sum to
    `scale`. The rule has no selection bias.
    """
    assert bias is None, "softmax_topk has no selection bias"
    wide = logits if logits.dtype == torch.float64 else logits.float()
    ids = choose(wide, top_k, groups, keep_groups)
    weights = softmax(wide.gather(-1, ids)) if renormalize else softmax(wide).gather(-1, ids)
    return ids.int(), (weights * scale).float()
