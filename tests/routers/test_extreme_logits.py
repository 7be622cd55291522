"""Every trainable rule where logits are far from zero: no weight, loss or gradient is NaN or infinite."""

import pytest
import torch
from router_properties import data, make

from moe_routing_kernels.routers.learned import ZOO, Learned, SoftRouting

LEVELS = {
    "all low": (-95.0, -95.0),
    "all very low": (-300.0, -300.0),
    "low and lower": (-90.0, -130.0),
    "high": (60.0, 90.0),
    "apart": (-150.0, 150.0),
}


@pytest.mark.parametrize("levels", LEVELS)
@pytest.mark.parametrize("name", ZOO)
def test_extreme_logits_give_finite_results(name: str, levels: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Logits of a token are moved to lie between two levels, which autograd sees through."""
    low, high = LEVELS[levels]
    logits = Learned.logits

    def moved(self: Learned, x: torch.Tensor) -> torch.Tensor:
        return low + (high - low) * logits(self, x).sigmoid()

    monkeypatch.setattr(Learned, "logits", moved)
    toy = make(name).train()
    out, routings = toy(*data())
    total = out.square().mean()
    for routing in routings:
        assert routing.scores.isfinite().all() and (routing.scores >= 0).all()
        torch.testing.assert_close(routing.scores.sum(1), torch.ones(len(routing.scores)), atol=1e-4, rtol=0)
        assert isinstance(routing, SoftRouting) or routing.weights.isfinite().all()
        assert all(loss.isfinite() for loss in routing.losses.values()), routing.losses
        total = total + sum(routing.losses.values())
    assert total.isfinite()
    if total.requires_grad:
        total.backward()
        assert all(p.grad is None or p.grad.isfinite().all() for p in toy.parameters())
