"""`ops.layer` without gradients of its experts: the operator `feed`, and which kernels it takes on a GPU."""

import pytest
import torch
from torch.library import opcheck

from moe_routing_kernels import choices, ops
from moe_routing_kernels.choices import Entry, Shape, chooser
from moe_routing_kernels.errors import UserError
from moe_routing_kernels.layer import Layer
from moe_routing_kernels.ops import library_experts
from moe_routing_kernels.target import Target

torch.set_num_threads(1)
HOPPER = Target.of("sm_90a")
AHEAD = ("cute", "cute_gather")  # are compiled ahead
SHAPE = Shape(64, 16, 4, 128, 64, "swiglu", "bf16", "bf16", "bf16", None, "sm_90")
NAMES = ("cute", "cute_gather", "triton_gather", "triton", "cute_grouped_mm")


def problem(tokens: int = 64, activation: str = "swiglu", dtype: str = "bf16", capacity: int | None = None) -> Layer:
    return Layer(ops.RowLayout(tokens, 4, 16, capacity), 128, 64, dtype, dtype, dtype, "", activation)


@pytest.fixture
def best(monkeypatch):
    """Plant a table in which an implementation is the best of all in a phase; nothing is remembered."""

    def plant(name: str, phase: str = "prefill") -> None:
        entry = Entry("c", phase, SHAPE, dict.fromkeys(NAMES, 2.0) | {name: 1.0})
        monkeypatch.setattr(choices, "load", lambda: (entry,))
        chooser.way.cache_clear()

    yield plant
    chooser.way.cache_clear()


@pytest.mark.parametrize("name", NAMES)
def test_the_kernels_are_those_of_the_fastest(name, best, monkeypatch) -> None:
    """Among those that are compiled ahead, or among the others where none of these can run."""
    pytest.importorskip("triton")
    pytest.importorskip("cutlass")
    from moe_routing_kernels.experts import cute_experts

    best(name)
    if name not in AHEAD:
        assert getattr(chooser.way(problem(), HOPPER), "name", None) == "cute"
        monkeypatch.setattr(cute_experts, "unsupported", lambda problem, target: "planted")
        chooser.way.cache_clear()
    found = chooser.way(problem(), HOPPER)
    assert found is not None and found.name == name and found.gathers == name.endswith("_gather")
    assert hasattr(found.module, "bind")


def test_what_cannot_run_is_not_chosen(best, monkeypatch) -> None:
    pytest.importorskip("triton")
    pytest.importorskip("cutlass")
    best("cute_gather")
    for asked, name in (
        (problem(), "cute_gather"),
        (problem(activation="swiglu_oai"), "cute_gather"),
        (problem(capacity=8), "cute_gather"),
    ):
        found = chooser.way(asked, HOPPER)
        assert found is not None and found.name == name
    assert chooser.way(problem(dtype="fp32"), HOPPER) is None
    chooser.way.cache_clear()
    monkeypatch.setattr(chooser, "installed", lambda package: False)
    assert chooser.way(problem(), HOPPER) is None


def test_a_phase_is_a_hint(best) -> None:
    """Where nothing was measured in it, the first that can run is chosen."""
    pytest.importorskip("triton")
    pytest.importorskip("cutlass")
    best("cute_gather", "decode")
    found = [chooser.way(problem(), HOPPER, phase) for phase in (None, "decode", "prefill")]
    assert [one and one.name for one in found] == ["cute_gather", "cute_gather", "cute"]


def test_a_choice_is_remembered(best, monkeypatch) -> None:
    """The second call asks neither the table nor a kernel."""
    pytest.importorskip("cutlass")
    best("cute")
    first = chooser.way(problem(), HOPPER)
    monkeypatch.setattr(choices, "load", None)
    monkeypatch.setattr(chooser, "importlib", None)
    assert chooser.way(problem(), HOPPER) is first


def layer(*tensors: torch.Tensor, **options) -> torch.Tensor:
    x, logits, w13, w2 = tensors
    return ops.layer(x, logits, w13, w2, 2, residual=x, **options)


def drawn() -> list[torch.Tensor]:
    """x (7, 16), logits (7, 4), w13 (4, 24, 16), w2 (4, 16, 12)."""
    torch.manual_seed(17)
    return [torch.randn(shape) for shape in ((7, 16), (7, 4), (4, 24, 16), (4, 16, 12))]


def test_with_and_without_gradients_is_the_same(monkeypatch) -> None:
    """Bit for bit in plain torch, compiled whole too; `feed` runs where only the router's scores need a gradient."""
    tensors = drawn()
    want = layer(*(one.clone().requires_grad_() for one in tensors)).detach()
    calls, real = [], library_experts.feed
    monkeypatch.setattr(library_experts, "feed", lambda *given: calls.append(1) or real(*given))
    for phase in (None, "prefill", "decode"):
        assert torch.equal(layer(*tensors, phase=phase), want)
    with torch.no_grad():
        assert torch.equal(layer(*(one.clone().requires_grad_() for one in tensors)), want)
    assert len(calls) == 4
    x, logits, w13, w2 = tensors
    layer(x, logits.requires_grad_(), w13, w2).sum().backward()
    assert len(calls) == 5 and logits.grad is not None and logits.grad.any()
    monkeypatch.undo()
    torch.compiler.reset()
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    with torch.no_grad():
        assert torch.equal(compiled(*tensors, phase="decode"), want)


def test_the_operator_keeps_the_rules_of_torch_library() -> None:
    x, logits, w13, w2 = drawn()
    ids, _ = ops.gate(logits, 2)
    _, offsets, order, inverse = ops.permute(ids, 4, 3)
    opcheck(
        torch.ops.moe_routing_kernels.feed.default,
        (x, order, inverse, offsets, w13, w2, "swiglu", None, None, 3, "decode"),
    )


def test_bad_input_is_explained() -> None:
    x, logits, w13, w2 = drawn()
    for arguments, options, what in (
        ((x, logits, w13, w2), {"phase": "auto"}, "phase: got 'auto'; allowed: prefill, decode"),
        ((x[:6], logits, w13, w2), {}, "x: got"),
        ((x, logits, w13[:, :3], w2), {}, "w13: got"),
        ((x, logits, w13, w2), {"activation": "gelu"}, "activation: got 'gelu'"),
    ):
        with pytest.raises(UserError, match=what):
            ops.layer(*arguments, 2, **options)
