"""A routing rule of its own: benched in this folder by `moe-routing-bench measure gate --router own_router:SHARP`, and in an MoE block.

The rule chooses experts in plain torch, the library does the rest.
"""

import torch

from moe_routing_kernels import ops
from moe_routing_kernels.routers import GateRule

SHARP = GateRule("sharp", "", "top-k of logits, softmax of twice the k logits")


def route(logits: torch.Tensor, top_k: int, bias: None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """logits (T, E) to ids (T, k) int32 and weights (T, k) float32; in float64, as the reference, weights are float64."""
    best, ids = (logits if logits.dtype == torch.float64 else logits.float()).topk(top_k, dim=1)
    return ids.int(), (2 * best).softmax(1)


class OwnRouting(torch.nn.Module):
    """x (T, H) -> (T, H): SwiGLU experts, no capacity limit."""

    def __init__(self, hidden: int, intermediate: int, experts: int, top_k: int) -> None:
        super().__init__()
        self.experts, self.top_k = experts, top_k
        self.router = torch.nn.Linear(hidden, experts, bias=False)
        self.w13 = torch.nn.Parameter(torch.randn(experts, 2 * intermediate, hidden) * hidden**-0.5)
        self.w2 = torch.nn.Parameter(torch.randn(experts, hidden, intermediate) * intermediate**-0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        ids, weights = route(self.router(x), self.top_k)
        _, offsets, order, inverse = ops.permute(ids, self.experts)
        rows = ops.experts(ops.pack(x, order, inverse), offsets, self.w13, self.w2)
        return ops.combine(rows, inverse, weights)
