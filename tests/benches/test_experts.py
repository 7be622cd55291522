"""The bench `experts`: what its check accepts and finds, and what it counts."""

import itertools

import pytest
import torch

from moe_routing_bench.benches.experts import definition
from moe_routing_bench.benches.registry import BENCHES
from moe_routing_bench.config.expand import cell_of
from moe_routing_bench.kernels.experts import ACTIVATIONS

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
        *(("torch_loop", {"activation": name}) for name in ACTIVATIONS),
        *(("torch_bmm", {"activation": name, "layout": "padded", "capacity_factor": 1.0}) for name in ACTIVATIONS),
        *(("torch_grouped_mm", {"activation": name, "dtype": "bf16", "skew": 1.2}) for name in ACTIVATIONS),
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
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_another_activation_is_found(activation, dtype):
    """Each of the others with the same weights, a clamp or a bias that is left out, gate and up exchanged."""
    cell, inputs, expected = case(activation=activation, dtype=dtype)
    others = [cell.but(activation=name) for name in ACTIVATIONS if (name == "relu2") == (activation == "relu2")]
    wrong = [definition.reference(one, inputs) for one in others if one.activation != activation]
    wrong += [
        definition.reference(cell, {n: t for n, t in inputs.items() if n != bias})
        for bias in ("b13", "b2")
        if bias in inputs
    ]
    if activation == "swiglu_oai":
        wrong.append(computed(inputs, lambda gate, up: gate * torch.sigmoid(1.702 * gate) * (up + 1)))
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
    ("activation", "products", "numbers"), [("relu2", 4, 2 * 32 * 48), ("swiglu_oai", 6, 3 * 32 * 48 + 2 * 48 + 32)]
)
def test_cost_of_other_activations(activation, products, numbers):
    """Without a gate there are two products; biases are read as well. By hand: 5 experts of H=32, I=48 in float32."""
    cell, inputs, expected = case(activation=activation)
    cost = definition.cost(cell, inputs, {"y": expected["y"]}, expected)
    assert cost.flops == products * 100 * 32 * 48
    assert cost.read_bytes == 100 * 32 * 4 + 5 * numbers * 4 + 4 * 6


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
