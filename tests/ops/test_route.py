"""route, combine and the example together: against a dense reference in float64, under torch.compile, and as documented."""

import importlib.util
from pathlib import Path

import pytest
import torch
import torch._dynamo.testing
import torch._inductor.config
import torch._inductor.cpu_vec_isa
from torch import Tensor

from campaign import sampled
from moe_routing_bench.store import platforms
from moe_routing_kernels import ops
from moe_routing_kernels.errors import UserError
from moe_routing_kernels.gate import FUSED
from moe_routing_kernels.permute import LAYOUTS
from moe_routing_kernels.routers import ROUTERS

torch.set_num_threads(1)
EXAMPLE = Path(__file__).parents[2] / "examples/moe_block.py"
MOST_LINES = 20  # of code in the example


def layer(
    x: Tensor, logits: Tensor, scale: Tensor, rule: str, bias: Tensor | None, capacity: int | None, layout: str
) -> Tensor:
    """An MoE layer whose expert e multiplies rows by scale[e], scale (E, H)."""
    routed = ops.route(x, logits, 3, rule, bias, capacity, layout)
    expert = torch.searchsorted(routed.offsets[1:], torch.arange(len(routed.packed)), right=True, out_int32=True)
    y = routed.packed * scale[expert.clamp_max(len(scale) - 1)]
    return ops.combine(y, routed.inverse, routed.topk_weights, residual=x)


def dense(x: Tensor, logits: Tensor, scale: Tensor, rule: str, bias: Tensor | None, capacity: int | None) -> Tensor:
    """The same as a dense sum over all experts, by torch's own autograd."""
    ids, weights = ops.gate(logits, 3, rule, bias)
    chosen = torch.nn.functional.one_hot(ids.long(), len(scale))  # (T, k, E)
    if capacity is not None:
        place = chosen.flatten(0, 1).cumsum(0).view_as(chosen)
        chosen = chosen * (place <= capacity)
    return x + torch.einsum("tke,tk,th,eh->th", chosen.to(weights.dtype), weights, x, scale)


def drawn(
    tokens: int, dtype: torch.dtype, rule: str, experts: int = 16, hidden: int = 5
) -> tuple[list[Tensor], Tensor | None]:
    """x (T, H), logits (T, E), scale (E, H), all of which require a gradient, and the bias of the rule."""
    torch.manual_seed(17)
    inputs = [torch.randn(*shape, dtype=dtype) for shape in ((tokens, hidden), (tokens, experts), (experts, hidden))]
    bias = 0.3 * torch.randn(experts, dtype=dtype) if ROUTERS[rule].bias else None
    return [one.requires_grad_() for one in inputs], bias


def results(function, inputs: list[Tensor], *options) -> list[Tensor]:
    """Output and gradients."""
    output = function(*inputs, *options)
    torch.manual_seed(18)
    return [output.detach(), *torch.autograd.grad(output, inputs, torch.randn_like(output))]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("rule", FUSED)
def test_a_layer_is_the_dense_sum(rule: str, layout: str) -> None:
    """Output and every gradient in float64, without and with dropped assignments."""
    for tokens, capacity in ((7, 7), (11, 2), *([(6, None)] if layout != "padded" else [])):
        inputs, bias = drawn(tokens, torch.float64, rule)
        got = results(layer, inputs, rule, bias, capacity, layout)
        want = results(dense, inputs, rule, bias, capacity)
        for one, other in zip(got, want, strict=True):
            torch.testing.assert_close(one, other)


def test_the_whole_layer_passes_gradcheck() -> None:
    inputs, _ = drawn(4, torch.float64, "softmax_topk")
    options = ("softmax_topk", None, 1, "compact")
    assert torch.autograd.gradcheck(lambda *inputs: layer(*inputs, *options), inputs)


RENORMALISED, BIASED = "softmax_topk_renorm", "deepseek_v3"
# Not all pairs: permute's operator, which knows the layout, and gate's, which knows the rule, do not know of each other.
COMPILED = {"compact": [RENORMALISED, BIASED], "padded": [BIASED], "block64": [RENORMALISED], "block128": [BIASED]}


@pytest.mark.parametrize(
    ("layout", "rule"),
    sampled(
        [(layout, rule) for layout in LAYOUTS for rule in COMPILED[layout]],
        [("compact", RENORMALISED), ("padded", BIASED)],
        unpack=True,
    ),
)
def test_compile_takes_it_whole(layout: str, rule: str) -> None:
    """Without a graph break, with dynamic shapes: one graph serves other numbers of tokens."""
    torch.compiler.reset()
    graphs = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    run = torch.compile(layer, fullgraph=True, backend=graphs, dynamic=True)
    for tokens in (8, 13, 40):
        inputs, bias = drawn(tokens, torch.float32, rule)
        capacity = ops.capacity_of(1.0, 8, 3, 16) if layout == "padded" else None
        got, want = (results(one, inputs, rule, bias, capacity, layout) for one in (run, layer))
        for one, other in zip(got, want, strict=True):
            torch.testing.assert_close(one, other)
    assert graphs.frame_count == 1


@pytest.mark.slow
@pytest.mark.skipif(platforms.missing(("compiler",), "cpu") is not None, reason="needs a C++ compiler")
def test_inductor_takes_it_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """In scalar code: what vectors this CPU has would take longer to find out. Five kernels share a header compiled beforehand."""
    monkeypatch.setattr(torch._inductor.cpu_vec_isa, "valid_vec_isa_list", list)
    monkeypatch.setattr(torch._inductor.config, "cpp_cache_precompile_headers", True)
    torch.compiler.reset()
    inputs, bias = drawn(5, torch.float32, "deepseek_v3")
    options = ("deepseek_v3", bias, 2, "padded")
    got, want = (results(one, inputs, *options) for one in (torch.compile(layer, fullgraph=True), layer))
    for one, other in zip(got, want, strict=True):
        torch.testing.assert_close(one, other)


def test_a_token_with_a_nan_passes_by_the_experts() -> None:
    """Its row is the residual alone, and the others are as without it."""
    (x, logits, scale), _ = drawn(6, torch.float32, "softmax_topk")
    logits = logits.detach().clone()
    want = layer(x, logits, scale, "softmax_topk", None, None, "compact")
    logits[2, 1] = torch.nan
    got = layer(x, logits, scale, "softmax_topk", None, None, "compact")
    others = torch.arange(6) != 2
    torch.testing.assert_close(got[others], want[others])
    assert torch.equal(got[2], x[2])


def example():
    """The module of the example."""
    spec = importlib.util.spec_from_file_location("moe_block", EXAMPLE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_example_is_an_moe_block(dtype: torch.dtype) -> None:
    """Output and gradients against a loop over tokens and experts in float64."""
    torch.manual_seed(17)
    block = example().MoEBlock(32, 16, 8, 2).to(dtype)
    x = torch.randn(12, 32, dtype=dtype, requires_grad=True)
    inputs = [x, *block.parameters()]
    got = results(lambda *_: block(x), inputs)

    ids = ops.gate(block.router(x), 2)[0].tolist()  # the choice of the block's own precision

    def loop(x: Tensor, w13: Tensor, w2: Tensor, router: Tensor) -> Tensor:
        rows = []
        for token, chosen in zip(x, ids, strict=True):
            weights = (router @ token)[chosen].softmax(0)
            total = token
            for weight, expert in zip(weights, chosen, strict=True):
                gate, up = (w13[expert] @ token).chunk(2)
                total = total + weight * (w2[expert] @ (torch.nn.functional.silu(gate) * up))
            rows.append(total)
        return torch.stack(rows)

    wide = [one.detach().double().requires_grad_() for one in inputs]
    names = [name for name, _ in block.named_parameters()]
    assert names == ["w13", "w2", "router.weight"]
    output = loop(*wide)
    torch.manual_seed(18)
    want = [output.detach(), *torch.autograd.grad(output, wide, torch.randn_like(got[0]).double())]
    for one, other in zip(got, want, strict=True):
        assert float((one.double() - other).norm() / other.norm()) < (2e-2 if dtype == torch.bfloat16 else 1e-5)


def test_the_example_is_short_and_learns() -> None:
    code = [line for line in EXAMPLE.read_text().splitlines() if line.strip() and not line.startswith('"""')]
    assert len(code) <= MOST_LINES
    torch.manual_seed(17)
    block, x = example().MoEBlock(16, 16, 4, 2), torch.randn(64, 16)
    target, optimiser = torch.randn(64, 16), torch.optim.Adam(block.parameters(), 1e-2)
    losses = []
    for _ in range(30):
        loss = (block(x) - target).square().mean()
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0] / 2


def test_bad_input_is_explained() -> None:
    (x, logits, _), _ = drawn(5, torch.float32, "softmax_topk")
    for call, what in (
        (lambda: ops.route(x[:4], logits, 2), r"x: got '\(4, 5\) of torch.float32'; allowed: '?5 rows"),
        (lambda: ops.route(x, logits, 2, layout="padded"), "capacity: got None"),
        (lambda: ops.route(x, logits, 2, "top2"), "rule: got 'top2'"),
    ):
        with pytest.raises(UserError, match=what):
            call()
