"""The bench `model` with quantised experts: what they are among its inputs, that each implementation is right, and what the check finds."""

import importlib
import weakref
from pathlib import Path

import pytest
import torch
from torch import Tensor

import tiny_models
from moe_routing_bench.benches.model import definition, step, weight_views
from moe_routing_bench.benches.registry import BENCHES
from moe_routing_bench.grid.cell import Cell
from moe_routing_kernels.experts import dequant
from moe_routing_kernels.implementations import module_of
from moe_routing_kernels.target import Target

BENCH = BENCHES["model"]
FORMS = [one.name for one in BENCH.implementations if "experts" in one.options]
HERE = ("dequant", "dequant_loop")  # what runs on a CPU
WEIGHTS = ("int8_g128", "int4z_g128", "e4m3_g128")
torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def tiny():
    """The library, and tiny models."""
    pytest.importorskip("transformers")
    with tiny_models.installed():
        yield


def case(name: str = "deepseek-v2-lite", weights: str = "int4_g128", **axes) -> tuple[Cell, dict, dict]:
    """A cell, its inputs and the reference."""
    cell = tiny_models.cell(name, weights=weights, **axes)
    inputs = definition.build(cell, 3, "cpu") | definition.shared(cell, 3, "cpu")
    return cell, inputs, definition.reference(cell, inputs)


def run(form: str, cell: Cell, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    """The outputs of an implementation."""
    outputs = definition.empty_outputs(cell, inputs)
    return outputs | BENCH.bind(form, cell, inputs | outputs)()


def test_quantised_experts_are_inputs_of_their_own_and_no_parameters() -> None:
    """Of each layer that has experts, which the first of DeepSeek's has not; what remains of the model is drawn as without them."""
    cell, inputs, _ = case(weights="int4z_g128")
    parts = {name: (tuple(one.shape), one.dtype) for name, one in inputs.items() if "." in name}
    assert parts == {
        f"{name}.{layer}": one
        for layer in range(2)
        for name, one in {
            "w13": ((6, 48, 16), torch.uint8),
            "w13_scales": ((6, 48, 1), torch.bfloat16),
            "w13_zeros": ((6, 48, 1), torch.uint8),
            "w2": ((6, 32, 12), torch.uint8),
            "w2_scales": ((6, 32, 1), torch.bfloat16),
            "w2_zeros": ((6, 32, 1), torch.uint8),
        }.items()
    }
    assert not torch.equal(inputs["w13.0"], inputs["w13.1"])
    model = weight_views.over(definition.problem(cell), inputs["weights"], "eager")
    assert all(one.gate_up_proj.is_meta and one.down_proj.is_meta for _, one in weight_views.experts(model))
    plain = definition.shared(cell.but(weights="bf16"), 3, "cpu")
    assert plain.keys() == {"weights"}
    assert len(plain["weights"]) - len(inputs["weights"]) == 2 * 6 * 3 * 24 * 32
    assert set(inputs) <= {*BENCH.reads} and set(inputs) - {"ids"} <= {*BENCH.shared}


AXES = ({}, {"phase": "decode", "tokens": 3}, {"dtype": "fp16"})
# Each form with each format, and with each of the axes.
CASES = [(form, weights, AXES[(i + j) % 3]) for i, form in enumerate(HERE) for j, weights in enumerate(WEIGHTS)]


@pytest.mark.parametrize(("form", "weights", "axes"), CASES, ids=str)
def test_every_form_is_right(form: str, weights: str, axes: dict) -> None:
    """Also on other values in the same memory, in a second call; inputs are as they were."""
    cell, inputs, expected = case(weights=weights, **axes)
    assert BENCH.supports(form, cell) is None
    tensors = {key: one.clone() for key, one in inputs.items()}
    outputs = definition.empty_outputs(cell, inputs)
    call = BENCH.bind(form, cell, tensors | outputs)
    fresh = inputs | definition.build(cell, 9, "cpu")
    for given, want in ((inputs, expected), (fresh, definition.reference(cell, fresh))):
        for key in definition.build(cell, 3, "cpu"):
            tensors[key].copy_(given[key])
        found = outputs | call()
        check = BENCH.check(form, cell, given, found, want)
        assert check.error is None and 0 < check.rel_l2_error < check.tolerance
        assert all(torch.equal(tensors[key], given[key]) for key in tensors)


@pytest.mark.parametrize("name", tiny_models.NAMES)
def test_every_family_takes_them(name: str) -> None:
    cell, inputs, expected = case(name)
    assert definition.check(cell, inputs, run("dequant", cell, inputs), expected).error is None


def test_planted_faults() -> None:
    """Another layer's weights, and scales of other rows, in the second layer with experts."""
    cell, inputs, expected = case(weights="int2_g128")
    others = {f"{name}.1": one for name, one in step.of_layer(inputs, 0).items()}
    scales = {"w2_scales.1": inputs["w2_scales.1"].roll(1, 1)}
    for wrong in (others, scales):
        own = run("dequant", cell, inputs | wrong)
        error = definition.check(cell, inputs, own, expected).error
        assert error and error.startswith("experts of layer 1: "), error


def test_of_quantised_experts_fewer_bytes_are_read() -> None:
    cell, inputs, expected = case(weights="int4_g128", phase="decode", tokens=1)
    outputs = definition.empty_outputs(cell, inputs)
    plain = definition.build(cell, 3, "cpu") | definition.shared(cell.but(weights="bf16"), 3, "cpu")
    one, whole = (
        definition.cost(cell.but(weights=weights), given, outputs, expected)
        for weights, given in (("int4_g128", inputs), ("bf16", plain))
    )
    active = sum(len(ids.unique()) for ids in expected["topk_ids"])
    elements, scales = 3 * 24 * 32, 2 * 24 + 32
    assert whole.read_bytes - one.read_bytes == active * (2 * elements - (elements // 2 + 2 * scales))
    assert (whole.write_bytes, whole.flops) == (one.write_bytes, one.flops)


def test_what_cannot_run_says_so() -> None:
    quantised, plain = tiny_models.cell("olmoe-1b-7b", weights="mxfp4"), tiny_models.cell("olmoe-1b-7b")
    forms = [one.name for one in BENCH.implementations if one.name not in FORMS]
    assert {BENCH.supports(form, quantised) for form in forms} == {
        "takes weights of the activations' format, not mxfp4"
    }
    assert {BENCH.supports(form, plain) for form in HERE} == {"takes quantised weights, not bf16"}


def test_the_workspace_is_kept_between_calls() -> None:
    """As long as the call lives: one for all layers, not one per call."""
    cell, inputs, _ = case()
    call = BENCH.bind("dequant", cell, inputs | definition.empty_outputs(cell, inputs))

    def workspace() -> weakref.ref:
        (up, _) = dequant.kept_workspace(
            step.layer(definition.problem(cell)).experts, cell.experts, torch.device("cpu")
        )
        return weakref.ref(up)

    first = workspace()
    call()
    assert first() is not None and workspace() is first
    del call
    assert first() is None


def test_an_edit_of_what_multiplies_makes_rows_stale() -> None:
    """The kernels are found by name, so the table names what a measurement depends on."""
    names = {Path(path).stem for path in BENCH.code_files()}
    assert {module_of(BENCHES["experts"][form].module) for form in FORMS} <= names
    assert {BENCH[form].requires for form in HERE} == {()} and BENCH["cute_quantised"].requires == ("nvidia", "cutlass")


def test_the_kernels_are_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of the operators around the experts, and of the experts."""
    pytest.importorskip("cutlass")
    seen = []
    for name in (
        "gate.cute_gate",
        "permute.cute_permute",
        "pack.cute_pack",
        "experts.cute_quantised",
        "combine.cute_combine",
    ):
        module = importlib.import_module(f"moe_routing_kernels.{name}")
        monkeypatch.setattr(module, "precompile", lambda part, arch, name=name, **_: seen.append((name, arch)))
    BENCH.precompile("cute_quantised", tiny_models.cell("qwen3-30b-a3b", weights="int4_g128"), Target.of("sm_90a"))
    assert [name for name, arch in seen if arch == "sm_90a"] == [
        "gate.cute_gate",
        "permute.cute_permute",
        "pack.cute_pack",
        "combine.cute_combine",
        "experts.cute_quantised",
    ]
