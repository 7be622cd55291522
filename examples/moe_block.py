"""A Mixture-of-Experts block with SwiGLU experts and a residual: x (T, H) -> (T, H), on a CPU or a GPU."""

import torch
from torch.nn.functional import grouped_mm, silu

from moe_routing_bench import ops


class MoEBlock(torch.nn.Module):
    def __init__(self, hidden: int, intermediate: int, experts: int, top_k: int) -> None:
        super().__init__()
        self.top_k = top_k
        self.router = torch.nn.Linear(hidden, experts, bias=False)
        self.w13 = torch.nn.Parameter(torch.randn(experts, hidden, 2 * intermediate) * hidden**-0.5)
        self.w2 = torch.nn.Parameter(torch.randn(experts, intermediate, hidden) * intermediate**-0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        routed = ops.route(x, self.router(x), self.top_k)
        gate, up = grouped_mm(routed.packed, self.w13, offs=routed.offsets[1:]).chunk(2, dim=1)
        y = grouped_mm(silu(gate) * up, self.w2, offs=routed.offsets[1:])
        return ops.combine(y, routed.inverse, routed.topk_weights, residual=x)
