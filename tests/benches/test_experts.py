"""The bench `experts`: what its check accepts and finds, and what it counts."""

import itertools
from dataclasses import replace

import pytest
import torch

from activations import EVERY
from moe_routing_bench.benches.experts import definition
from moe_routing_bench.benches.registry import BENCHES
from moe_routing_bench.config.expand import cell_of
from moe_routing_kernels.activations import activation_of

SHAPE = {"tokens": 50, "hidden": 32, "intermediate": 48, "experts": 5, "top_k": 2, "dtype": "fp32"}


def case(**axes):
    cell = cell_of("experts", **SHAPE | axes)
    inputs = definition.build(cell, 3, "cpu") | definition.shared(cell, 3, "cpu")
    return cell, inputs, definition.reference(cell, inputs)


@pytest.mark.parametrize(
    ("name", "axes"),
    [
        ("torch_loop", {}),
        ("torch_loop", {"skew": 1.2, "capacity_factor": 0.5}),
        ("torch_loop", {"packed": "fp8_block128", "layout": "block64"}),
        ("torch_bmm", {"layout": "padded", "capacity_factor": 1.25, "skew": 0.7}),
        ("torch_bmm", {"layout": "padded", "capacity_factor": 1.0, "packed": "fp8_row"}),
        ("torch_grouped_mm", {"dtype": "bf16", "skew": 1.2}),
        ("torch_grouped_mm", {"dtype": "bf16", "layout": "block64"}),
        *(("torch_loop", {"activation": name}) for name in EVERY),
        *(("torch_bmm", {"activation": name, "layout": "padded", "capacity_factor": 1.0}) for name in EVERY),
        *(("torch_grouped_mm", {"activation": name, "dtype": "bf16", "skew": 1.2}) for name in EVERY),
    ],
)
def test_every_way_is_right(name, axes):
    cell, inputs, expected = case(**axes)
    outputs = definition.empty_outputs(cell, inputs)
    outputs["y"].fill_(torch.nan)
    returned = BENCHES["experts"].bind(name, cell, inputs | outputs)()
    found = definition.check(cell, inputs, outputs | (returned or {}), expected)
    assert found.error is None and 0 < found.rel_l2_error < found.tolerance


def test_the_smallest_faults_are_found():
    """A row of another expert, gate and up exchanged, one element."""
    cell, inputs, expected = case(skew=0.5)
    y = expected["y"].float()
    exchanged = inputs | {"w13": inputs["w13"].roll(SHAPE["intermediate"], dims=1)}
    shifted = inputs | {"offsets": (inputs["offsets"] + 1).clamp_max(len(y))}
    wrong = [definition.reference(cell, one)["y"].float() for one in (exchanged, shifted)]
    ones = [y.clone() for _ in range(2)]
    ones[0][3, 5] += y.std() / 10
    ones[1][int((inputs["order"] == 0).nonzero())] += y.std()  # the first assignment's row
    assert definition.check(cell, inputs, {"y": y}, expected).error is None
    assert all(definition.check(cell, inputs, {"y": other}, expected).error for other in (*wrong, *ones))


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("activation", EVERY)
def test_another_activation_is_found(activation, dtype):
    """Each of the others with the same weights, a clamp or a bias that is left out, gate and up exchanged."""
    cell, inputs, expected = case(activation=activation, dtype=dtype)
    known, plain = activation_of(activation), {n: t for n, t in inputs.items() if n not in ("b13", "b2")}
    others = [name for name in EVERY if name != activation and activation_of(name).gated == known.gated]
    wrong = [definition.reference(cell.but(activation=name), inputs) for name in others if not same(name, activation)]
    if known.biased:
        wrong += [definition.reference(cell, plain | {bias: inputs[bias]}) for bias in ("b13", "b2")]
    if known.limit is not None:  # neither, or one alone is clamped; the gate on both sides
        limit, value = known.limit, lambda gate: gate * torch.sigmoid(known.alpha * gate)
        shift = known.shift
        wrong.append(computed(inputs, lambda gate, up: value(gate) * (up + shift)))
        wrong.append(computed(inputs, lambda gate, up: value(gate.clamp(max=limit)) * (up + shift)))
        wrong.append(computed(inputs, lambda gate, up: value(gate) * (up.clamp(-limit, limit) + shift)))
        wrong.append(computed(inputs, lambda gate, up: value(gate.clamp(max=limit)) * (up.clamp(max=limit) + shift)))
    if activation == "relu2":
        wrong += [computed(inputs, one) for one in (torch.relu, torch.square)]
    if activation != "relu2":
        exchanged = {
            name: inputs[name].roll(SHAPE["intermediate"], dims=1) for name in ("w13", "b13") if name in inputs
        }
        wrong.append(definition.reference(cell, inputs | exchanged))
    for one in wrong:
        assert definition.check(cell, inputs, {"y": one["y"].to(inputs["packed"].dtype)}, expected).error
    assert len(wrong) >= 2


def same(name, activation):
    """Whether a name differs from `activation` in what its inputs cannot show: biases, and a limit beyond sums that nothing clamps."""
    known = activation_of(activation)
    return replace(activation_of(name), biased=known.biased, limit=known.limit) == known


@pytest.mark.parametrize("activation", [name for name in EVERY if activation_of(name).limit is not None])
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_a_share_of_gates_and_ups_is_clamped(activation, dtype):
    """A tenth of the ups, half of it of the gates, also where the limit is another; above 64 fewer, as float16 ends."""
    for name in (activation, *(("swiglu_limit0.5", "swiglu_limit64") if activation == "swiglu_limit10" else ())):
        cell, inputs, _ = case(activation=name, dtype=dtype, tokens=400)
        gates, ups = (one.abs() > activation_of(name).limit for one in sums_of(cell, inputs))
        assert 0.05 < float(gates.float().mean()) < 0.15 and 0.05 < float(ups.float().mean()) < 0.15
    assert max(one.abs().max() for one in sums_of(*case(activation="swiglu_limit1000")[:2])) < 200


def sums_of(cell, inputs):
    """The gates and ups of all rows."""
    biases = inputs["b13"] if "b13" in inputs else torch.zeros(cell.experts, 2 * cell.intermediate)
    spans = enumerate(itertools.pairwise(inputs["offsets"].tolist()))
    parts = [
        inputs["packed"][first:end].double() @ inputs["w13"][e].double().T + biases[e] for e, (first, end) in spans
    ]
    return torch.cat(parts).chunk(2, 1)


def test_biases_are_large_enough_to_matter():
    """Four times as large as the sums that they are added to, which are of size one."""
    _, inputs, _ = case(activation="swiglu_oai")
    for bias in ("b13", "b2"):
        assert 3.4 < float(inputs[bias].std()) < 4.6


def computed(inputs, act):
    """The experts with another activation: of gate and up where w13 has both, else of all sums."""
    y = torch.zeros(inputs["packed"].shape, dtype=torch.float64)
    for expert, (first, end) in enumerate(itertools.pairwise(inputs["offsets"].tolist())):
        own = {name: inputs[name][expert].double() for name in ("w13", "w2", "b13", "b2") if name in inputs}
        sums = inputs["packed"][first:end].double() @ own["w13"].T + own.get("b13", 0)
        y[first:end] = act(*sums.split(SHAPE["intermediate"], 1)) @ own["w2"].T + own.get("b2", 0)
    return {"y": y}


@pytest.mark.parametrize(
    ("activation", "products", "numbers"),
    [
        ("relu2", 4, 2 * 32 * 48),
        ("swiglu_oai", 6, 3 * 32 * 48 + 2 * 48 + 32),
        ("swiglu_oai_unbiased", 6, 3 * 32 * 48),
        ("swiglu_limit10", 6, 3 * 32 * 48),
    ],
)
def test_cost_of_other_activations(activation, products, numbers):
    """Without a gate there are two products; biases are read as well. By hand: 5 experts of H=32, I=48 in float32."""
    cell, inputs, expected = case(activation=activation)
    cost = definition.cost(cell, inputs, {"y": expected["y"]}, expected)
    assert cost.flops == products * 100 * 32 * 48
    assert cost.read_bytes == 100 * 32 * 4 + 5 * numbers * 4 + 4 * 6


@pytest.mark.parametrize(
    ("activation", "count"),
    [("swiglu", 5), ("geglu", 5), ("relu2", 4), ("swiglu_oai", 11), ("swiglu_oai_unbiased", 8), ("swiglu_limit10", 5)],
)
def test_roundings_of_a_plain_implementation(activation, count):
    """Clamping rounds nothing; a sigmoid of a multiple, up + 1 and biases do."""
    cell = cell_of("experts", **SHAPE | {"dtype": "bf16", "activation": activation})
    assert definition.roundings(cell) == count


def test_padding_rows_are_not_looked_at_and_not_counted():
    cell, inputs, expected = case(layout="padded", capacity_factor=1.25, skew=0.7)
    y = expected["y"].float()
    y[inputs["order"] < 0] = torch.nan
    assert definition.check(cell, inputs, {"y": y}, expected).error is None
    kept = int((inputs["inverse"] >= 0).sum())
    cost = definition.cost(cell, inputs, {"y": y}, expected)
    weights = 5 * 3 * 32 * 48 * 4
    assert (cost.read_bytes, cost.write_bytes) == (kept * 32 * 4 + weights + 4 * 6, kept * 32 * 4)
    assert cost.flops == 6 * kept * 32 * 48 and kept < len(y)


def test_scores_of_quantised_rows_are_part_of_what_is_read():
    cell, inputs, expected = case(packed="fp8_block128")
    cost = definition.cost(cell, inputs, {"y": expected["y"]}, expected)
    assert cost.read_bytes == 100 * (32 + 4) + 5 * 3 * 32 * 48 * 4 + 4 * 6
