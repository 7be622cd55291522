"""The operators for use in a model, on a GPU: kernels against float64, gradients, a CUDA graph, torch.compile."""

import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

sys.path.append(str(Path(__file__).parents[1] / "ops"))
from ops_cases import CASES, DTYPES, check, data, routing

from moe_routing_bench import ops

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")]
# tokens, hidden, experts, top_k, layout, capacity factor
LARGE = {
    "aligned": (1000, 2880, 64, 8, "block128", None),
    "large_dropped": (3000, 4097, 16, 6, "compact", 0.7),
    "padded": (2048, 2048, 64, 8, "padded", 1.25),
    "few_tokens": (3, 7168, 256, 8, "block64", None),
}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", [*CASES, *LARGE])
def test_kernels(name, dtype):
    tokens, hidden, *rest = (CASES | LARGE)[name]
    check(name, dtype, *routing(tokens, *rest, device="cuda"), hidden)


@pytest.mark.parametrize("empty", ["all_dropped", "no_rows", "no_tokens"])
def test_nothing_to_do(empty):
    order, inverse = routing(4, 4, 2, device="cuda")
    dropped, none = torch.full_like(order, -1), torch.full_like(inverse, -1)
    known = {"all_dropped": (dropped, none), "no_rows": (order[:0], none), "no_tokens": (dropped, none[:0])}[empty]
    check(empty, torch.float32, *known, 16)


def layer(x: Tensor, scale: Tensor, weights: Tensor, order: Tensor, inverse: Tensor) -> Tensor:
    """An MoE layer whose experts scale rows: pack, experts, combine with x as the residual."""
    return ops.combine(ops.pack(x, order, inverse) * scale, inverse, weights, residual=x)


def test_layer_eager_captured_and_compiled():
    """Output and gradients: the same bits in two runs and from a CUDA graph, and within 1 % of float64 compiled whole."""
    order, inverse = routing(512, 16, 4, "padded", 1.0, device="cuda")
    inputs = [one.requires_grad_() for one in data(len(order), 1024, inverse, torch.bfloat16)]
    grad = torch.randn_like(inputs[0])

    def run(function: Callable, inputs: list[Tensor], grad: Tensor) -> list[Tensor]:
        output = function(*inputs, order, inverse)
        gradients = torch.autograd.grad(output, inputs, grad)
        return [output.detach(), *gradients]  # an autograd graph that lives on would tie the capture to its stream

    want = run(layer, inputs, grad)
    assert all(map(torch.equal, run(layer, inputs, grad), want)), "two runs differ"
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = run(layer, inputs, grad)
    graph.replay()
    assert all(map(torch.equal, captured, want)), "a CUDA graph differs"
    compiled = run(torch.compile(layer, fullgraph=True), inputs, grad)
    wide = [one.detach().double().requires_grad_() for one in inputs]
    exact = run(layer, wide, grad.double())
    for results in (want, compiled):
        for got, right in zip(results, exact, strict=True):
            assert float((got.double() - right).norm() / right.norm()) < 0.01
