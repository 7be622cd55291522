"""Combine in plain torch: the residual, and dropped assignments, against float64."""

import pytest
import torch

from moe_routing_kernels.combine import Combine, torch_combine


@pytest.mark.parametrize("dropping", [False, True])
@pytest.mark.parametrize("residual", [False, True])
@pytest.mark.parametrize(("tokens", "hidden", "top_k"), [(1, 1, 1), (5, 13, 3)])
def test_sum_residual_and_dropped(tokens, hidden, top_k, residual, dropping):
    torch.manual_seed(17)
    y = torch.randn(tokens * top_k, hidden)
    inverse = torch.randperm(tokens * top_k, dtype=torch.int32).view(tokens, top_k)
    if dropping:
        inverse[0, -1] = -1
    weights = torch.rand(tokens, top_k).masked_fill(inverse < 0, torch.nan)
    start = torch.randn(tokens, hidden) if residual else None
    combined = torch.full((tokens, hidden), torch.nan)
    problem = Combine(tokens, hidden, top_k, "fp32", dropping)
    torch_combine.bind(problem, y=y, inverse=inverse, topk_weights=weights, combined=combined, residual=start)()
    want = torch.zeros(tokens, hidden, dtype=torch.float64) if start is None else start.double()
    for token, choice in (inverse >= 0).nonzero().tolist():
        want[token] += weights[token, choice].double() * y[inverse[token, choice]].double()
    torch.testing.assert_close(combined.double(), want, rtol=1e-5, atol=1e-6)
