"""A Mixture-of-Experts block with SwiGLU experts and a residual: x (T, H) -> (T, H), on a CPU or a GPU."""

import torch

from moe_routing_kernels import ops


class MoEBlock(torch.nn.Module):
    def __init__(self, hidden: int, intermediate: int, experts: int, top_k: int) -> None:
        super().__init__()
        self.top_k = top_k
        self.router = torch.nn.Linear(hidden, experts, bias=False)
        self.w13 = torch.nn.Parameter(torch.randn(experts, 2 * intermediate, hidden) * hidden**-0.5)
        self.w2 = torch.nn.Parameter(torch.randn(experts, hidden, intermediate) * intermediate**-0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return ops.layer(x, self.router(x), self.w13, self.w2, self.top_k, residual=x)
