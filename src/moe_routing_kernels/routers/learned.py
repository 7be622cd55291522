"""Shared by the routers of the zoo: their networks, their results, their base class, and building a router from its table line.

Networks go from x (..., D) to router logits (..., outputs): linear, mlp and mlp_hadamard, the three of the predecessor. Parameters and
arithmetic are float32. The last layer has no bias and starts at N(0, 0.02²).
"""

import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from moe_routing_kernels.errors import bad, pick
from moe_routing_kernels.routers import losses
from moe_routing_kernels.routers.zoo import NETWORKS, ZOO, TrainableRule


class MlpHadamard(nn.Module):
    """Linear(MLP(x) ⊙ x): the MLP is a gate over the features of x."""

    def __init__(self, dim: int, outputs: int) -> None:
        """The MLP goes through max(64, D/2) features and back."""
        super().__init__()
        hidden = max(64, dim // 2)
        self.gate = nn.Sequential(nn.Linear(dim, hidden), nn.GELU(), nn.Linear(hidden, dim))
        self.last = last_layer(dim, outputs)

    def forward(self, x: Tensor) -> Tensor:
        """Logits (..., outputs)."""
        return self.last(self.gate(x) * x)


def last_layer(dim: int, outputs: int) -> nn.Linear:
    """A new layer that gives logits."""
    layer = nn.Linear(dim, outputs, bias=False)
    nn.init.normal_(layer.weight, std=0.02)
    return layer


def last_of(network: nn.Module) -> nn.Linear:
    """The layer of a network that gives its logits."""
    return [layer for layer in network.modules() if isinstance(layer, nn.Linear)][-1]


def without_autocast(x: Tensor) -> contextlib.AbstractContextManager:
    """Inside, operations on the device of x keep their dtype. Devices without autocast, such as meta, always do."""
    device = x.device.type
    if not torch.amp.is_autocast_available(device):
        return contextlib.nullcontext()
    return torch.autocast(device, enabled=False)


def in_float32(network: nn.Module, x: Tensor) -> Tensor:
    """Apply a network to x (B, S, D) of any float dtype: (T, outputs) float32, under autocast too."""
    with without_autocast(x):
        return network(x.flatten(0, 1).float())


def build_network(network: str, dim: int, outputs: int) -> nn.Module:
    """The network of that name. Raises `UserError` where there is none."""
    pick("router network", network, NETWORKS)
    if network == "linear":
        return last_layer(dim, outputs)
    if network == "mlp":
        hidden = max(64, dim // 2)
        return nn.Sequential(nn.Linear(dim, hidden), nn.GELU(), last_layer(hidden, outputs))
    return MlpHadamard(dim, outputs)


COMMON_LOSSES = ("switch", "global_batch", "sequence", "z", "entropy")


@dataclass
class Routing:
    """The decision of a rule for T = B * S tokens (flattened batch-major)."""

    ids: Tensor  # (T, K) int32, -1 in an empty slot; K = top_k, or more where the number of experts per token varies
    weights: Tensor  # (T, K) float32, differentiable; 0 where ids is -1
    losses: dict[str, Tensor]  # scalars with their coefficient applied, differentiable; empty in evaluation
    scores: Tensor  # (T, E) float32, a distribution over the true experts: rows sum to 1


@dataclass
class SoftRouting:
    """The decision of soft MoE: mixtures in place of ids. Slot s belongs to expert s // (slots / E)."""

    dispatch: Tensor  # (B, S, slots) float32, sums to 1 over S
    combine: Tensor  # (B, S, slots) float32, sums to 1 over slots
    losses: dict[str, Tensor]
    scores: Tensor  # (T, E) float32, rows sum to 1


class Learned(nn.Module):
    """The router of a trainable rule, with its parameters and its state.

    Shapes never depend on data and nothing waits for the host, so that a training step can be captured. State that is learnt
    without a gradient is in buffers: in training mode `forward` gathers statistics, which `after_step` uses.
    """

    # the kinds of the zero-computation experts, whose ids are E, E+1, ...: "zero", "copy" or "const"; of "shared", an expert of
    # the layer that every token has, with the id E
    extra: tuple[str, ...] = ()
    passes = 1  # how often the layer is applied, each time with another router
    known_losses: tuple[str, ...] = COMMON_LOSSES
    takes_network = True
    global_state = False  # whether the routers of a model share one state

    def __init__(
        self, rule: TrainableRule, dim: int, experts: int, top_k: int, network: str, coefficients: Mapping[str, float]
    ):
        """Set up the common state; the network has one output per true or zero-computation expert."""
        super().__init__()
        self.rule, self.experts, self.top_k, self.seated_by = rule, experts, top_k, rule.seated_by
        self.coefficients = dict(coefficients)
        self._lead: list[Learned] = []  # in a list, so that it is no part of this module
        outputs = experts + len(self.extra)
        self.network = build_network(network, dim, outputs) if self.takes_network else None

    @property
    def lead(self) -> Any:
        """The router that has this one's state: itself, or the first of the model where `join` has joined them."""
        return self._lead[0] if self._lead else self

    def logits(self, x: Tensor) -> Tensor:
        """Logits (T, E + extra) float32 of x (B, S, D)."""
        assert self.network is not None, f"{self.rule.name} has no router network"
        return in_float32(self.network, x)

    def fixed(self, ids: Tensor) -> Routing:
        """The routing of a choice of top_k experts that no logits decided: even weights and scores, no losses."""
        scores = losses.chosen(ids, self.experts) / self.top_k
        return Routing(ids, torch.full_like(ids, 1 / self.top_k, dtype=torch.float32), {}, scores)

    def terms(
        self, logits: Tensor, scores: Tensor, ids: Tensor, batch: int, **extra: Callable[[], Tensor]
    ) -> dict[str, Tensor]:
        """The configured losses times their coefficients: common losses and the rule's `extra` ones.

        Empty in evaluation.
        """
        if not self.training:
            return {}
        common = {
            "switch": lambda: losses.switch(scores, ids),
            "global_batch": lambda: losses.global_batch(scores, ids),
            "sequence": lambda: losses.sequence(scores, ids, batch),
            "z": lambda: losses.z(logits),
            "entropy": lambda: losses.entropy(scores),
        }
        return {name: weight * (common | extra)[name]() for name, weight in self.coefficients.items() if weight}

    def forward(self, x: Tensor, token_ids: Tensor, positions: Tensor) -> Routing | SoftRouting:
        """Route x (B, S, D) of any float dtype with token_ids (B, S) int64 and positions (S,) int64."""
        raise NotImplementedError

    def after_step(self) -> None:
        """Update the state that is learnt without a gradient; call it after each step of the optimiser."""


def by_column(taken: Tensor) -> Tensor:
    """Ids (T, E) int32 from taken (T, E) bool: expert e in column e, or -1."""
    experts = torch.arange(taken.shape[1], device=taken.device, dtype=torch.int32)
    return torch.where(taken, experts, -1)


def join(routers: Sequence[nn.Module]) -> None:
    """Give the routers of a model's layers one state, that of the first, where their rule asks for it."""
    for router in routers[1:]:
        if isinstance(router, Learned) and router.global_state:
            router._lead = list(routers[:1])  # type: ignore[arg-type]


def build(rule: str, dim: int, experts: int, top_k: int, network: str = "linear", **options: Any) -> Learned:
    """A router of the zoo for x (..., `dim`).

    `options` are those of the rule's table line, and `losses`, a mapping from losses to coefficients in place of the
    table's. Raises `UserError` for an unknown rule, network, option or loss, and for shapes that the rule cannot route.
    """
    line = ZOO[pick("router", rule, ZOO)]
    cls: type[Learned] = line.load()
    if not cls.takes_network and network != "linear":
        raise bad(f"router network for {rule}", network, "linear", "the rule has no network")
    if line.top_k not in (None, top_k) or not line.least_top_k <= top_k <= experts:
        allowed = line.top_k or f"{line.least_top_k} to {experts}"
        raise bad(f"top_k for router {rule}", top_k, allowed)
    coefficients = options.pop("losses", line.losses)
    for name in coefficients:
        pick(f"loss for router {rule}", name, cls.known_losses)
    for name in options:
        pick(f"option for router {rule}", name, (*line.options, "losses"))
    return cls(line, dim, experts, top_k, network, coefficients, **{**line.options, **options})
