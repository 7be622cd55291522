"""Operators on tensors of 2^31 elements and more, on a GPU: offsets of 32 bits would wrap. Most elements are equal, and a few tokens are checked."""

import pytest
import torch
from torch import Tensor

from moe_routing_kernels import ops
from moe_routing_kernels.choices import chooser
from moe_routing_kernels.ops import backends
from moe_routing_kernels.permute import MOST_ROWS
from moe_routing_kernels.routers import ROUTERS

pytestmark = [pytest.mark.gpu, pytest.mark.slow]
if not torch.cuda.is_available():
    pytest.skip("needs an NVIDIA GPU", allow_module_level=True)
MOST = 2**31
# experts, top_k, rule, dtype: one case for each form of the kernels and for each tensor that they address
GATES = {
    "packed": (128, 8, "softmax_topk_renorm", torch.float32),
    "direct": (16, 2, "softmax_topk_renorm", torch.float32),
    "threshold": (512, 10, "softmax_topk", torch.bfloat16),
    "exact": (64, 6, "softmax_topk", torch.bfloat16),
    "groups": (256, 8, "deepseek_v3", torch.float32),
    "narrow_groups": (256, 8, "deepseek_v3", torch.bfloat16),
    "biased": (384, 8, "sigmoid_renorm", torch.float32),
    "outputs": (8, 8, "softmax_topk", torch.bfloat16),
    "plain_torch": (2048, 8, "softmax_topk_renorm", torch.float32),
}
# tokens, hidden, top_k: of x alone, of packed rows, and of rows that are long
PACKS = {"x": (MOST // 4096 + 5, 4096, 1), "rows": (MOST // 8192 + 5, 2048, 4), "long": (MOST // 40000 + 5, 40000, 2)}
# rows, hidden, intermediate, experts: of rows, of the accumulators of the first GEMM, of weights
NETWORKS = {
    "rows": (MOST // 2048 + 64, 2048, 128, 8),
    "inner": (MOST // 4096 + 64, 256, 2048, 8),
    "weights": (4096, 8192, 4096, 40),
}

PACKAGES = {"cute": "cutlass", "triton": "triton"}  # what a backend needs
REMEMBERED = (chooser.kernel, chooser.way, backends._training)


@pytest.fixture(scope="module", autouse=True)
def room() -> None:
    """A fixture asks for it, because collecting may not open CUDA: 70 GiB hold operands beyond 2^31 elements."""
    if torch.cuda.get_device_properties(0).total_memory < 70 << 30:
        pytest.skip("needs a GPU with 70 GiB")


@pytest.fixture(params=["cute", "triton"], autouse=True)
def backend(request, monkeypatch) -> str:
    if request.param == "cute":
        pytest.importorskip("cutlass")
    monkeypatch.setattr(chooser, "installed", lambda package: package == PACKAGES.get(request.param))
    for remembered in REMEMBERED:
        remembered.cache_clear()
    yield request.param
    for remembered in REMEMBERED:
        remembered.cache_clear()
    torch.cuda.empty_cache()


@pytest.mark.parametrize("name", GATES)
def test_gate(name: str) -> None:
    experts, top_k, rule, dtype = GATES[name]
    tokens = MOST // experts + 5
    logits = torch.zeros(tokens, experts, device="cuda", dtype=dtype)
    some = torch.tensor([0, 1, tokens // 2, tokens - 2, tokens - 1], device="cuda")
    logits[some] = torch.randn(5, experts, device="cuda").to(dtype)
    bias = torch.linspace(0, 0.1, experts, device="cuda") if ROUTERS[rule].bias else None
    ids, weights = ops.gate(logits, top_k, rule, bias)
    want_ids, want = ops.gate(logits[some].clone(), top_k, rule, bias)
    assert torch.equal(ids[some], want_ids)
    torch.testing.assert_close(weights[some], want)
    assert torch.equal(ids[tokens // 2 + 7], ids[7]) and torch.equal(weights[tokens // 2 + 7], weights[7])


@pytest.mark.parametrize("name", PACKS)
def test_pack_and_combine(name: str) -> None:
    tokens, hidden, top_k = PACKS[name]
    numbers = torch.arange(tokens, device="cuda")
    ids = ((torch.arange(top_k, device="cuda") + numbers.unsqueeze(1)) % 8).int()
    _, _, order, inverse = ops.permute(ids, 8)
    x = torch.empty(tokens, hidden, device="cuda", dtype=torch.bfloat16).copy_((numbers % 251).unsqueeze(1))
    packed = ops.pack(x, order, inverse)
    want = (order // top_k % 251).bfloat16()
    assert torch.equal(packed[:, 0], want) and torch.equal(packed[:, -1], want)
    out = ops.combine(packed, inverse, torch.full((tokens, top_k), 1 / top_k, device="cuda"))
    assert torch.equal(out[:, 0], x[:, 0]) and torch.equal(out[:, -1], x[:, -1])


@pytest.mark.parametrize("tokens", [MOST // 16, MOST_ROWS // 8], ids=["half", "most"])
def test_permute(tokens: int) -> None:
    ids = ((torch.arange(tokens, device="cuda").unsqueeze(1) * 8 + torch.arange(8, device="cuda")) % 64).int()
    _, offsets, order, inverse = ops.permute(ids, 64)
    assert int(offsets[-1]) == tokens * 8
    for first in (0, tokens * 8 - 1_000_000):
        assigned = torch.arange(first, first + 1_000_000, device="cuda")
        assert torch.equal(order[inverse.view(-1)[first : first + 1_000_000].long()].long(), assigned)


def test_most_tokens() -> None:
    """As many tokens, rows and assignments as operators take: one step of a loop more exceeds int32."""
    ids, weights = ops.gate(torch.ones(MOST_ROWS, 1, device="cuda", dtype=torch.bfloat16), 1)
    assert int(ids[-1]) == 0 and not ids.any() and float(weights[-1]) == 1
    del weights
    _, offsets, order, inverse = ops.permute(ids, 1)
    del ids
    assert int(offsets[-1]) == MOST_ROWS == int(order[-1]) + 1 == int(inverse[-1]) + 1
    x = torch.empty(MOST_ROWS, 1, device="cuda", dtype=torch.bfloat16).uniform_()
    packed = ops.pack(x, order, inverse)
    assert torch.equal(packed, x)
    del order, x
    out = ops.combine(packed, inverse, torch.ones(MOST_ROWS, 1, device="cuda", dtype=torch.bfloat16))
    assert torch.equal(out, packed)


@pytest.mark.parametrize("training", [False, True], ids=["inference", "training"])
@pytest.mark.parametrize("name", NETWORKS)
def test_experts(name: str, training: bool) -> None:
    rows, hidden, inner, experts = NETWORKS[name]

    def drawn(*shape: int) -> Tensor:
        return torch.randn(shape, device="cuda", dtype=torch.bfloat16).div_(16)

    x, w13, w2 = (
        drawn(rows, hidden).requires_grad_(training),
        drawn(experts, 2 * inner, hidden),
        drawn(experts, hidden, inner),
    )
    offsets = torch.linspace(0, rows, experts + 1, device="cuda").int()
    y = ops.experts(x, offsets, w13, w2)
    if training:
        y.backward(torch.ones_like(y))
    for e in (0, experts // 2, experts - 1):
        last = slice(int(offsets[e + 1]) - 3, int(offsets[e + 1]))
        leaf = x.detach()[last].float().requires_grad_()
        gate, up = (leaf @ w13[e].float().T).chunk(2, -1)
        want = torch.nn.functional.silu(gate).mul(up) @ w2[e].float().T
        assert (y.detach()[last] - want).norm() < 0.02 * want.norm()
        if training and x.grad is not None:
            want.sum().backward()
            assert (x.grad[last] - leaf.grad).norm() < 0.02 * leaf.grad.norm()
