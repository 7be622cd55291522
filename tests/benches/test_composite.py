"""Composites: stages wired by the names of their tensors, fused stages, outputs that a stage allocates itself."""

import sys
from dataclasses import replace
from types import ModuleType

import pytest
import torch

from moe_routing_bench.benches import composite
from moe_routing_bench.benches.bench import Bench, Implementation, Stage
from moe_routing_bench.benches.registry import BENCHES
from moe_routing_bench.config.expand import cell_of

SHAPE = {"tokens": 33, "hidden": 40, "intermediate": 24, "experts": 6, "top_k": 2, "dtype": "fp32", "skew": 0.5}
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
    monkeypatch.setitem(sys.modules, "moe_routing_bench.kernels.layer.peer", module)
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
    assert set(part.reads()) == {"logits", "bias", "x", "w13", "w2", "residual"}
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
