"""Composites: stages wired by the names of their tensors, fused stages, outputs that a stage allocates itself."""

import contextlib
import sys
from dataclasses import replace
from types import ModuleType

import pytest
import torch

from activations import EVERY
from moe_routing_bench.benches import composite
from moe_routing_bench.benches.bench import Bench, Implementation, Stage
from moe_routing_bench.benches.experts import WEIGHTS
from moe_routing_bench.benches.registry import BENCHES
from moe_routing_bench.config.expand import cell_of
from moe_routing_kernels.errors import NoForm
from moe_routing_kernels.target import Target

SHAPE = {"tokens": 33, "hidden": 40, "intermediate": 24, "experts": 6, "top_k": 2, "dtype": "fp32", "skew": 0.5}
ROUTED = {
    name: SHAPE[name] for name in ("tokens", "hidden", "experts", "top_k", "dtype")
}  # what a layer is without its experts
PLAIN = ("torch_loop", "torch_bmm", "torch_gather_loop")


def checked(bench: Bench, name: str, cell, calls: int = 1):
    """The outcome of an implementation's last call, its outputs poisoned before each."""
    definition = bench.definition()
    inputs = definition.build(cell, 3, "cpu") | (definition.shared(cell, 3, "cpu") if bench.shared else {})
    outputs = definition.empty_outputs(cell, inputs)
    call = bench.bind(name, cell, inputs | outputs)
    for _ in range(calls):
        outputs["combined"].fill_(torch.nan)
        call()
    return definition.check(cell, inputs, outputs, definition.reference(cell, inputs)), call


@pytest.mark.parametrize("activation", EVERY)
@pytest.mark.parametrize("name", ["torch_loop", "torch_bmm", "torch_gather_loop"])
def test_a_layer_has_the_activation_that_is_asked_for(name, activation):
    cell = cell_of("layer", **SHAPE, activation=activation, capacity_factor=1.25)
    found, _ = checked(BENCHES["layer"], name, cell)
    assert found.error is None
    other, _ = checked(BENCHES["layer"], name, cell.but(activation="geglu" if activation == "swiglu" else "swiglu"))
    assert other.error is None and other.rel_l2_error != found.rel_l2_error


WHOLE = "permute+pack+experts+combine: "
VECTORS = SHAPE | {"dtype": "bf16"}


@pytest.mark.parametrize(
    ("name", "axes", "why"),
    [
        ("sonicmoe", {}, None),
        ("sonicmoe", {"activation": "geglu"}, None),
        ("sonicmoe", {"capacity_factor": 1.25}, WHOLE + "SonicMoE has no capacity limit"),
        ("sonicmoe", {"activation": "relu2"}, WHOLE + "SonicMoE has no relu2"),
        (
            "sonicmoe",
            {"dtype": "fp32"},
            WHOLE + "SonicMoE takes tokens, rows and weights of one format (bf16, fp16), not fp32, fp32 and fp32",
        ),
        (
            "sonicmoe",
            {"intermediate": 20},
            WHOLE + "SonicMoE needs hidden and intermediate that are multiples of 8 (16 bytes)",
        ),
        ("liger", {"intermediate": 20}, None),
        ("liger", {"activation": "geglu"}, WHOLE + "Liger has no geglu"),
        (
            "liger",
            {"packed": "fp8_row"},
            WHOLE + "Liger takes tokens, rows and weights of one format (bf16, fp16), not bf16, fp8_row and bf16",
        ),
        ("moe_ops", {"activation": "relu2", "experts": 8}, None),
        ("moe_ops", {"activation": "swiglu_oai"}, WHOLE + "moe-ops has no swiglu_oai"),
        ("moe_ops", {"experts": 6}, WHOLE + "moe-ops counts rows by experts whose number is a power of two, not 6"),
        ("moe_ops", {"hidden": 20}, WHOLE + "moe-ops needs hidden and intermediate that are multiples of 8 (16 bytes)"),
        ("cute_quack_gather", {"activation": "relu2", "capacity_factor": 1.25}, None),
        ("cute_quack_gather", {"packed": "fp8_row"}, "pack+experts: rows that are never packed cannot be fp8_row"),
        ("cute_quack_gather", {"activation": "swiglu_oai"}, "pack+experts: QuACK has no swiglu_oai with a clamp"),
        ("cute_quack_gather", {"dtype": "fp32"}, "pack+experts: takes bf16 and fp16 rows, not fp32"),
        (
            "cute_quack",
            {"hidden": 20},
            "experts: QuACK needs hidden and intermediate that are multiples of 8 (16 bytes)",
        ),
        (
            "cute_quack",
            {"weights": "fp16"},
            "experts: activations and weights need one plain format, not bf16 and fp16",
        ),
        ("triton_gather", {"activation": "swiglu_oai"}, None),
    ],
)
def test_what_peers_cannot_do(name, axes, why):
    """Said before their packages are imported, which are not installed here."""
    assert BENCHES["layer"].supports(name, cell_of("layer", **VECTORS | axes)) == why


SMALL = "needs 2 experts, and hidden and intermediate of 16, at least: tensor maps have no dimensions of 1"


@pytest.mark.parametrize(
    ("axes", "why"),
    [
        ({"activation": "relu2", "capacity_factor": 1.25}, None),
        ({"hidden": 16, "intermediate": 16, "experts": 2, "top_k": 1}, None),
        ({"experts": 1024, "layout": "block64"}, None),
        ({"experts": 1025}, "takes at most 1024 experts"),
        ({"experts": 1, "top_k": 1, "skew": 0.0}, SMALL),
        ({"hidden": 8}, SMALL),
        ({"intermediate": 8}, SMALL),
        ({"hidden": 20}, "the kernel needs hidden and intermediate that are multiples of 8 (16 bytes)"),
        ({"intermediate": 20}, "the kernel needs hidden and intermediate that are multiples of 8 (16 bytes)"),
        ({"activation": "swiglu_oai"}, None),
        ({"packed": "fp8_row"}, "takes bf16 and fp16 rows, not fp8_row"),
        ({"dtype": "fp32"}, "takes bf16 and fp16 rows, not fp32"),
        ({"weights": "fp16"}, "activations and weights need one plain format, not bf16 and fp16"),
    ],
)
def test_what_the_cute_experts_cannot_do(axes, why):
    pytest.importorskip("cutlass")
    assert BENCHES["experts"].supports("cute", cell_of("experts", **VECTORS | axes)) == why


@pytest.mark.parametrize(
    ("axes", "why"),
    [
        ({"activation": "relu2", "capacity_factor": 1.25}, None),
        ({"packed": "fp8_row"}, "rows that are never packed cannot be fp8_row"),
        ({"hidden": 20}, "the kernel needs hidden and intermediate that are multiples of 8 (16 bytes)"),
        ({"activation": "swiglu_oai"}, None),
    ],
)
def test_what_the_cute_gather_cannot_do(axes, why):
    pytest.importorskip("cutlass")
    assert BENCHES["layer"].supports("cute_gather", cell_of("layer", **VECTORS | axes)) == (
        why and f"pack+experts: {why}"
    )


@pytest.mark.parametrize("factor", [0.75, 1.25])
@pytest.mark.parametrize("packed", ["fp32", "fp8_row", "fp8_block128"])
@pytest.mark.parametrize("name", PLAIN)
def test_a_layer_is_right_whatever_rows_are_made_of(name, packed, factor):
    """Rows of experts that are quantised on the way reach the experts with their scales, dropped ones reach none."""
    cell = cell_of("layer", **SHAPE, packed=packed, capacity_factor=factor)
    if reason := BENCHES["layer"].supports(name, cell):
        assert name == "torch_gather_loop" and packed != "fp32" and "never packed" in reason
        return
    found, call = checked(BENCHES["layer"], name, cell)
    assert found.error is None
    fused = "pack+experts" in dict(call.stages)
    assert fused == (name == "torch_gather_loop") and len(call.stages) == (4 if fused else 5)


def test_quantised_rows_cost_precision():
    """The check of a layer with fp8 rows would not accept unquantised ones, nor the other way round."""
    plain, quantised = (cell_of("layer", **SHAPE, packed=packed) for packed in ("fp32", "fp8_row"))
    definition = BENCHES["layer"].definition()
    inputs = definition.build(plain, 3, "cpu") | definition.shared(plain, 3, "cpu")
    answers = [definition.reference(cell, inputs) for cell in (plain, quantised)]
    assert definition.check(plain, inputs, {"combined": answers[1]["combined"].float()}, answers[0]).error


@pytest.mark.parametrize("name", [name for name, bench in BENCHES.items() if bench.stages])
def test_a_composite_depends_on_all_that_its_stages_depend_on(name):
    known = set(BENCHES[name].modules())
    for stage in BENCHES[name].stages:
        assert set(BENCHES[stage.bench].modules()) <= known, stage.name


def test_outputs_that_a_stage_allocates_reach_the_next_one():
    """grouped_mm returns a new tensor in every call, and combine reads that one."""
    cell = cell_of("layer", **SHAPE | {"hidden": 64, "intermediate": 32, "dtype": "bf16"})
    found, call = checked(BENCHES["layer"], "torch_grouped_mm", cell, calls=3)
    assert found.error is None
    stages = dict(call.stages)
    stages["experts"].scope.tensors["y"] = torch.zeros_like(stages["experts"].scope.tensors["y"])
    stages["combine"]()  # bound to what is gone
    call()
    assert stages["combine"].pointers == [
        stages["combine"].scope.tensors[name].data_ptr() for name in ("y", "inverse", "topk_weights")
    ]


def test_a_fused_part_that_is_bound_again_is_given_what_it_was_given_at_first(monkeypatch):
    """vLLM's gate returns new tensors in every call, and its fused permute and pack returns an order that it does not take."""
    bound = []

    def bind(problem, *, topk_ids, x, inverse, packed):
        bound.append(topk_ids)
        definition, cell = BENCHES["permute"].definition(), cell_of("permute", **SHAPE)

        def call():
            found = definition.reference(cell, {"topk_ids": topk_ids})
            inverse.copy_(found["inverse"])
            packed.copy_(x[found["order"] // topk_ids.shape[1]])
            return {"order": found["order"]}

        return call

    module = ModuleType("peer")
    module.bind = bind
    monkeypatch.setitem(sys.modules, "moe_routing_kernels.routing.peer", module)
    routing = BENCHES["routing"]
    bench = replace(
        routing,
        implementations=(
            *routing.implementations,
            Implementation("peer", layout="compact", parts={"permute+pack": "routing.peer"}),
        ),
    )
    cell, definition = cell_of("routing", **SHAPE), routing.definition()
    inputs = definition.build(cell, 3, "cpu")
    outputs = definition.empty_outputs(cell, inputs)
    call = bench.bind("peer", cell, inputs | outputs)
    first = call()["combined"].clone()
    call.scope.tensors["topk_ids"] = call.scope.tensors["topk_ids"].clone()  # as a gate does that returns its own
    call.scope.version += 1
    outputs["combined"].fill_(torch.nan)
    assert call()["combined"].equal(first) and len(bound) == 2 and bound[0] is not bound[1]


def whole_layer(problem, *, logits, x, w13, w2, combined, bias=None):
    """All five stages by the definition, in one call: what a peer's whole layer would be."""
    definition, cell = BENCHES["layer"].definition(), cell_of("layer", **SHAPE)

    def call():
        inputs = {"logits": logits, "x": x, "w13": w13, "w2": w2}
        combined.copy_(definition.reference(cell, inputs)["combined"])

    return call


def test_one_part_may_cover_every_stage(monkeypatch):
    """It is given what the layer is given, no buffer in between is allocated, and the stage share has one entry."""
    module = ModuleType("peer")
    module.bind, module.unsupported = whole_layer, lambda problem: None
    monkeypatch.setitem(sys.modules, "moe_routing_kernels.layer.peer", module)
    name = "router+permute+pack+experts+combine"
    bench = replace(
        BENCHES["layer"],
        implementations=(
            *BENCHES["layer"].implementations,
            Implementation("peer", layout="compact", parts={name: "layer.peer"}),
        ),
    )
    found, call = checked(bench, "peer", cell_of("layer", **SHAPE))
    assert found.error is None and [stage for stage, _ in call.stages] == [name]
    (part,) = composite.parts(bench, bench["peer"])
    assert set(part.reads()) == {"logits", "bias", "x", *WEIGHTS, "residual"}
    assert set(call.stages[0][1].scope.tensors) >= {"logits", "x", "combined"}
    assert "packed" not in call.stages[0][1].scope.tensors


def test_a_part_that_cannot_run_says_which():
    cell = cell_of("layer", **SHAPE)
    assert BENCHES["layer"].supports("torch_grouped_mm", cell).startswith("experts: torch.nn.functional.grouped_mm")
    assert BENCHES["layer"].supports("torch_bmm", cell) == "padded rows need a capacity factor"


@pytest.mark.parametrize("parts", [{"packs": "torch"}, {"pack+experts": "a.b", "pack": "torch"}])
def test_parts_that_are_no_stages_or_overlap_are_refused(parts):
    with pytest.raises(ValueError, match="has parts"):
        Bench(
            *("name", "summary", ("tokens",), "one"),
            implementations=(Implementation("one", parts=parts),),
            stages=(Stage("pack", "pack"), Stage("experts", "experts")),
        )


def fused(monkeypatch, parts: dict[str, str], **functions) -> Bench:
    """`layer` with an implementation `peer` of these parts, whose fused module has these functions."""
    module = ModuleType("peer")
    vars(module).update(functions)
    monkeypatch.setitem(sys.modules, "moe_routing_kernels.layer.peer", module)
    return replace(
        BENCHES["layer"],
        implementations=(*BENCHES["layer"].implementations, Implementation("peer", layout="block64", parts=parts)),
    )


@pytest.mark.parametrize("precompiles", [True, False])
def test_the_kernels_of_every_part_are_compiled(precompiles, monkeypatch):
    """Of a stage for its own cell, with rows as they lie here; of a fused part for the composite's problem, if it has any."""
    seen = []
    monkeypatch.setattr(Bench, "precompile", lambda *given: seen.append(given))
    functions = {"precompile": lambda *given: seen.append(given)} if precompiles else {}
    bench, cell = (
        fused(monkeypatch, {"permute": "triton", "pack+experts": "layer.peer"}, **functions),
        cell_of("layer", **SHAPE),
    )
    composite.precompile(bench, bench["peer"], cell, Target.of("sm_90a"))
    stages = [
        (one.name, way, inner.bench, inner.get("layout"), target.arch)
        for one, way, inner, target in (given for given in seen if len(given) == 4)
    ]
    assert stages == [
        ("gate", "torch", "gate", "block64", "sm_90a"),
        ("permute", "triton", "permute", "block64", "sm_90a"),
        ("combine", "torch", "combine", "block64", "sm_90a"),
    ]
    fused_parts = [given for given in seen if len(given) == 2]
    assert fused_parts == [(bench.definition().problem(cell), "sm_90a")] * precompiles


@pytest.mark.parametrize(
    ("unsupported", "why"),
    [
        (lambda problem: "is too wide", None),
        (
            lambda problem, target=None: target and "is written for another",
            "layer peer: pack[+]experts: is written for",
        ),
    ],
    ids=["the problem", "the target"],
)
def test_what_cannot_run_is_not_compiled(unsupported, why, monkeypatch):
    """A problem that it cannot run is passed over; one that it cannot run on this target has no form there."""
    seen = []
    bench = fused(monkeypatch, {"pack+experts": "layer.peer"}, unsupported=unsupported, precompile=seen.append)
    with pytest.raises(NoForm, match=why) if why else contextlib.nullcontext():
        bench.precompile("peer", cell_of("layer", **SHAPE), Target.of("sm_100a"))
    assert not seen


def test_a_fused_part_that_says_nothing_is_supported(monkeypatch):
    bench, cell = fused(monkeypatch, {"pack+experts": "layer.peer"}), cell_of("layer", **SHAPE)
    assert composite.supports(bench, bench["peer"], cell) is None
    bench = fused(
        monkeypatch, {"pack+experts": "layer.peer"}, unsupported=lambda problem: f"{problem.hidden} is too wide"
    )
    assert composite.supports(bench, bench["peer"], cell) == "pack+experts: 40 is too wide"


def test_buffers_of_all_parts_are_known(monkeypatch):
    """They are poisoned when an implementation is checked; what is given is none of them. Parts run under their names."""
    cell, definition = cell_of("routing", **ROUTED), BENCHES["routing"].definition()
    inputs = definition.build(cell, 3, "cpu")
    call = BENCHES["routing"].bind("torch", cell, inputs | definition.empty_outputs(cell, inputs))
    between = {"topk_ids", "topk_weights", "counts", "offsets", "order", "inverse", "packed"}
    assert call.buffers.keys() == between
    names, annotate = [], composite.nvtx.annotate
    monkeypatch.setattr(composite.nvtx, "annotate", lambda name: names.append(name) or annotate(name))
    assert call().keys() == between | inputs.keys() | {"combined"}
    assert names == [stage.name for stage in BENCHES["routing"].stages]


def test_a_fused_part_has_the_buffers_that_a_later_part_reads(monkeypatch):
    """And no others, unless they are given: the packed rows stay inside it."""
    cell, bench = cell_of("layer", **SHAPE), BENCHES["layer"]
    definition = bench.definition()
    given = definition.build(cell, 3, "cpu") | definition.shared(cell, 3, "cpu")
    given |= definition.empty_outputs(cell, given)
    routed = {"topk_ids", "topk_weights", "counts", "offsets", "order", "inverse"}
    assert bench.bind("torch_gather_loop", cell, given).buffers.keys() == routed | {"y"}
    bench = fused(monkeypatch, {"pack+experts": "layer.peer"}, bind=lambda problem, **operands: operands.keys)
    assert bench.bind("peer", cell, given | {"packed": torch.empty(66, 40)}).buffers.keys() == routed | {"y"}


def test_a_fused_part_makes_what_the_next_one_alone_reads_and_is_not_given(monkeypatch):
    """The order of rows is read by pack alone, their counts by nobody; what one of its stages writes may be given."""
    parts = {"router+permute": "layer.peer", "experts": "torch_loop"}
    cell, bench = cell_of("layer", **SHAPE), fused(monkeypatch, parts, bind=lambda problem, **operands: operands.keys)
    definition = bench.definition()
    given = definition.build(cell, 3, "cpu") | definition.shared(cell, 3, "cpu")
    given |= definition.empty_outputs(cell, given)
    made = bench.bind("peer", cell, given).buffers.keys()
    assert {"order", "inverse", "offsets", "topk_weights", "packed", "y"} <= made and "topk_ids" not in made
    chosen = {"topk_ids": torch.zeros(33, 2, dtype=torch.int32), "topk_weights": torch.zeros(33, 2)}
    assert bench.bind("peer", cell, given | chosen).buffers.keys() == made - chosen.keys()


def test_a_stage_is_checked_under_its_own_names():
    """Combine finds the packed rows of routing as what it combines."""
    bench, cell = BENCHES["routing"], cell_of("routing", **ROUTED)
    inputs = bench.definition().build(cell, 3, "cpu")
    tensors = bench.bind("torch", cell, inputs | bench.definition().empty_outputs(cell, inputs))()
    assert composite.check(bench, bench["torch"], cell, tensors).error is None
    wrong = tensors | {"combined": tensors["combined"] + 1}
    assert composite.check(bench, bench["torch"], cell, wrong).error.startswith("combine: combined: ")


def test_operands_have_the_composite_s_names():
    """The rows that combine reads are the packed ones where there are no experts."""
    *_, combine = composite.parts(BENCHES["routing"], BENCHES["routing"]["torch"])
    assert combine.reads() == ["packed", "inverse", "topk_weights", "residual"] and combine.writes() == ["combined"]


def handed_on(monkeypatch, parts: dict[str, str]):
    """A layer with these parts: what torch's parts hand on, and its check."""
    bench, cell = fused(monkeypatch, parts | {"experts": "torch_loop"}), cell_of("layer", **SHAPE | {"experts": 64})
    definition = bench.definition()
    inputs = definition.build(cell, 3, "cpu") | definition.shared(cell, 3, "cpu")
    tensors = bench.bind("torch_loop", cell, inputs | definition.empty_outputs(cell, inputs))()
    peer = replace(bench["peer"], layout="compact")
    return tensors, lambda shown: composite.check(bench, peer, cell, shown)


@pytest.mark.parametrize(
    ("parts", "fine"), [({"router": "quack"}, True), ({}, False), ({"router+permute": "layer.peer"}, False)]
)
def test_a_stage_may_be_as_inexact_as_its_implementation_says(parts, fine, monkeypatch):
    """quack's weights are off by the bits of an index; a stage of a fused part has no such excuse."""
    tensors, check = handed_on(monkeypatch, parts)
    del tensors["combined"]  # is not of these weights
    found = check(tensors | {"topk_weights": tensors["topk_weights"] * (1 + 2.0**-18)})
    assert (found.error is None) == fine and (fine or found.error.startswith("router: topk_weights: "))


def test_what_a_fused_part_shows_is_checked(monkeypatch):
    """Also where it hides what a stage before wrote; a stage of which nothing is shown is not."""
    tensors, check = handed_on(monkeypatch, {"router+permute+pack": "layer.peer"})
    hidden = {name: one for name, one in tensors.items() if name != "topk_ids"}
    assert check(tensors).error is check(hidden).error is None
    wrong = {"packed": tensors["packed"] + 1}
    assert check(hidden | wrong).error.startswith("pack: packed: ") and check(tensors | wrong).error
    assert check({name: one for name, one in (hidden | wrong).items() if name != "x"}).error.startswith("experts: y: ")


@pytest.mark.parametrize("form", ["eager", "batched_mm", "grouped_mm"])
@pytest.mark.parametrize("shape", [{"dtype": "bf16"}, {"dtype": "bf16", "tokens": 1, "skew": 1.0}])
def test_layers_of_transformers(form, shape):
    """Right in every form, in one part after the router; a capacity limit they do not have."""
    pytest.importorskip("transformers")
    cell, name = cell_of("layer", **SHAPE | shape), f"transformers_{form}"
    bench, definition = BENCHES["layer"], BENCHES["layer"].definition()
    inputs = definition.build(cell, 3, "cpu") | definition.shared(cell, 3, "cpu")
    call = bench.bind(name, cell, inputs | definition.empty_outputs(cell, inputs))
    assert [stage for stage, _ in call.stages] == ["router", "permute+pack+experts+combine"]
    found = bench.check(name, cell, inputs, call(), definition.reference(cell, inputs))
    assert found.error is None and 0 < found.rel_l2_error < found.tolerance
    limited = cell_of("layer", **SHAPE | shape | {"capacity_factor": 1.25})
    assert (
        bench.supports(name, limited)
        == "permute+pack+experts+combine: transformers' Qwen3-MoE module has no capacity limit"
    )
