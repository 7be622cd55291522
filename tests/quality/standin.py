"""A router with the interface of `moe_routing_bench.routers.learned`, for a checkout without the zoo."""

from dataclasses import dataclass, field

import torch
from torch import Tensor, nn


@dataclass
class Routing:
    """As in the zoo."""

    ids: Tensor
    weights: Tensor
    losses: dict[str, Tensor]
    scores: Tensor


class Softk(nn.Module):
    """Top-k of logits, softmax over the k, with Switch's loss and a count of steps as its state."""

    extra: tuple[str, ...] = ()
    passes = 1

    def __init__(self, dim: int, experts: int, top_k: int) -> None:
        super().__init__()
        self.top_k, self.linear = top_k, nn.Linear(dim, experts, bias=False)
        self.register_buffer("steps", torch.zeros(()))

    def forward(self, x: Tensor, token_ids: Tensor, positions: Tensor) -> Routing:
        logits = self.linear(x.flatten(0, 1).float())
        scores = logits.softmax(-1)
        weights, ids = scores.topk(self.top_k)
        share = torch.zeros_like(scores).scatter_(1, ids, 1).mean(0) / self.top_k
        loss = 0.01 * scores.shape[1] * (share * scores.mean(0)).sum()
        return Routing(
            ids.int(), weights / weights.sum(1, keepdim=True), {"switch": loss} if self.training else {}, scores
        )

    def after_step(self) -> None:
        self.steps += 1


@dataclass
class Rule:
    """As in the zoo, as far as the quality part asks."""

    name: str
    causal: bool = True
    causal_in_evaluation: bool = True
    learns: bool = True
    top_k: int | None = None
    options: dict = field(default_factory=dict)


ZOO = {"softk": Rule("softk"), "qwen3": Rule("qwen3")}


def build(rule: str, dim: int, experts: int, top_k: int, network: str = "linear", **options: object) -> nn.Module:
    """Every rule is softk here."""
    assert network == "linear" and not options
    return Softk(dim, experts, top_k)


__all__ = ["ZOO", "Routing", "build"]
