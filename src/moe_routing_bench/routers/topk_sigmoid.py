"""Top-k of the logits, then the sigmoid of each chosen one as its weight (Llama 4 reference model)."""

import torch
from torch import Tensor


def route(logits: Tensor, top_k: int, bias: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Ids (T, k) int32 and weights (T, k) float32 in (0, 1), which need not sum to 1.

    The rule has no selection bias.
    """
    assert bias is None, "topk_sigmoid has no selection bias"
    top, ids = (logits if logits.dtype == torch.float64 else logits.float()).topk(top_k, dim=-1)
    return ids.int(), top.sigmoid().float()
