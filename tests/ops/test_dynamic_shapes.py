"""One compiled graph serves any number of tokens, capacity and gradients included; and what a capacity factor is."""

import math
from collections.abc import Callable
from fractions import Fraction

import pytest
import torch
import torch._dynamo.testing
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from campaign import CAMPAIGN
from moe_routing_kernels import ops
from moe_routing_kernels.errors import UserError
from moe_routing_kernels.ops import backends

torch.set_num_threads(1)
EXPERTS, TOP_K, HIDDEN, INTERMEDIATE = 4, 2, 16, 24
SIZES = (2, 3, 4, 5, 7, 8, 13, 16, 33, 64, 257, 1000)
FACTOR = 1.25


def capacity(x: Tensor) -> int:
    return ops.capacity_of(FACTOR, x.shape[0], TOP_K, EXPERTS)


def layer(x: Tensor, logits: Tensor, w13: Tensor, w2: Tensor) -> Tensor:
    return ops.layer(x, logits, w13, w2, TOP_K, capacity=capacity(x), residual=x)


def fused_experts(x: Tensor, logits: Tensor, w13: Tensor, w2: Tensor) -> Tensor:
    weights, ids = logits.softmax(1).topk(TOP_K)
    return ops.fused_experts(x, ids, weights, w13, w2)


def in_stages(layout: str) -> Callable[..., Tensor]:
    def route(x: Tensor, logits: Tensor, w13: Tensor, w2: Tensor) -> Tensor:
        routed = ops.route(x, logits, TOP_K, capacity=capacity(x), layout=layout)
        y = ops.experts(routed.packed, routed.offsets, w13, w2)
        return ops.combine(y, routed.inverse, routed.topk_weights, residual=x)

    return route


def experts(x: Tensor, logits: Tensor, w13: Tensor, w2: Tensor) -> Tensor:
    """Of rows that are counted elsewhere."""
    offsets = torch.arange(EXPERTS + 1, dtype=torch.int32) * (x.shape[0] // EXPERTS)
    return ops.experts(x * logits.sum(1, keepdim=True), offsets, w13, w2)


def routed(x: Tensor, logits: Tensor, w13: Tensor, w2: Tensor) -> Tensor:
    """Without experts; their weights take part so that they have a gradient."""
    outcome = ops.route(x, logits, TOP_K, capacity=capacity(x))
    return ops.combine(outcome.packed, outcome.inverse, outcome.topk_weights) + w13.sum() * w2.sum()


def dropping(x: Tensor, logits: Tensor, w13: Tensor, w2: Tensor) -> Tensor:
    """With a capacity that bounds the rows of many tokens, and not those of few: which does so is no property of a graph."""
    rows = ops.capacity_of(0.9, x.shape[0], TOP_K, EXPERTS)
    return ops.layer(x, logits, w13, w2, TOP_K, capacity=rows)


FUNCTIONS = {"layer": layer, "dropping": dropping, "fused_experts": fused_experts, "experts": experts, "route": routed}
FUNCTIONS |= {f"stages_{layout}": in_stages(layout) for layout in ("padded", "block64")}
# Compiling takes all the time: `make test` has the whole layer, with and without a bound of its capacity.
FAST = ("layer", "dropping")
# Each is trained, which has its forward pass, too; those of `make test` are also compiled for inference.
LATER = {"experts": pytest.mark.slow, "stages_block64": pytest.mark.slow}  # the others are left to `make campaigns`
TRAINED = [pytest.param(name, True, marks=() if name in FAST else LATER.get(name, CAMPAIGN)) for name in FUNCTIONS]


def drawn(tokens: int, training: bool, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    torch.manual_seed(tokens)
    shapes = ((tokens, HIDDEN), (tokens, EXPERTS), (EXPERTS, 2 * INTERMEDIATE, HIDDEN), (EXPERTS, HIDDEN, INTERMEDIATE))
    return [torch.randn(shape).div(4).to(dtype).requires_grad_(training) for shape in shapes]


def results(function: Callable[..., Tensor], inputs: list[Tensor], training: bool) -> list[Tensor]:
    output = function(*inputs)
    return [output.detach(), *(torch.autograd.grad(output.square().sum(), inputs) if training else [])]


def count(function: Callable[..., Tensor], training: bool, marked: bool, dtype: torch.dtype, sizes=SIZES) -> int:
    """Graphs that are compiled for all sizes, of which each gives what it gives in eager mode."""
    torch.compiler.reset()
    graphs = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(function, fullgraph=True, backend=graphs)
    for tokens in sizes:
        inputs = drawn(tokens, training, dtype)
        for tokened in inputs[:2] if marked else []:
            torch._dynamo.mark_dynamic(tokened, 0)
        got = results(compiled, inputs, training)
        for entry, right in zip(got, results(function, drawn(tokens, training, dtype), training), strict=True):
            torch.testing.assert_close(entry, right)
    return graphs.frame_count


@pytest.mark.parametrize(
    ("name", "training"), [*TRAINED, ("layer", False), pytest.param("dropping", False, marks=CAMPAIGN)]
)
def test_one_graph_serves_any_number_of_tokens(name: str, training: bool) -> None:
    """At once, as the dimension is marked."""
    assert count(FUNCTIONS[name], training, True, torch.float32) == 1


@pytest.mark.parametrize("name", ["layer", "experts"])
def test_so_where_kernels_keep_sums(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU: whether they do is known by formats and sizes of the weights, not by the number of rows."""
    pytest.importorskip("cutlass")
    asked = []

    @torch.compiler.assume_constant_result
    def training(device: torch.device) -> str:
        asked.append(device)
        return "cute 9.0"

    monkeypatch.setattr(backends, "training", training)
    assert count(FUNCTIONS[name], True, True, torch.bfloat16, SIZES[:6]) == 1 and asked


@pytest.mark.parametrize(
    ("name", "training"),
    [
        ("layer", True),
        pytest.param("dropping", True, marks=pytest.mark.slow),
        *(pytest.param(name, True, marks=CAMPAIGN) for name in FUNCTIONS if name not in FAST),
        *(pytest.param(name, False, marks=CAMPAIGN) for name in FAST),
    ],
)
def test_no_token_and_one_are_right(name: str, training: bool) -> None:
    """torch compiles both apart from all others; the second of those makes their graph dynamic, or 8 tokens would have a fifth."""
    assert count(FUNCTIONS[name], training, False, torch.float32, (5, 0, 1, 7, 0, 1, 8)) <= 4


@pytest.mark.parametrize("dynamic", [None, True], ids=["automatic", "all_dynamic"])
def test_a_factor_may_change(dynamic: bool | None) -> None:
    """Each factor is a constant of a graph."""
    torch.compiler.reset()

    def permuted(ids: Tensor, factor: float) -> tuple[Tensor, ...]:
        return ops.permute(ids, EXPERTS, ops.capacity_of(factor, ids.shape[0], TOP_K, EXPERTS), "padded")

    compiled = torch.compile(permuted, fullgraph=True, backend="aot_eager", dynamic=dynamic)
    for factor in (1.25, 1.5, 0.1, 1.25):
        for tokens in (3, 9, 40):
            ids = torch.stack([torch.randperm(EXPERTS)[:TOP_K] for _ in range(tokens)])
            assert all(map(torch.equal, compiled(ids, factor), permuted(ids, factor))), (factor, tokens)


def test_a_layer_is_exported_for_any_number_of_tokens() -> None:
    class Block(torch.nn.Module):
        def forward(self, x: Tensor, logits: Tensor, w13: Tensor, w2: Tensor) -> Tensor:
            return layer(x, logits, w13, w2)

    tokens = torch.export.Dim("tokens", min=2, max=4096)
    shapes = {"x": {0: tokens}, "logits": {0: tokens}, "w13": None, "w2": None}
    program = torch.export.export(Block(), tuple(drawn(7, False)), dynamic_shapes=shapes)
    for size in (2, 7, 65):
        inputs = drawn(size, False)
        torch.testing.assert_close(program.module()(*inputs), layer(*inputs))


FACTORS = st.one_of(
    st.decimals("0.001", "64", places=3).map(float), st.integers(1, 64), st.floats(1e-9, 1e9, allow_nan=False)
)


@settings(max_examples=300, deadline=None)
@given(factor=FACTORS, tokens=st.integers(0, 2**31), top_k=st.integers(1, 64), experts=st.integers(1, 4096))
def test_a_capacity_is_the_decimal_product_rounded_up(factor: float, tokens: int, top_k: int, experts: int) -> None:
    exact = Fraction(str(factor)) * tokens * top_k / experts
    assert ops.capacity_of(factor, tokens, top_k, experts) == min(tokens, math.ceil(exact))


@pytest.mark.parametrize(("factor", "rows"), [(1.1, 11), (0.7, 7), (2.3, 23), (1.11, 12), (1.0, 10)])
def test_a_factor_is_its_decimals(factor: float, rows: int) -> None:
    """Not its binary value, which is a little more: 1.1 times ten rows are eleven."""
    assert ops.capacity_of(factor, 100, 1, 10) == rows


@pytest.mark.parametrize("factor", [0, -1.25, math.nan, math.inf])
def test_a_factor_that_is_none_is_explained(factor: float) -> None:
    with pytest.raises(UserError, match=r"capacity factor: got .*; allowed: a number above 0") as caught:
        ops.capacity_of(factor, 8, 2, 4)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("layout", ["compact", "padded", "block64", "block128"])
def test_no_tokens_have_a_capacity_of_nothing(layout: str) -> None:
    """As its factor gives it; with tokens it is refused."""
    none = torch.zeros(0, TOP_K, dtype=torch.int32)
    counts, offsets, order, inverse = ops.permute(none, EXPERTS, ops.capacity_of(FACTOR, 0, TOP_K, EXPERTS), layout)
    assert not counts.any() and not offsets.any() and order.shape == (0,) and inverse.shape == (0, TOP_K)
    with pytest.raises(UserError, match="capacity: got 0"):
        ops.permute(torch.zeros(1, TOP_K, dtype=torch.int32), EXPERTS, 0, layout)


def test_a_capacity_may_bound_the_rows_or_not() -> None:
    """So that `dropping` asks for both."""
    bounds = []
    for tokens in SIZES:
        rows = ops.RowLayout(tokens, TOP_K, EXPERTS, ops.capacity_of(0.9, tokens, TOP_K, EXPERTS)).rows
        bounds.append(rows < tokens * TOP_K)
    assert set(bounds) == {True, False}
