"""Square root of softplus as the score, with a selection bias, renormalised (DeepSeek-V4 configuration files)."""

import torch
from torch import Tensor

from moe_routing_kernels.routers.sigmoid_topk import select

# From here down sqrt(softplus(x)) is exp(x / 2) to 1e-17, which float32 holds where e^x vanishes and the slope of the root is infinite.
TAIL = -40.0


def route(logits: Tensor, top_k: int, bias: Tensor | None = None, *, scale: float = 1.0) -> tuple[Tensor, Tensor]:
    """Ids (T, k) int32 and weights (T, k) float32; weights are unbiased scores divided by their sum, times `scale`."""
    return select(score(logits), top_k, bias, scale=scale)


def score(logits: Tensor) -> Tensor:
    """The scores that experts are selected by, without the bias: (T, E) from logits (T, E)."""
    wide = logits if logits.dtype == torch.float64 else logits.float()
    tail = wide < TAIL
    low, rest = (
        wide.masked_fill(~tail, TAIL),
        wide.masked_fill(tail, 0),
    )  # each without the logits where its slope is not finite
    return torch.where(tail, (low / 2).exp(), torch.nn.functional.softplus(rest).sqrt())
