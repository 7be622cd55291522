"""The bench `experts`: what its check accepts and finds, and what it counts."""

import pytest
import torch

from moe_routing_bench.benches.experts import definition
from moe_routing_bench.benches.registry import BENCHES
from moe_routing_bench.config.expand import cell_of

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
    one = y.clone()
    one[3, 5] += y.std() / 10
    assert definition.check(cell, inputs, {"y": y}, expected).error is None
    assert all(definition.check(cell, inputs, {"y": other}, expected).error for other in (*wrong, one))


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
