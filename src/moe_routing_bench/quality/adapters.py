"""PERFT: low-rank adapters beside a frozen MoE layer, h' = MoE(x) + Δ(x) (2411.08212, section 3; 2508.02587).

Δ(x) = Σ_m g_m(x) · alpha/r · x W_down,m W_up,m over M adapters of rank r (LoRA, 2106.09685, section 4.1). The variants
differ in the gates g. R has a router of its own over M adapters. E takes the frozen router and has one adapter per
expert. D has M adapters that are always on, S has a single one. All adapters are computed and then gated: at these
ranks that is less work than grouping tokens. Suffixes: T tokens, M adapters, R = M r, B sequences, S positions, D model
width.
"""

import math

import torch
from torch import Tensor, nn

from moe_routing_bench.grid.run_spec import Adaptation
from moe_routing_bench.quality.language_model import TinyLM, own_draws
from moe_routing_bench.quality.moe_layer import MoE
from moe_routing_kernels.errors import bad
from moe_routing_kernels.routers import learned

ROUTER = (
    "topk_prenorm"  # of PERFT-R: top-k of a softmax without renormalising, as in OLMoE, for which PERFT was proposed
)


class Adapters(nn.Module):
    """The adapters of one layer.

    After a forward pass `losses` holds what their own router adds to the training loss.
    """

    def __init__(self, variant: str, dim: int, count: int, active: int, rank: int, alpha: float) -> None:
        """Each token uses `active` of `count` adapters. W_down starts as in LoRA and W_up at zero, so that Δ = 0."""
        super().__init__()
        self.variant, self.count, self.active, self.rank, self.scale = variant, count, active, rank, alpha / rank
        bound = 1 / math.sqrt(dim)
        self.down_DR = nn.Parameter(torch.empty(dim, count * rank).uniform_(-bound, bound))
        self.up_RD = nn.Parameter(torch.zeros(count * rank, dim))
        self.router = learned.build(ROUTER, dim, count, active) if variant == "R" else None
        self.losses: dict[str, Tensor] = {}

    def forward(self, x_BSD: Tensor, token_ids_BS: Tensor, positions_S: Tensor, routing) -> Tensor:
        """Δ (B, S, D), where `routing` is what the layer's own router decided.

        Raises `UserError` for PERFT-E where that is soft routing.
        """
        hidden_TR = x_BSD.flatten(0, 1) @ self.down_DR
        if self.router is not None:
            routing = self.router(x_BSD, token_ids_BS, positions_S)
            self.losses = routing.losses
        if self.variant in ("R", "E"):
            if hasattr(routing, "dispatch"):
                raise bad("PERFT-E", "soft routing", "a base whose router chooses experts")
            gates_TM = gates(routing.ids, routing.weights, self.count)
            hidden_TR = (hidden_TR.unflatten(1, (self.count, self.rank)) * gates_TM[:, :, None]).flatten(1)
        return (hidden_TR @ self.up_RD * self.scale).view_as(x_BSD)

    def parameter_counts(self) -> tuple[int, int]:
        """All parameters, and those that a token meets: those of `active` adapters and of the whole router."""
        router = 0 if self.router is None else sum(p.numel() for p in self.router.parameters())
        one = 2 * self.rank * self.down_DR.shape[0]
        return self.count * one + router, self.active * one + router


def gates(ids_TK: Tensor, weights_TK: Tensor, count: int) -> Tensor:
    """Weights (T, count) by adapter, 0 where an adapter was not chosen; ids that name no adapter are left out."""
    valid_TK = (ids_TK >= 0) & (ids_TK < count)
    index_TK = torch.where(valid_TK, ids_TK, 0).long()
    return weights_TK.new_zeros(len(ids_TK), count).scatter_add(1, index_TK, weights_TK * valid_TK)


def attach(model: TinyLM, adaptation: Adaptation) -> TinyLM:
    """Freeze a trained model with the state of its routers, and give each MoE layer adapters, which alone learn.

    The layers lose their capacity, so that what the frozen model computes for a token depends on no other token.
    Raises `UserError` for a model without MoE layers, or whose layers are applied more than once.
    """
    if not model.layers or any(len(layer.routers) > 1 for layer in model.layers):
        raise bad("PERFT base", adaptation.run.router, "a router whose layer is applied once")
    model.requires_grad_(False).eval()
    for number, layer in enumerate(model.layers):
        with own_draws(adaptation.run.seed, number):
            layer.adapters = _adapters(layer, adaptation).to(model.head.weight.device)
        layer.capacity_factor = None
    return model


def _adapters(layer: MoE, adaptation: Adaptation) -> Adapters:
    counts = {
        "R": (adaptation.adapters, adaptation.top_k),
        "E": (layer.count, layer.top_k),
        "D": (adaptation.adapters, adaptation.adapters),
        "S": (1, 1),
    }
    count, active = counts[adaptation.variant]
    dim = layer.experts.w13_EDH.shape[1]
    return Adapters(adaptation.variant, dim, count, active, adaptation.rank, adaptation.alpha)


def of(model: TinyLM) -> list[Adapters]:
    """The adapters of each layer."""
    return [layer.adapters for layer in model.layers if isinstance(layer.adapters, Adapters)]


def parameter_counts(model: TinyLM) -> tuple[int, int]:
    """The trainable parameters of all layers, and how many of them a token meets."""
    pairs = [one.parameter_counts() for one in of(model)]
    return sum(one for one, _ in pairs), sum(one for _, one in pairs)
