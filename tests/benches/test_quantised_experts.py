"""Quantised weights in the benches `experts` and `layer`: what they are, what is computed with them, what it costs, who takes them."""

import math

import pytest
import torch

from campaign import sampled
from moe_routing_bench.benches.registry import BENCHES
from moe_routing_bench.config.expand import cell_of
from moe_routing_bench.grid.cell import Job, Settings
from moe_routing_bench.measure import supervisor
from moe_routing_kernels.errors import UserError
from moe_routing_kernels.formats.quantisation import dequantise
from moe_routing_kernels.formats.weights import WEIGHTS, named
from packs import no_ceilings

__all__ = ["no_ceilings"]

QUICK = Settings(check_seeds=2, warmup_ms=1, interval_us=200, min_blocks=10, max_blocks=10, max_seconds=1, wall_calls=1)
SHAPE = {"tokens": 30, "hidden": 32, "intermediate": 48, "experts": 5, "top_k": 2}


def case(bench, **axes):
    cell, definition = cell_of(bench, **SHAPE | axes), BENCHES[bench].definition()
    return cell, definition, definition.build(cell, 3, "cpu") | definition.shared(cell, 3, "cpu")


def dense(inputs, form):
    """The same inputs with weights as plain numbers."""
    found = {name: one for name, one in inputs.items() if "_" not in name.removeprefix("shared_") or name[0] != "w"}
    for name, shape in (("w13", (5, 96, 32)), ("w2", (5, 32, 48))):
        parts = {part: inputs[given] for part, given in named(name).items() if given in inputs}
        found[name] = torch.empty(shape, dtype=torch.float64)
        dequantise({"elements": inputs[name]} | parts, form, found[name])
    return found


@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
@pytest.mark.parametrize(
    "weights", ["int8_g32", "int4z_g128", "int2_row", "e4m3_block128", "e5m2_g128", "mxfp4", "nvfp4"]
)
@pytest.mark.parametrize("bench", ["experts", "layer"])
def test_the_reference_multiplies_with_what_the_parts_stand_for(bench, weights, dtype):
    cell, definition, inputs = case(bench, weights=weights, dtype=dtype)
    plain = definition.reference(cell.but(weights=dtype), dense(inputs, WEIGHTS[weights]))
    output = BENCHES[bench].writes[0]
    found = definition.reference(cell, inputs)[output]
    assert (found - plain[output]).norm() <= 1e-6 * plain[output].norm() and found.norm() > 0
    other = inputs | {"w2": inputs["w2"].view(torch.uint8).roll(1, 0).view(inputs["w2"].dtype)}
    assert (definition.reference(cell, other)[output] - found).norm() > 0.1 * found.norm()


@pytest.mark.parametrize("weights", WEIGHTS)
def test_bytes_of_weights_are_those_of_their_parts(weights):
    cell, definition, inputs = case("experts", weights=weights)
    expected = definition.reference(cell, inputs)
    form = WEIGHTS[weights]
    each = form.bytes_of(96, 32, "bf16") + form.bytes_of(32, 48, "bf16")
    assert definition.cost(cell, inputs, {"y": expected["y"]}, expected).read_bytes == 60 * 32 * 2 + 5 * each + 4 * 6
    operands = {name for name in inputs if name.startswith("w")}
    assert operands <= set(BENCHES["experts"].shared) and operands <= set(BENCHES["layer"].shared)


def test_biases_and_shared_experts_keep_the_format_of_the_activations():
    axes = {"activation": "swiglu_oai", "weights": "int4_g32", "dtype": "fp16"}
    cell, definition, inputs = case("layer", **axes, shared_intermediate=16)
    plain = [name for name in inputs if name.startswith(("b", "shared_"))]
    assert plain == ["b13", "b2", "shared_w13", "shared_w2"]
    assert all(inputs[name].dtype == torch.float16 for name in plain)
    assert inputs["w13"].dtype == inputs["w2"].dtype == torch.uint8
    assert definition.reference(cell, inputs)["combined"].isfinite().all()


IN_TORCH = ("dequant", "dequant_uncached", "dequant_loop")
ON_A_GPU = ("cute_quantised",)


@pytest.mark.parametrize(("bench", "output"), [("experts", "y"), ("layer", "combined")])
def test_every_implementation_takes_them_or_says_why_not(bench, output):
    """Those that take them on a CPU are right. `training` has no such axis."""
    for weights in ("int4_g128", "e4m3_row", "mxfp4"):
        cell, definition, inputs = case(bench, weights=weights)
        ran = []
        for one in BENCHES[bench].implementations:
            if reason := BENCHES[bench].supports(one.name, cell):
                of_another_layout = any(one in reason for one in ("padded", "blocks of 128"))
                assert weights in reason or of_another_layout or one.name == "auto", (one.name, reason)
                continue
            if one.name in ON_A_GPU:
                continue
            if {"gpu", "nvidia"} & set(one.requires):
                continue
            outputs = definition.empty_outputs(cell, inputs)
            outputs[output].fill_(torch.nan)
            returned = BENCHES[bench].bind(one.name, cell, inputs | outputs)() or {}
            found = definition.check(cell, inputs, outputs | returned, definition.reference(cell, inputs))
            assert found.error is None and 0 < found.rel_l2_error < found.tolerance, one.name
            ran.append(one.name)
        assert tuple(ran) == (*IN_TORCH, *["auto"] * (bench == "layer"))
    assert all("weights" not in BENCHES[name].axes for name in ("training", "shared_experts") if name in BENCHES)


@pytest.mark.parametrize(
    ("weights", "sizes", "said"),
    [
        (
            "int2_g32",
            {"hidden": 66},
            "hidden: got 66; allowed: a multiple of 4 with weights int2_g32; hint: a byte holds 4",
        ),
        (
            "mxfp4",
            {"intermediate": 7},
            "intermediate: got 7; allowed: a multiple of 2 with weights mxfp4; hint: a byte holds 2",
        ),
    ],
)
def test_sizes_that_fill_no_bytes_are_refused(weights, sizes, said):
    with pytest.raises(UserError, match=f"^{said}$"):
        cell_of("experts", **SHAPE | sizes, weights=weights)
    assert cell_of("experts", **SHAPE | sizes, weights="int8_row").weights == "int8_row"


@pytest.mark.parametrize("weights", ["int8_g32", "int4z_g128", "e4m3_block128", "nvfp4"])
@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_the_check_tells_weights_apart_that_are_nearly_equal(weights, dtype):
    """Those before they were quantised, scales that are an eighth larger in one group of many, codes of a byte in the other order."""
    cell, definition, inputs = case("experts", weights=weights, dtype=dtype)
    expected = definition.reference(cell, inputs)
    assert definition.check(cell, inputs, {"y": expected["y"].to(torch.float32)}, expected).error is None
    plain = cell.but(weights=dtype)
    before = definition.reference(plain, definition.build(plain, 3, "cpu") | definition.shared(plain, 3, "cpu"))["y"]
    swapped = inputs["w2"].view(torch.uint8)
    swapped = inputs | {"w2": ((swapped >> 4) | (swapped << 4)).view(inputs["w2"].dtype)}
    wrong = [definition.reference(cell, swapped)["y"]]
    wrong += [before] if (weights, dtype) != ("int8_g32", "bf16") else []  # 8 bits are as many as bf16 has
    scales = inputs["w13_scales"].float()
    scales[:, :, -1] *= 1.125
    wrong.append(definition.reference(cell, inputs | {"w13_scales": scales.to(inputs["w13_scales"].dtype)})["y"])
    for one in wrong:
        assert definition.check(cell, inputs, {"y": one.to(torch.float32)}, expected).error


@pytest.mark.parametrize("bench", ["experts", "layer"])
def test_a_rounded_inner_operand_is_declared_and_widens_the_tolerance(bench):
    cell, definition, inputs = case(bench, weights="e4m3_row", packed="fp8_row")
    expected = definition.reference(cell, inputs)
    found = [definition.check(cell, inputs, expected, expected, rounded_inner=one).tolerance for one in (False, True)]
    assert found[1] == pytest.approx(math.hypot(found[0], 1.5 * 2**-4)) and found[0] < 0.04
    assert "rounded_inner" in BENCHES[bench]["scaled_grouped_mm"].declares


@pytest.mark.usefixtures("no_ceilings")
@pytest.mark.parametrize(
    ("bench", "weights"),
    sampled(
        [("experts", "int4z_g32"), ("layer", "e5m2_block128"), ("layer", "mxfp4")],
        [("experts", "int4z_g32"), ("layer", "mxfp4")],
        unpack=True,
    ),
)
def test_measured_as_a_row(bench, weights):
    """In a worker of its own, with elements, scales and zero points among what may not be written."""
    names = (*IN_TORCH, "torch_loop", "scaled_grouped_mm")
    job = Job(cell_of(bench, **SHAPE, weights=weights, skew=1.2), names, QUICK)
    rows = {row["implementation"]: row for row in supervisor.measure(job, None)}
    assert {name: row["status"] for name, row in rows.items()} == dict.fromkeys(IN_TORCH, "ok") | dict.fromkeys(
        names[3:], "unsupported"
    )
    assert all(rows[name]["read_bytes"] > 0 and rows[name]["rel_l2_error"] > 0 for name in IN_TORCH)
    assert weights in rows["torch_loop"]["reason"]


def test_an_unknown_format_is_refused_with_a_hint():
    with pytest.raises(UserError, match="did you mean 'int4_g128'"):
        cell_of("experts", **SHAPE, weights="int4_g12")
