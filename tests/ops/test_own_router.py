"""examples/own_router.py: an MoE block whose routing rule is not the library's, against a loop over tokens and experts; and the rule's bench."""

import importlib.util
from pathlib import Path

import torch

from example_package import bench

EXAMPLE = Path(__file__).parents[2] / "examples/own_router.py"


def test_the_example_routes_by_its_own_rule() -> None:
    """Output and gradients, those of the router's weight by way of the rule's weights."""
    spec = importlib.util.spec_from_file_location("own_router", EXAMPLE)
    assert spec and spec.loader
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    torch.manual_seed(17)
    block, x = example.OwnRouting(32, 16, 8, 3), torch.randn(12, 32)
    want = torch.stack([_one(block, token) for token in x])
    got = block(x)
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)
    direction = torch.randn_like(want)
    gradients = (torch.autograd.grad(one, list(block.parameters()), direction) for one in (got, want))
    for one, other in zip(*gradients, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-4)


def test_the_rule_is_measured() -> None:
    """As its docstring says, in its folder."""
    done = bench(
        EXAMPLE.parent,
        "measure",
        "gate",
        "--router",
        "own_router:SHARP",
        "--implementations",
        "torch",
        "--tokens",
        "64",
        "--max-seconds",
        "0.1",
    )
    assert "torch           ok" in done.stdout and "-own_router.SHARP-" in done.stdout


def _one(block: torch.nn.Module, token: torch.Tensor) -> torch.Tensor:
    """The output of one token: softmax of twice the logits of the three best."""
    logits = block.router(token)
    chosen = logits.argsort(descending=True)[:3]
    terms = []
    for weight, expert in zip((2 * logits[chosen]).softmax(0), chosen, strict=True):
        gate, up = (block.w13[expert] @ token).chunk(2)
        terms.append(weight * (block.w2[expert] @ (torch.nn.functional.silu(gate) * up)))
    return torch.stack(terms).sum(0)
