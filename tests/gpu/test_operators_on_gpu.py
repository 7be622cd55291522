"""The operators for use in a model, on a GPU: every backend against float64, gradients, a CUDA graph, torch.compile."""

import functools
import importlib.util
import itertools
import sys
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch._dynamo.testing
from torch import Tensor

sys.path.append(str(Path(__file__).parents[1] / "ops"))
import operator_cases
import undefined
from ops_cases import CASES, DTYPES, check, check_feed, check_gate, check_permute, routing

from activations import EVERY
from moe_routing_kernels import ops
from moe_routing_kernels.choices import chooser
from moe_routing_kernels.gate import FUSED
from moe_routing_kernels.ops import backends
from moe_routing_kernels.permute import LAYOUTS
from moe_routing_kernels.routers import ROUTERS

pytestmark = pytest.mark.gpu
if not torch.cuda.is_available():  # as a whole: hundreds of tests need not be collected
    pytest.skip("needs an NVIDIA GPU", allow_module_level=True)
EXAMPLE = Path(__file__).parents[2] / "examples/moe_block.py"
# tokens, hidden, experts, top_k, layout, capacity factor
LARGE = {
    "aligned": (1000, 2880, 64, 8, "block128", None),
    "large_dropped": (3000, 4097, 16, 6, "compact", 0.7),
    "padded": (2048, 2048, 64, 8, "padded", 1.25),
    "few_tokens": (3, 7168, 256, 8, "block64", None),
}
# tokens, experts, top_k, dtype of the logits
CHOICES = {
    "two": (2, 16, 4, torch.bfloat16),
    "odd": (37, 96, 5, torch.float16),
    "many": (5000, 64, 8, torch.float32),
    "many_short": (5000, 64, 8, torch.bfloat16),
    "wide": (513, 256, 8, torch.float32),
    "unsupported": (9, 2048, 8, torch.float32),
}
# rows, hidden, intermediate, experts
NETWORKS = {"many_rows": (2000, 256, 512, 6), "odd": (77, 136, 24, 5), "few_rows": (9, 512, 64, 64)}

PACKAGES = {"cute": "cutlass", "triton": "triton"}  # what a backend needs
REMEMBERED = (chooser.kernel, chooser.way, backends._training)


@pytest.fixture(params=["cute", "triton", "torch"])
def backend(request, monkeypatch) -> str:
    """One backend alone; what it does not support falls to plain torch."""
    if request.param == "cute":
        pytest.importorskip("cutlass")
    monkeypatch.setattr(chooser, "installed", lambda package: package == PACKAGES.get(request.param))
    for remembered in REMEMBERED:
        remembered.cache_clear()
    yield request.param
    for remembered in REMEMBERED:
        remembered.cache_clear()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", [*CASES, *LARGE])
def test_pack_and_combine(name, dtype, backend):
    tokens, hidden, *rest = (CASES | LARGE)[name]
    check(name, dtype, *routing(tokens, *rest, device="cuda"), hidden)


@pytest.mark.parametrize("empty", ["all_dropped", "no_rows", "no_tokens"])
def test_nothing_to_do(empty, backend):
    order, inverse = routing(4, 4, 2, device="cuda")
    dropped, none = torch.full_like(order, -1), torch.full_like(inverse, -1)
    known = {"all_dropped": (dropped, none), "no_rows": (order[:0], none), "no_tokens": (dropped, none[:0])}[empty]
    check(empty, torch.float32, *known, 16)


@pytest.mark.parametrize("size", CHOICES)
@pytest.mark.parametrize("rule", FUSED)
def test_gate(rule, size, backend):
    """Logits are apart by more than rounding, and the low bits in which a kernel may keep the expert, take: no two tie."""
    tokens, experts, top_k, dtype = CHOICES[size]
    torch.manual_seed(17)
    steps = torch.linspace(-4, 4, experts, device="cuda").to(dtype)
    assert len(steps.unique()) == experts
    check_gate(rule, torch.stack([steps[torch.randperm(experts, device="cuda")] for _ in range(tokens)]), top_k)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("rule", FUSED)
def test_gradients_of_gate(rule, dtype, backend):
    """Those of the weights of the experts that the kernel chose, within the dtype's rounding of float64."""
    torch.manual_seed(17)
    logits = torch.randn(300, 64, device="cuda").to(dtype).requires_grad_()
    bias = 0.1 * torch.randn(64, device="cuda") if ROUTERS[rule].bias else None
    ids, weights = ops.gate(logits, 6, rule, bias)
    grad = torch.randn_like(weights)
    (got,) = torch.autograd.grad(weights, logits, grad)
    wide = logits.detach().double().requires_grad_()
    (want,) = torch.autograd.grad(ops.reference.weigh(wide, ids, rule, None), wide, grad.double())
    assert got.dtype == dtype
    assert float((got.double() - want).norm() / want.norm()) < torch.finfo(dtype).eps + 1e-6


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("activation", EVERY)
@pytest.mark.parametrize("size", NETWORKS)
def test_experts(size, activation, dtype, backend):
    """Output and gradients against float64; some experts have no rows, and the last row is of none."""
    rows, hidden, intermediate, experts = NETWORKS[size]
    torch.manual_seed(17)
    cuts = torch.randint(0, rows, (experts - 1,)).sort().values.tolist()
    offsets = torch.tensor([0, *cuts, rows - 1], dtype=torch.int32, device="cuda")
    wide = intermediate * (1 if activation == "relu2" else 2)
    shapes = [(rows, hidden), (experts, wide, hidden), (experts, hidden, intermediate)]
    shapes += [(experts, wide), (experts, hidden)] if activation == "swiglu_oai" else []
    inputs = [torch.randn(s, device="cuda", dtype=dtype) * (s[-1] ** -0.5 if len(s) == 3 else 1) for s in shapes]
    grad = torch.randn(rows - 1, hidden, device="cuda", dtype=dtype)

    def feed(x: Tensor, w13: Tensor, w2: Tensor, *biases: Tensor) -> Tensor:
        return ops.experts(x, offsets, w13, w2, activation, *biases)[: rows - 1]

    got = run(feed, [one.requires_grad_() for one in inputs], grad)
    want = run(feed, [one.detach().double().requires_grad_() for one in inputs], grad.double())
    got[1], want[1] = got[1][: rows - 1], want[1][: rows - 1]
    for one, other in zip(got, want, strict=True):
        assert one.dtype == dtype and other.any()
        assert float((one.double() - other).norm() / other.norm()) < torch.finfo(dtype).eps + 1e-6


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("size", CHOICES)
def test_permute(size, layout, backend):
    """Bit for bit, with ids of no expert, without a capacity and with one that drops."""
    tokens, experts, top_k, _ = CHOICES[size]
    torch.manual_seed(17)
    ids = torch.rand(tokens, experts, device="cuda").topk(top_k).indices.int()
    ids[tokens // 2] = -1
    few = max(1, tokens * top_k // experts)
    for capacity in (few, tokens) if layout == "padded" else (few, None):
        check_permute(ids, experts, capacity, layout)
    check_permute(ids[:0], experts, few, layout)


def test_views_are_taken(backend):
    """Tensors that are neither contiguous nor aligned, on a stream that is not the default one."""
    torch.manual_seed(17)
    flat = torch.randn(20 * 33 + 1, device="cuda", dtype=torch.bfloat16)
    for x in (flat[1:].view(20, 33), flat[:660].view(33, 20).T):
        torch.cuda.synchronize()
        with torch.cuda.stream(torch.cuda.Stream()):
            routed = ops.route(x, x[:, :16].float(), 2)
        torch.cuda.synchronize()
        again = ops.route(x.contiguous().clone(), x[:, :16].float().contiguous(), 2)
        assert all(map(torch.equal, routed, again))


def layer(
    x: Tensor, logits: Tensor, scale: Tensor, rule: str, bias: Tensor | None, capacity: int | None, layout: str
) -> Tensor:
    """An MoE layer whose experts scale rows: route, experts, combine with x as the residual."""
    routed = ops.route(x, logits, 4, rule, bias, capacity, layout)
    y = routed.packed * scale[: len(routed.packed)]
    return ops.combine(y, routed.inverse, routed.topk_weights, residual=x)


def run(function: Callable, inputs: list[Tensor], grad: Tensor, *options) -> list[Tensor]:
    """Output and gradients."""
    output = function(*inputs, *options)
    gradients = torch.autograd.grad(output, inputs, grad)
    return [output.detach(), *gradients]  # an autograd graph that lives on would tie the capture to its stream


@pytest.mark.parametrize(("rule", "layout"), [*zip(FUSED, itertools.cycle(LAYOUTS), strict=False)])
def test_layer_eager_captured_and_compiled(rule, layout):
    """Output and gradients: the same bits in two runs and from a CUDA graph, and within 1 % of float64 compiled whole.

    The captured graph routes new data when its inputs change.
    """
    torch.manual_seed(17)
    capacity = 128 if layout == "padded" else None
    rows = ops.RowLayout(512, 4, 16, capacity, layout).rows
    x = torch.randn(512, 1024, device="cuda", dtype=torch.bfloat16)
    logits, scale = torch.randn(512, 16, device="cuda"), torch.randn(rows, 1024, device="cuda", dtype=torch.bfloat16)
    inputs, grad = [one.requires_grad_() for one in (x, logits, scale)], torch.randn_like(x)
    bias = 0.1 * torch.randn(16, device="cuda") if ROUTERS[rule].bias else None
    options = (rule, bias, capacity, layout)

    want = run(layer, inputs, grad, *options)
    assert all(map(torch.equal, run(layer, inputs, grad, *options), want)), "two runs differ"
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = run(layer, inputs, grad, *options)
    graph.replay()
    assert all(map(torch.equal, captured, want)), "a CUDA graph differs"
    torch.compiler.reset()
    compiled = run(torch.compile(layer, fullgraph=True), inputs, grad, *options)
    wide = [one.detach().double().requires_grad_() for one in inputs]
    exact = run(layer, wide, grad.double(), rule, None if bias is None else bias.double(), capacity, layout)
    for found in (want, compiled):
        for got, right in zip(found, exact, strict=True):
            assert float((got.double() - right).norm() / right.norm()) < 0.01
    with torch.no_grad():
        logits.copy_(torch.randn_like(logits))
    graph.replay()
    assert all(map(torch.equal, captured, run(layer, inputs, grad, *options))), "new logits are routed otherwise"


@pytest.mark.parametrize(
    ("activation", "capacity"), [("swiglu", None), ("geglu", 3), ("relu2", None), ("swiglu_oai", 3)]
)
@pytest.mark.parametrize("name", ["cute", "cute_gather", "triton_gather", "triton", "cute_grouped_mm"])
def test_feed(name, activation, capacity):
    """Every way in which rows reach the experts; where one cannot, rows are packed for what can."""
    check_feed(name, activation, capacity, "cuda")


@pytest.mark.parametrize("phase", [None, "prefill", "decode"])
@pytest.mark.parametrize("tokens", [1, 300])
def test_a_layer_in_inference_never_waits(tokens, phase, backend):
    """Its choice included: no call of CUDA that waits, the same bits from a CUDA graph and compiled whole."""
    torch.manual_seed(17)
    shapes = ((tokens, 256), (tokens, 16), (16, 256, 256), (16, 256, 128))
    x, logits, w13, w2 = (torch.randn(shape, device="cuda").div(8).bfloat16() for shape in shapes)
    feed = functools.partial(ops.layer, top_k=4, residual=x, phase=phase)
    want = feed(x, logits, w13, w2)
    chooser.way.cache_clear()
    torch.cuda.set_sync_debug_mode("error")
    try:
        again = feed(x, logits, w13, w2)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.equal(again, want)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = feed(x, logits, w13, w2)
    graph.replay()
    assert torch.equal(captured, want)
    torch.compiler.reset()
    assert torch.equal(torch.compile(feed, fullgraph=True)(x, logits, w13, w2), want)
    exact = ops.layer(*(one.double() for one in (x, logits, w13, w2)), 4, residual=x.double())
    assert float((want.double() - exact).norm() / exact.norm()) < 0.01


@pytest.mark.parametrize(("activation", "capacity"), [("swiglu", None), ("geglu", 60), ("relu2", None)])
@pytest.mark.parametrize("hidden", [64, 256])
def test_a_layer_in_training(hidden, activation, capacity, backend):
    """Output and gradients: the same bits in two runs and from a CUDA graph, within 1 % of float64, also compiled whole."""
    torch.manual_seed(17)
    wide = 128 * (1 if activation == "relu2" else 2)
    shapes = ((300, hidden), (300, 16), (16, wide, hidden), (16, hidden, 128))
    inputs = [torch.randn(shape, device="cuda").div(shape[-1] ** 0.5).bfloat16() for shape in shapes]
    inputs[1] = torch.randn(300, 16, device="cuda")
    grad = torch.randn(300, hidden, device="cuda").bfloat16()

    def feed(x: Tensor, logits: Tensor, w13: Tensor, w2: Tensor) -> Tensor:
        return ops.layer(x, logits, w13, w2, 4, capacity=capacity, activation=activation, residual=x)

    inputs = [one.requires_grad_() for one in inputs]
    want = run(feed, inputs, grad)
    assert all(map(torch.equal, run(feed, inputs, grad), want)), "two runs differ"
    exact = run(feed, [one.detach().double().requires_grad_() for one in inputs], grad.double())
    torch.compiler.reset()
    compiled = run(torch.compile(feed, fullgraph=True), inputs, grad)
    for found in (want, compiled):
        for got, right in zip(found, exact, strict=True):
            assert float((got.double() - right).norm() / right.norm()) < 0.01
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = run(feed, inputs, grad)
    graph.replay()
    assert all(map(torch.equal, captured, want)), "a CUDA graph differs"


@pytest.mark.parametrize("dtype", operator_cases.DTYPES, ids=str)
@pytest.mark.parametrize("activation", EVERY)
def test_nothing_waits_for_the_gpu(activation, dtype, backend):
    """Inference and training in every format, with biases where the activation has them: no call that waits, and a capture."""
    torch.manual_seed(17)
    wide = 128 * (1 if activation == "relu2" else 2)
    shapes = [(300, 64), (300, 16), (16, wide, 64), (16, 64, 128)]
    shapes += [(16, wide), (16, 64)] if activation == "swiglu_oai" else []
    inputs = [torch.randn(shape, device="cuda").div(shape[-1] ** 0.5).to(dtype).requires_grad_() for shape in shapes]
    grad = torch.randn(300, 64, device="cuda").to(dtype)

    def feed(x: Tensor, logits: Tensor, w13: Tensor, w2: Tensor, *biases: Tensor) -> Tensor:
        b13, b2 = biases or (None, None)
        return ops.layer(x, logits, w13, w2, 4, capacity=60, activation=activation, b13=b13, b2=b2)

    want = run(feed, inputs, grad)
    with torch.no_grad():
        alone = feed(*inputs)
    torch.cuda.set_sync_debug_mode("error")
    try:
        again = run(feed, inputs, grad)
        with torch.no_grad():
            again.append(feed(*inputs))
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert all(map(torch.equal, again, [*want, alone]))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = run(feed, inputs, grad)
        with torch.no_grad():
            captured.append(feed(*inputs))
    graph.replay()
    assert all(map(torch.equal, captured, [*want, alone]))
    exact = run(feed, [one.detach().cpu().double().requires_grad_() for one in inputs], grad.cpu().double())
    if dtype != torch.bfloat16:  # whose logits tie
        for got, right in zip(want, exact, strict=True):
            assert float((got.cpu().double() - right).norm() / right.norm()) < 0.01


@pytest.mark.parametrize("ids", undefined.IDS.values(), ids=undefined.IDS)
@pytest.mark.parametrize("activation", ["swiglu", "swiglu_oai"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_rows_of_no_expert_are_never_read(dtype, activation, ids, backend):
    """Buffers hold NaN where nothing is written; ids are of experts elsewhere, and expert 1 drops."""
    torch.manual_seed(17)
    chosen = torch.tensor(ids, device="cuda")
    shapes = [(len(ids), 64), (len(ids), 2), (4, 256, 64), (4, 64, 128)]
    shapes += [(4, 256), (4, 64)] if activation == "swiglu_oai" else []
    inputs = [torch.randn(shape, device="cuda").div(shape[-1] ** 0.5).to(dtype) for shape in shapes]
    inputs[1] = inputs[1].float()
    inputs, grad = [one.requires_grad_() for one in inputs], torch.randn(len(ids), 64, device="cuda").to(dtype)

    def whole(x: Tensor, weights: Tensor, w13: Tensor, w2: Tensor, *biases: Tensor) -> Tensor:
        return ops.fused_experts(x, chosen.to(x.device), weights, w13, w2, 2, activation, *biases)

    def stages(x: Tensor, weights: Tensor, w13: Tensor, w2: Tensor, *biases: Tensor) -> Tensor:
        _, offsets, order, inverse = ops.permute(chosen.to(x.device), 4, 2)
        y = ops.experts(ops.pack(x, order, inverse), offsets, w13, w2, activation, *biases)
        return ops.combine(y, inverse, weights)

    exact = run(whole, [one.detach().cpu().double().requires_grad_() for one in inputs], grad.cpu().double())
    with undefined.uninitialised():
        for function in (whole, stages):
            for got, right in zip(run(function, inputs, grad), exact, strict=True):
                assert got.isfinite().all() and float((got.cpu().double() - right).norm()) <= 0.01 * float(right.norm())
        with torch.no_grad():
            assert whole(*inputs).isfinite().all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("frozen", [(0,), (2, 3), (1, 2, 3), (0, 2), (0, 1, 3)], ids=str)
def test_frozen_tensors_have_no_part_in_a_backward_pass(frozen, dtype, backend):
    """Gradients of the others are the same bits; and those of frozen weights are not allocated."""
    torch.manual_seed(17)
    shapes = [(64, 256), (64, 16), (16, 2048, 256), (16, 256, 1024)]
    given = [torch.randn(shape, device="cuda").div(shape[-1] ** 0.5).to(dtype) for shape in shapes]

    def step(learns: list[bool]) -> tuple[list[Tensor | None], int]:
        inputs = [one.clone().requires_grad_(of_it) for one, of_it in zip(given, learns, strict=True)]
        output = ops.layer(*inputs, 4)
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        output.backward(torch.ones_like(output))
        return [one.grad for one in inputs], torch.cuda.max_memory_allocated() - before

    whole, _ = step([True] * 4)
    some, most = step([i not in frozen for i in range(4)])
    for i, (one, right) in enumerate(zip(some, whole, strict=True)):
        assert (one is None) == (i in frozen)
        assert one is None or torch.equal(one, right)
    if dtype == torch.bfloat16 and backend == "cute" and {2, 3} <= set(frozen):
        assert most < given[3].nbytes


@pytest.mark.parametrize("training", [False, True], ids=["inference", "training"])
def test_one_graph_serves_any_number_of_tokens(training, backend):
    """With a capacity; the backend that trains keeps what it keeps for any number of rows."""
    graphs = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    torch.compiler.reset()

    def feed(x: Tensor, logits: Tensor, w13: Tensor, w2: Tensor) -> Tensor:
        return ops.layer(x, logits, w13, w2, 4, capacity=ops.capacity_of(1.25, x.shape[0], 4, 16))

    compiled = torch.compile(feed, fullgraph=True, backend=graphs)
    torch.manual_seed(17)
    network = [torch.randn(shape, device="cuda").div(16).bfloat16() for shape in ((16, 256, 256), (16, 256, 128))]
    for tokens in (3, 17, 64, 100, 300):
        inputs = [torch.randn(tokens, width, device="cuda").bfloat16() for width in (256, 16)]
        for one in inputs:
            torch._dynamo.mark_dynamic(one, 0)
        given = [one.detach().clone().requires_grad_(training) for one in (*inputs, *network)]
        for one in given[:2]:
            torch._dynamo.mark_dynamic(one, 0)
        got, want = compiled(*given), feed(*given)
        assert torch.equal(got, want)
        if training:
            grad = torch.randn_like(got)
            for one, right in zip(
                torch.autograd.grad(got, given, grad), torch.autograd.grad(want, given, grad), strict=True
            ):
                assert torch.equal(one, right)
    assert graphs.frame_count == 1


def test_a_copy_is_told_of_but_in_a_capture(monkeypatch):
    monkeypatch.setattr(backends, "_WARNED", set())
    torch.manual_seed(17)
    rows, w13, w2 = (torch.randn(shape, device="cuda").bfloat16() for shape in ((64, 64), (4, 64, 256), (4, 64, 128)))
    offsets = torch.tensor([0, 16, 32, 48, 64], dtype=torch.int32, device="cuda")
    ops.experts(rows, offsets, w13.mT.contiguous(), w2)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with torch.cuda.graph(torch.cuda.CUDAGraph()):
            ops.experts(rows, offsets, w13.mT, w2)
    with pytest.warns(UserWarning, match="ops.experts copies w13"):
        ops.experts(rows, offsets, w13.mT, w2)


def test_the_example_trains_in_bfloat16():
    """The block of the README in eager mode and compiled: the same within 2 %, and every parameter has a gradient."""
    spec = importlib.util.spec_from_file_location("moe_block", EXAMPLE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    torch.manual_seed(17)
    block = module.MoEBlock(256, 128, 16, 4).to("cuda", torch.bfloat16)
    x = torch.randn(300, 256, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    inputs, grad = [x, *block.parameters()], torch.randn_like(x)
    eager = run(lambda *_: block(x), inputs, grad)
    torch.compiler.reset()
    whole = torch.compile(block, fullgraph=True)
    for got, want in zip(run(lambda *_: whole(x), inputs, grad), eager, strict=True):
        assert want.isfinite().all() and want.any()
        assert float((got - want).float().norm() / want.float().norm()) < 0.02


@pytest.mark.parametrize("dtype", operator_cases.DTYPES, ids=str)
@pytest.mark.parametrize("layout", operator_cases.LAYOUTS)
def test_operators_keep_the_rules_of_torch_library(layout, dtype, backend):
    """For every layout of inputs: outputs are contiguous and their storage is new, as fakes have it."""
    named = ("", backends.training(torch.device("cuda")))
    for name, given in operator_cases.cases(layout, dtype, "cuda", tuple(dict.fromkeys(named))):
        operator_cases.check_outputs(name, given)
        operator = getattr(torch.ops.moe_routing_kernels, name.partition("-")[0])
        torch.library.opcheck(operator.default, given, test_utils=("test_schema", "test_faketensor"))
