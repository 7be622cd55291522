"""What needs no gradient costs nothing: it is not computed, not allocated, and nothing is kept for it."""

import functools
import itertools
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from moe_routing_kernels import ops
from moe_routing_kernels.experts import Experts
from moe_routing_kernels.ops import backends, cuda, library, library_experts, reference
from moe_routing_kernels.target import Target

torch.set_num_threads(1)
# All different, so that a shape tells what a tensor is.
TOKENS, TOP_K, EXPERTS, HIDDEN, INTERMEDIATE = 5, 2, 3, 16, 24
ROWS = TOKENS * TOP_K
SUMS, W13, W2 = (ROWS, 2 * INTERMEDIATE), (EXPERTS, 2 * INTERMEDIATE, HIDDEN), (EXPERTS, HIDDEN, INTERMEDIATE)
OFFSETS = torch.tensor([0, 4, 4, 9], dtype=torch.int32)


class Shapes(TorchDispatchMode):
    """Shapes of all that torch makes, and how many matrix products it runs."""

    def __init__(self) -> None:
        super().__init__()
        self.made: set[tuple[int, ...]] = set()
        self.products = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        self.products += func.overloadpacket in (torch.ops.aten.mm, torch.ops.aten._grouped_mm)
        views = func.is_view or func.name().startswith("aten::_reshape_alias")
        self.made |= {tuple(result.shape)} if isinstance(result, Tensor) and not views else set()
        return result


def subsets(count: int) -> list[tuple[bool, ...]]:
    return list(itertools.product([True, False], repeat=count))


def written(wanted: tuple[bool, ...]) -> str:
    return "".join(str(int(of_it)) for of_it in wanted)


def drawn(biased: bool = False, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    torch.manual_seed(17)
    shapes = {"x": (TOKENS, HIDDEN), "weights": (TOKENS, TOP_K), "w13": W13, "w2": W2}
    shapes |= {"b13": W13[:2], "b2": W2[:2]} if biased else {}
    return {
        name: torch.randn(shape).to(torch.float32 if name == "weights" else dtype) for name, shape in shapes.items()
    }


IDS = torch.tensor([[0, 2], [2, 0], [0, 2], [2, 0], [0, 2]])


def layer(x: Tensor, weights: Tensor, w13: Tensor, w2: Tensor, b13: Tensor | None = None, b2: Tensor | None = None):
    activation = "swiglu" if b13 is None else "swiglu_oai"
    return ops.fused_experts(x, IDS, weights, w13, w2, None, activation, b13, b2)


def experts(x: Tensor, weights: Tensor, w13: Tensor, w2: Tensor, b13: Tensor | None = None, b2: Tensor | None = None):
    rows = torch.cat([x, weights.sum() * x])
    y = ops.experts(rows, OFFSETS, w13, w2, "swiglu" if b13 is None else "swiglu_oai", b13, b2)
    return y[: OFFSETS[-1]]


def gradients(
    function: Callable[..., Tensor], tensors: dict[str, Tensor], wanted: tuple[bool, ...]
) -> list[Tensor | None]:
    given = [
        entry.detach().clone().requires_grad_(of_it) for entry, of_it in zip(tensors.values(), wanted, strict=True)
    ]
    output = function(*given)
    torch.manual_seed(18)
    output.backward(torch.randn(output.shape).to(output.dtype))
    return [entry.grad for entry in given]


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[list[bool]]:
    """What backward operators of experts are asked for."""
    flags: list[list[bool]] = []
    for module, name in ((library_experts, "experts_backward"), (library_experts, "layer_backward")):
        whole = getattr(module, name)
        spy = functools.partial(lambda whole, *given: flags.append(list(given[-1])) or whole(*given), whole)
        monkeypatch.setattr(module, name, spy)
    return flags


@pytest.mark.parametrize("backend", ["", "cute 9.0"], ids=["recomputed", "kept"])
@pytest.mark.parametrize("wanted", [entry for entry in subsets(4) if any(entry)], ids=written)
@pytest.mark.parametrize("function", [layer, experts])
def test_every_subset_of_gradients(function, wanted, backend, monkeypatch, asked) -> None:
    """The same numbers as all of them have, and the backward operator is asked for no other."""
    pytest.importorskip("cutlass")
    monkeypatch.setattr(backends, "training", lambda device: backend)
    tensors = drawn(dtype=torch.bfloat16)
    want = gradients(function, tensors, (True,) * 4)
    asked.clear()
    for got, right, of_it in zip(gradients(function, tensors, wanted), want, wanted, strict=True):
        assert (got is not None) == of_it
        if got is not None:
            torch.testing.assert_close(got, right, rtol=0.02, atol=0.02 * float(right.abs().max()))
    of_x, of_weights, of_w13, of_w2 = wanted
    if function is experts:
        assert asked == [[of_x or of_weights, of_w13, of_w2, False, False]]
    elif not (of_x or of_w13 or of_w2):
        assert asked == []
    else:
        assert asked == [[of_x, of_weights, of_w13, of_w2] if backend else [of_x, of_w13, of_w2, False, False]]


@pytest.mark.parametrize("wanted", [entry for entry in subsets(6) if any(entry)], ids=written)
def test_biases_too(wanted, asked) -> None:
    tensors = drawn(biased=True)
    want = gradients(layer, tensors, (True,) * 6)
    asked.clear()
    for got, right, of_it in zip(gradients(layer, tensors, wanted), want, wanted, strict=True):
        assert (got is not None) == of_it
        if got is not None:
            torch.testing.assert_close(got, right)
    learns = [wanted[i] for i in (0, 2, 3, 4, 5)]
    assert asked == ([learns] if any(learns) else [])


@pytest.mark.parametrize("wanted", subsets(5), ids=written)
def test_the_reference_computes_no_other(wanted) -> None:
    """Each expert with rows has a product for the sums, one through w2, and one for each of rows, w13 and w2."""
    tensors = drawn(biased=True)
    grad, rows = torch.randn(ROWS, HIDDEN), torch.randn(ROWS, HIDDEN)
    network = [tensors[name] for name in ("w13", "w2", "b13", "b2")]
    given = (OFFSETS, *network[:2], "swiglu_oai", *network[2:])
    of_rows, of_w13, of_w2, of_b13, of_b2 = wanted
    through = of_rows or of_w13 or of_b13
    for sums in (None, torch.randn(SUMS)):
        with Shapes() as shapes:
            outcome = reference.experts_backward(grad, rows, *given, sums, wanted)
        assert [entry is not None for entry in outcome] == list(wanted)
        products = (sums is None and (through or of_w2)) + through + of_rows + of_w13 + of_w2
        assert shapes.products == 2 * products
        for shape, of_it in ((W13, of_w13), (W2, of_w2), (W13[:2], of_b13), (W2[:2], of_b2), ((ROWS, HIDDEN), of_rows)):
            assert (shape in shapes.made) == of_it, shape


@pytest.mark.parametrize("wanted", subsets(5), ids=written)
def test_grouped_products_are_those_that_are_needed(wanted, monkeypatch) -> None:
    """What runs on CUDA without kernels of ours: one for each gradient, one for the sums, and one through w2."""
    tensors = drawn(biased=True, dtype=torch.bfloat16)
    grad, rows = torch.randn(2, ROWS, HIDDEN).bfloat16()
    network = [tensors[name] for name in ("w13", "w2", "b13", "b2")]
    products, real = [], cuda.grouped_mm
    monkeypatch.setattr(backends, "target", lambda device: Target.of("sm_90a"))
    monkeypatch.setattr(cuda, "grouped_mm", lambda *given, **options: products.append(1) or real(*given, **options))
    outcome = cuda.experts_backward(grad, rows, OFFSETS, *network[:2], "swiglu_oai", *network[2:], None, wanted)
    of_rows, of_w13, of_w2, of_b13, _ = wanted
    through = of_rows or of_w13 or of_b13
    assert [entry is not None for entry in outcome] == list(wanted)
    assert len(products) == sum(wanted) + through + (through or of_w2)


@pytest.mark.parametrize("weighted", [True, False], ids=["weighted", "plain"])
@pytest.mark.parametrize("wanted", subsets(4), ids=written)
def test_kernels_are_those_that_are_needed(wanted, weighted, monkeypatch) -> None:
    """No other is launched, and its result is not allocated; rows are not read but for w13."""
    cute_training = pytest.importorskip("moe_routing_kernels.experts.cute_training")
    launched = []
    names = ("d_preact", "d_rows", "d_w13", "d_w2")
    kernels = {name: lambda *given, name=name: launched.append((name, given)) for name in names}
    monkeypatch.setattr(cute_training, "launches", lambda problem, device, weighted: kernels)
    problem = Experts(ROWS, HIDDEN, INTERMEDIATE, EXPERTS, "bf16", "bf16", "bf16")
    tensors = drawn(dtype=torch.bfloat16)
    grad, sums = torch.randn(ROWS, HIDDEN).bfloat16(), torch.randn(SUMS).bfloat16()
    of_rows, of_w13, of_w2, of_scales = wanted
    rows, scales = torch.randn(ROWS, HIDDEN).bfloat16() if of_w13 else None, torch.rand(ROWS) if weighted else None
    with Shapes() as shapes:
        given = (grad, rows, OFFSETS, tensors["w13"], tensors["w2"], sums, scales)
        outcome = cute_training.backward(problem, *given, wanted=wanted)
    assert [entry is not None for entry in outcome] == [of_rows, of_w13, of_w2, of_scales and weighted]
    needed = {"d_preact": any(wanted), "d_w2": of_w2, "d_rows": of_rows, "d_w13": of_w13}
    assert [name for name, _ in launched] == [name for name, of_it in needed.items() if of_it]
    for shape, of_it in ((W13, of_w13), (W2, of_w2), ((ROWS, HIDDEN), of_rows), (SUMS, any(wanted))):
        assert (shape in shapes.made) == of_it, shape


@pytest.mark.parametrize(
    ("wanted", "kept"),
    [("1000", {SUMS}), ("1100", {SUMS}), ("0010", {SUMS, "rows"}), ("0001", {SUMS}), ("1111", {SUMS, "rows"})],
)
def test_rows_are_kept_for_w13_alone(wanted, kept, monkeypatch) -> None:
    """Where kernels keep the sums; the largest tensors beside the weights."""
    pytest.importorskip("cutlass")
    monkeypatch.setattr(backends, "training", lambda device: "cute 9.0")
    flags, tensors = [of_it == "1" for of_it in wanted], drawn(dtype=torch.bfloat16)
    given = [entry.requires_grad_(of_it) for entry, of_it in zip(tensors.values(), flags, strict=True)]
    for function in (layer, experts):
        saved: set = set()
        with torch.autograd.graph.saved_tensors_hooks(
            lambda t, saved=saved: saved.add(tuple(t.shape)) or t, lambda t: t
        ):
            function(*given)
        outcome = {"rows" if shape == (ROWS, HIDDEN) else shape for shape in saved} & {SUMS, "rows"}
        assert outcome == kept, function


@pytest.mark.parametrize(("wanted", "kept"), [("1000", 1), ("1100", 2), ("0011", 1), ("1111", 2)])
def test_expert_rows_are_kept_for_the_weights_of_tokens_alone(wanted: str, kept: int) -> None:
    """Where sums are computed again: packed rows always, y where it is read."""
    given = [tensor.requires_grad_(of_it == "1") for tensor, of_it in zip(drawn().values(), wanted, strict=True)]
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(tuple(t.shape)) or t, lambda t: t):
        layer(*given)
    assert saved.count((ROWS, HIDDEN)) == kept


@pytest.mark.parametrize("function", [layer, experts])
def test_no_zeros_stand_for_gradients_of_what_is_kept(function, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("cutlass")
    monkeypatch.setattr(backends, "training", lambda device: "cute 9.0")
    output = function(*(tensor.requires_grad_() for tensor in drawn(dtype=torch.bfloat16).values()))
    grad = torch.ones_like(output)
    with Shapes() as shapes:
        output.backward(grad)
    assert shapes.made and SUMS not in shapes.made


@pytest.mark.parametrize("learns", ["y", "weights", "residual"])
def test_combine_computes_what_is_asked(learns: str, monkeypatch) -> None:
    """The residual's gradient is what comes in, for which nothing runs."""
    calls, whole = [], library.combine_backward
    monkeypatch.setattr(library, "combine_backward", lambda *given: calls.append(given) or whole(*given))
    inverse = torch.arange(ROWS, dtype=torch.int32).view(TOKENS, TOP_K)
    given = {
        "y": torch.randn(ROWS, HIDDEN),
        "weights": torch.rand(TOKENS, TOP_K),
        "residual": torch.randn(TOKENS, HIDDEN),
    }
    given[learns].requires_grad_()
    ops.combine(given["y"], inverse, given["weights"], given["residual"]).sum().backward()
    asked = [(y is not None, rows is not None) for _, y, _, _, rows in calls]
    assert asked == {"y": [(False, True)], "weights": [(True, False)], "residual": []}[learns]
    assert [name for name, entry in given.items() if entry.grad is not None] == [learns]
