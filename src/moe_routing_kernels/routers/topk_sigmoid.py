"""Top-k of the logits, then the sigmoid of each chosen one as its weight (Llama 4 reference model)."""

import torch
from torch import Tensor

from moe_routing_kernels.routers.choice import choose


def route(logits: Tensor, top_k: int, bias: Tensor | None = None, *, scale: float = 1.0) -> tuple[Tensor, Tensor]:
    """Ids (T, k) int32 and weights (T, k) float32 in (0, scale), which need not sum to `scale`.

    The rule has no selection bias.
    """
    assert bias is None, "topk_sigmoid has no selection bias"
    wide = logits if logits.dtype == torch.float64 else logits.float()
    ids = choose(wide, top_k)
    return ids.int(), (wide.gather(-1, ids).sigmoid() * scale).float()
