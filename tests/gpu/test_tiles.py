"""Grouped products in tiles that are given rather than chosen: forms of several widths."""

import itertools

import pytest
import torch
from torch import Tensor

pytest.importorskip("cutlass")

from moe_routing_bench.benches.checks import close, tolerance
from moe_routing_kernels.cute.cache import current_arch
from moe_routing_kernels.experts.common import activate
from moe_routing_kernels.experts.cute_experts import launch
from moe_routing_kernels.gemm.sm90.grouped_gemm import compile_for
from moe_routing_kernels.gemm.sm90.tile import GroupedGemm, Tile

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")]
SPARE = 70  # rows of no expert, which nothing may write


def random_rows(*shape: int) -> Tensor:
    return torch.randn(*shape, device="cuda", dtype=torch.bfloat16)


def routing(tokens: int, experts: int, top_k: int, favour: float) -> tuple[Tensor, Tensor]:
    """order (T k,) int32 and offsets (E + 1,) int32; `favour` is added to the scores of every second expert."""
    scores = torch.rand(tokens, experts, device="cuda")
    scores[:, ::2] += favour
    ids = scores.topk(top_k, dim=1).indices.reshape(-1)
    offsets = torch.zeros(experts + 1, dtype=torch.int32, device="cuda")
    offsets[1:] = torch.bincount(ids, minlength=experts).cumsum(0)
    return ids.argsort(stable=True).int(), offsets


def reference(rows: Tensor, offsets: Tensor, weights: Tensor, activation: str) -> Tensor:
    """One gemm in float64, expert by expert."""
    products = [
        rows[first:end].double() @ weights[expert].double().T
        for expert, (first, end) in enumerate(itertools.pairwise(offsets.tolist()))
    ]
    return torch.cat([activate(activation, sums) if activation else sums for sums in products])


@pytest.mark.parametrize(("tokens", "favour"), [(1, 0.0), (7, 0.0), (300, 0.0), (701, 2.0), (2500, 0.3)])
@pytest.mark.parametrize(("experts", "top_k"), [(60, 4), (5, 5)])
@pytest.mark.parametrize(
    ("tile", "activation", "gathered"),
    [
        (Tile(2, 2, 176, pingpong=True, narrowest=88), "swiglu", False),
        (Tile(2, 2, 176, pingpong=True, narrowest=88), "geglu", True),
        (Tile(2, 2, 192, pingpong=True, narrowest=96), "", False),
        (Tile(2, 2, 160, narrowest=80), "swiglu", True),
        (Tile(2, 2, 144, narrowest=72), "relu2", False),
        (Tile(1, 2, 48, narrowest=8), "swiglu", True),
        (Tile(1, 1, 24, narrowest=8), "", False),
        (Tile(2, 2, 160, narrowest=80, cluster=2), "swiglu", True),
        (Tile(2, 2, 144, narrowest=72, cluster=2), "relu2", False),
        (Tile(2, 2, 176, pingpong=True, narrowest=88, cluster=2), "swiglu", False),
        (Tile(1, 2, 24, narrowest=8, cluster=2), "geglu", True),
        (Tile(2, 2, 160, narrowest=80, cluster=2, lag=2), "swiglu", True),
        (Tile(2, 2, 176, narrowest=88, cluster=2, lag=2, by_warp=True), "swiglu", True),
        (Tile(2, 2, 176, narrowest=88, cluster=2, lag=1, by_warp=True), "", False),
        (Tile(2, 2, 160, lag=2, by_warp=True), "relu2", False),
        (Tile(2, 2, 144, narrowest=72, by_warp=True), "geglu", True),
        (Tile(2, 2, 176, pingpong=True, narrowest=88, cluster=2, by_warp=True), "swiglu", False),
    ],
)
def test_given_tiles(tile, activation, gathered, experts, top_k, tokens, favour):
    """Sizes that are no multiple of a tile, experts without rows, more rows for some; rows of no expert stay as they are."""
    if current_arch() != "sm_90a":
        pytest.skip("is written for sm_90a")
    torch.manual_seed(tokens)
    inner, columns = 1032, 192 if tile.by_warp and activation in ("swiglu", "geglu") else 184
    gemm = GroupedGemm(columns, inner, experts, activation, tile, top_k=top_k if gathered else 0)
    order, offsets = routing(tokens, experts, top_k, favour)
    x, rows = random_rows(tokens, inner), len(order)
    weights = random_rows(experts, (2 if gemm.gated else 1) * columns, inner) * inner**-0.5
    packed = x[(order // top_k).long()]
    out = torch.full((rows + SPARE, columns), torch.nan, device="cuda", dtype=x.dtype)
    if gathered:
        operands = (x, torch.cat([order, order.new_full((SPARE,), -1)]))
    else:
        operands = (torch.cat([packed, torch.full_like(packed[:1], torch.nan).expand(SPARE, -1)]), None)
    launch(gemm, compile_for("sm_90a", "bf16", gemm), *operands, offsets, weights, None, out)()
    check = close(out[:rows], reference(packed, offsets, weights, activation), tolerance("bf16", 5), "out")
    assert not check.error, check
    assert out[rows:].isnan().all(), "rows of no expert are written"
