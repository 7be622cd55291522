"""Networks from x (..., D) to router logits (..., outputs): linear, mlp and mlp_hadamard, the three of the predecessor.

Parameters and arithmetic are float32. The last layer has no bias and starts at N(0, 0.02²).
"""

import contextlib

import torch
from torch import Tensor, nn

from moe_routing_kernels.errors import pick
from moe_routing_kernels.routers.zoo import NETWORKS


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


def build(network: str, dim: int, outputs: int) -> nn.Module:
    """The network of that name. Raises `UserError` where there is none."""
    pick("router network", network, NETWORKS)
    if network == "linear":
        return last_layer(dim, outputs)
    if network == "mlp":
        hidden = max(64, dim // 2)
        return nn.Sequential(nn.Linear(dim, hidden), nn.GELU(), last_layer(hidden, outputs))
    return MlpHadamard(dim, outputs)
