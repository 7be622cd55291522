"""Shared experts of a layer: what they add, in every way to do a layer, and that a layer without them is what it was."""

import math
import sys
from dataclasses import replace
from types import ModuleType

import pytest
import torch

from activations import EVERY
from moe_routing_bench.benches.bench import Implementation
from moe_routing_bench.benches.registry import BENCHES
from moe_routing_bench.benches.shared_experts import definition as shared_experts
from moe_routing_bench.config.expand import cell_of

LAYER = BENCHES["layer"]
SHAPE = {"tokens": 33, "hidden": 40, "intermediate": 24, "experts": 6, "top_k": 2, "dtype": "fp32", "skew": 0.5}
SHARED = SHAPE | {"shared_intermediate": 56}
VECTORS = SHARED | {"dtype": "bf16"}
GATED = {"shared_gate": "sigmoid"}
PEERS = ("transformers_eager", "transformers_batched_mm", "transformers_grouped_mm")


def drawn(cell, seed=3):
    """The inputs of a seed."""
    definition = LAYER.definition()
    return definition.build(cell, seed, "cpu") | definition.shared(cell, seed, "cpu")


def run(name, cell, inputs, bench=LAYER):
    """What an implementation returns in outputs and buffers that held nonsense, and its check."""
    definition = bench.definition()
    outputs = definition.empty_outputs(cell, inputs)
    call = bench.bind(name, cell, inputs | outputs)
    for one in (*call.buffers.values(), *outputs.values()):
        one.fill_(torch.nan if one.is_floating_point() else 0x40)
    written = inputs | outputs | call()
    return written, bench.check(name, cell, inputs, written, definition.reference(cell, inputs))


def one_token(activation, row, up, down, score):
    """A token's shared experts in numbers of Python, sum by sum."""
    dot = lambda a, b: math.fsum(x * y for x, y in zip(a, b, strict=True))  # noqa: E731
    sums = [dot(row, one) for one in up]
    half = len(sums) // 2
    if activation == "relu2":
        inner = [max(one, 0.0) ** 2 for one in sums]
    elif activation == "swiglu":
        inner = [g / (1 + math.exp(-g)) * u for g, u in zip(sums[:half], sums[half:], strict=True)]
    elif activation == "geglu":
        bent = lambda g: math.tanh(math.sqrt(2 / math.pi) * (g + 0.044715 * g**3))  # noqa: E731
        inner = [0.5 * g * (1 + bent(g)) * u for g, u in zip(sums[:half], sums[half:], strict=True)]
    else:
        limit, alpha, shift = (10, 1, 0) if activation == "swiglu_limit10" else (7, 1.702, 1)
        pairs = [(min(g, limit), max(-limit, min(u, limit))) for g, u in zip(sums[:half], sums[half:], strict=True)]
        assert any(abs(u) == limit for _, u in pairs) or activation == "swiglu_oai"  # whose biases they have not
        inner = [g / (1 + math.exp(-alpha * g)) * (u + shift) for g, u in pairs]
    factor = 1 if score is None else 1 / (1 + math.exp(-dot(row, score)))
    return [factor * dot(inner, one) for one in down]


@pytest.mark.parametrize("gate", [{}, GATED], ids=["plain", "gated"])
@pytest.mark.parametrize("activation", EVERY)
def test_the_reference_adds_them_to_every_token(activation, gate):
    """Also to tokens of which no assignment was kept."""
    axes = {"activation": activation, "capacity_factor": 0.3}
    plain, cell = cell_of("layer", **SHAPE | axes), cell_of("layer", **SHARED | axes | gate)
    inputs, definition = drawn(cell), LAYER.definition()
    routed, both = (definition.reference(one, inputs) for one in (plain, cell))
    assert ((routed["inverse"] < 0).all(1)).any()
    numbers = [inputs[name].tolist() for name in ("x", "shared_w13", "shared_w2")]
    score = inputs["shared_gate"].tolist() if gate else None
    wanted = torch.tensor([one_token(activation, row, *numbers[1:], score) for row in numbers[0]], dtype=torch.float64)
    assert torch.allclose(both["combined"] - routed["combined"], wanted, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("gate", [{}, GATED], ids=["plain", "gated"])
@pytest.mark.parametrize("name", ["torch_loop", "torch_bmm", "torch_grouped_mm", "torch_gather_loop", "auto", *PEERS])
def test_every_way_is_right(name, gate):
    """In full precision where it can, to a few roundings; what its stages hand on is right as well."""
    if name in PEERS:
        pytest.importorskip("transformers")
    axes = (
        (VECTORS if name == "torch_grouped_mm" else SHARED)
        | ({"capacity_factor": 1.25} if name == "torch_bmm" else {})
        | gate
    )
    cell = cell_of("layer", **axes)
    assert LAYER.supports(name, cell) is None
    inputs = drawn(cell)
    written, found = run(name, cell, inputs)
    assert found.error is None and 0 < found.rel_l2_error < found.tolerance
    assert LAYER.check_stages(name, cell, written).error is None


def residual_alone(problem, *, combined, residual, **_):
    """A way to do a layer as one piece that leaves out the routed experts."""
    return lambda: combined.copy_(residual)


def test_a_layer_in_one_piece_is_given_their_result(monkeypatch):
    """They have run before it: what is missing from this one's answer is what the routed experts make."""
    module = ModuleType("peer")
    module.bind = residual_alone
    monkeypatch.setitem(sys.modules, "moe_routing_kernels.layer.peer", module)
    peer = Implementation("peer", layout="compact", parts={"permute+pack+experts+combine": "layer.peer"})
    bench = replace(LAYER, implementations=(*LAYER.implementations, peer))
    cell = cell_of("layer", **SHARED)
    inputs = drawn(cell)
    written, found = run("peer", cell, inputs, bench)
    routed = bench.definition().reference(cell_of("layer", **SHAPE), inputs)["combined"]
    both = bench.definition().reference(cell, inputs)["combined"]
    assert "out of bounds" in found.error
    assert torch.allclose(written["combined"].double() + routed, both, atol=1e-5)


def test_their_stage_is_there_only_where_they_are():
    plain, cell = cell_of("layer", **SHAPE), cell_of("layer", **SHARED)
    inputs = drawn(cell)
    stages = {
        one.key: [
            part
            for part, _ in LAYER.bind("torch_loop", one, inputs | LAYER.definition().empty_outputs(one, inputs)).stages
        ]
        for one in (plain, cell)
    }
    assert stages[plain.key] == [stage.name for stage in LAYER.stages]
    assert stages[cell.key] == ["shared", *stages[plain.key]]
    assert drawn(plain).keys() == inputs.keys() - {"shared_w13", "shared_w2"}
    assert drawn(cell_of("layer", **SHARED | GATED)).keys() == inputs.keys() | {"shared_gate"}
    for name, one in drawn(plain).items():
        assert torch.equal(one, inputs[name]), "a cell has the same tokens and routed experts with and without them"


def test_they_are_no_copy_of_a_routed_expert():
    """Both have one shape here; drawn by one seed they would be one network, and could stand in for each other."""
    inputs = drawn(cell_of("layer", **SHAPE | {"shared_intermediate": SHAPE["intermediate"]}))
    assert inputs["shared_w13"].shape == inputs["w13"][0].shape
    assert not any(torch.equal(inputs["shared_w13"], one) for one in inputs["w13"])


@pytest.mark.parametrize("fault", ["none of them", "gate and up exchanged", "no gate", "an element"])
def test_faults_are_found(fault):
    cell = cell_of("layer", **VECTORS | GATED)
    inputs, definition = drawn(cell), LAYER.definition()
    expected = definition.reference(cell, inputs)
    wrong = {
        "none of them": lambda: definition.reference(cell_of("layer", **SHAPE | {"dtype": "bf16"}), inputs),
        "gate and up exchanged": lambda: definition.reference(
            cell, inputs | {"shared_w13": inputs["shared_w13"].roll(56, dims=0)}
        ),
        "no gate": lambda: definition.reference(cell_of("layer", **VECTORS), inputs),
        "an element": lambda: {"combined": expected["combined"] + torch.eye(33, 40)},
    }[fault]()["combined"]
    assert definition.check(cell, inputs, {"combined": expected["combined"].bfloat16()}, expected).error is None
    assert definition.check(cell, inputs, {"combined": wrong.bfloat16()}, expected).error


@pytest.mark.parametrize(
    ("tensor", "blamed"), [("residual", "shared: residual"), ("combined", "combined"), ("y", "experts: y")]
)
def test_a_wrong_stage_is_named(tensor, blamed):
    cell = cell_of("layer", **SHARED)
    inputs = drawn(cell)
    written, _ = run("torch_loop", cell, inputs)
    damaged = written | {tensor: written[tensor] * 1.01}
    assert LAYER.check_stages("torch_loop", cell, damaged).error.startswith(blamed)


@pytest.mark.parametrize("gate", [{}, GATED], ids=["plain", "gated"])
@pytest.mark.parametrize(("activation", "products"), [("swiglu", 6), ("relu2", 4)])
def test_their_cost_is_added(activation, products, gate):
    """T tokens times H times J, the weights once; the score's product is among the operations but is no product to time."""
    plain, cell = (cell_of("layer", **axes | {"activation": activation}) for axes in (SHAPE, SHARED | gate))
    inputs, definition = drawn(cell), LAYER.definition()
    expected = definition.reference(cell, inputs)
    alone, both = (definition.cost(one, inputs, expected, expected) for one in (plain, cell))
    score = bool(gate) * 40
    assert both.flops - alone.flops == products * 33 * 40 * 56 + 2 * 33 * score
    assert both.read_bytes - alone.read_bytes == (products // 2 * 40 * 56 + score) * 4
    assert both.write_bytes == alone.write_bytes
    wide = (products - 2) // 2 * 56
    assert both.products == (*alone.products, (33, 40, wide), (33, 56, 40))


def test_tokens_that_no_routed_expert_has_are_read_for_shared_ones():
    plain, cell = (cell_of("layer", **axes, capacity_factor=0.3) for axes in (SHAPE, SHARED))
    inputs, definition = drawn(cell), LAYER.definition()
    expected = definition.reference(cell, inputs)
    alone, both = (definition.cost(one, inputs, expected, expected).read_bytes for one in (plain, cell))
    lost = int((expected["inverse"] < 0).all(1).sum())
    assert lost and both - alone == (lost * 40 + 3 * 40 * 56) * 4


@pytest.mark.parametrize("weights", ["plain", "int4_g32"])
def test_their_roundings(weights):
    """Five of swiglu and none of weights, which are never quantised; a gate adds three; in float32 the sums of all products, of their width."""
    for dtype, sums, score in (("bf16", 0, 0), ("fp32", 2 * (40 + 56), 2 * 40)):
        axes = SHARED | {"dtype": dtype, "weights": dtype if weights == "plain" else weights}
        found = [shared_experts.roundings(cell_of("layer", **axes | gate)) for gate in ({}, GATED)]
        assert found == [5 + sums, 5 + sums + 3 + score]


@pytest.mark.parametrize("name", ["torch_grouped_mm", "cute", "cute_gather", "sonicmoe", "auto"])
def test_formats_that_torch_cannot_multiply_are_refused(name):
    """By the stage, and by `auto` in other words, whatever does the routed experts."""
    cell = cell_of("layer", **VECTORS | {"weights": "fp16"})
    reason = LAYER.supports(name, cell)
    assert reason.startswith("none of" if name == "auto" else "shared: activations and weights need one format")


def test_what_a_way_cannot_do_without_them_it_cannot_do_with_them():
    for axes in ({"capacity_factor": 1.25}, {"intermediate": 20}, {"activation": "swiglu_oai"}, {"packed": "fp8_row"}):
        for one in LAYER.implementations:
            if one.name != "auto":
                plain, cell = (cell_of("layer", **shape | axes) for shape in (SHAPE | {"dtype": "bf16"}, VECTORS))
                assert LAYER.supports(one.name, cell) == LAYER.supports(one.name, plain)


def test_their_code_is_code_of_the_layer():
    names = {path.name for path in LAYER.code_files() if "shared_experts" in path.parts}
    assert names == {"__init__.py", "definition.py", "torch_shared.py"}
    assert not any("shared_experts" in path.parts for path in BENCHES["experts"].code_files())
