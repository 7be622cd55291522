"""Training steps of an MoE block whose experts are divided among processes, each with tokens of its own.

    torchrun --nproc-per-node 2 examples/expert_parallel.py

It runs on GPUs with NCCL where there is one per process, else on CPUs with gloo.
"""

import os

import torch
import torch.distributed as dist
from torch import Tensor, nn

from moe_routing_kernels.ops import ep


class ExpertParallelBlock(nn.Module):
    """A router that all ranks have, and E / N of its experts on each of N ranks: x (T, H) -> (T, H), x added."""

    def __init__(self, hidden: int, intermediate: int, experts: int, top_k: int, seed: int = 17) -> None:
        super().__init__()
        rng, local, rank = torch.Generator().manual_seed(seed), experts // dist.get_world_size(), dist.get_rank()
        here = slice(rank * local, (rank + 1) * local)

        def drawn(*shape: int) -> Tensor:  # the same on all ranks, which keep a part of it
            return torch.randn(shape, generator=rng) * shape[-1] ** -0.5

        self.top_k = top_k
        self.router = nn.Parameter(drawn(experts, hidden))
        self.w13 = nn.Parameter(drawn(experts, 2 * intermediate, hidden)[here].clone())
        self.w2 = nn.Parameter(drawn(experts, hidden, intermediate)[here].clone())

    def forward(self, x: Tensor) -> Tensor:
        return ep.layer(x, x @ self.router.T, self.w13, self.w2, self.top_k, residual=x)


def train(device: torch.device, steps: int = 20, tokens: int = 64, hidden: int = 32) -> list[float]:
    """Fit a random map with `tokens` tokens of all ranks; returns the loss of each step, the same on all ranks."""
    ranks, rank = dist.get_world_size(), dist.get_rank()
    block = ExpertParallelBlock(hidden, intermediate=16, experts=8, top_k=2).to(device)
    optimiser = torch.optim.AdamW(block.parameters(), lr=1e-2)
    rng, losses = torch.Generator().manual_seed(3), []
    wanted = torch.randn(hidden, hidden, generator=rng) * hidden**-0.5
    for _ in range(steps):
        batch = torch.randn(tokens, hidden, generator=rng)
        x, target = (one.chunk(ranks)[rank].to(device) for one in (batch, batch @ wanted))
        loss = (block(x) - target).square().mean() / ranks
        optimiser.zero_grad()
        loss.backward()
        # Experts have had the tokens of all ranks, and their gradients are complete. The router has had those of this rank.
        assert block.router.grad is not None
        dist.all_reduce(block.router.grad)
        optimiser.step()
        total = loss.detach().clone()
        dist.all_reduce(total)
        losses.append(float(total))
    return losses


def main() -> None:
    """Train on the ranks that torchrun has started."""
    rank = int(os.environ["LOCAL_RANK"])
    on_gpus = torch.cuda.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"])
    device = torch.device("cuda", rank) if on_gpus else torch.device("cpu")
    if on_gpus:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if on_gpus else "gloo")
    losses = train(device)
    if dist.get_rank() == 0:
        print(f"{dist.get_world_size()} ranks on {device.type}: loss {losses[0]:.3f} -> {losses[-1]:.3f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
