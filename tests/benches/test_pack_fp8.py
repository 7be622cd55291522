"""Pack to fp8: the definition against numbers worked out by hand, the torch implementation, and what a check must find."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from moe_routing_bench.benches import BENCHES
from moe_routing_bench.benches.pack import definition
from moe_routing_bench.grid import Cell

SHAPE = {"tokens": 37, "hidden": 300, "experts": 8, "top_k": 3, "skew": 0.5, "sampler": "exact"}
CELLS = {
    "row": Cell("pack", 17, dtype="fp8_row", layout="compact", **SHAPE),
    "block": Cell("pack", 17, dtype="fp8_block128", layout="compact", **SHAPE),
    "row_padded": Cell("pack", 17, dtype="fp8_row", layout="padded", capacity_factor=0.7, **SHAPE),
    "block_padded": Cell("pack", 17, dtype="fp8_block128", layout="block64", capacity_factor=0.7, **SHAPE),
}


def case(name: str, implementation: str = "torch"):
    """The cell, its inputs, the outputs of an implementation on NaN, and what they should be."""
    cell, way = CELLS[name], BENCHES["pack"][implementation]
    inputs = definition.build(cell, 17, "cpu")
    outputs = definition.empty_outputs(cell, inputs)
    for output in outputs.values():
        output.fill_(torch.nan)
    BENCHES["pack"].load(implementation).prepare(cell, inputs, outputs, **way.options)()
    return cell, inputs, outputs, definition.reference(cell, inputs)


@pytest.mark.parametrize("name", CELLS)
def test_torch_is_right_and_counts_its_bytes(name):
    cell, inputs, outputs, expected = case(name)
    found = definition.check(cell, inputs, outputs, expected)
    assert not found.error and not found.mismatches and 0.01 < found.rel_l2_error < found.tolerance
    scales = {"row": 1, "block": 3}[name.partition("_")[0]]
    rows, sent = len(inputs["order"]), int((inputs["inverse"] >= 0).any(1).sum())
    cost = definition.cost(cell, inputs, outputs, expected)
    assert (cost.read_bytes, cost.write_bytes) == (sent * 300 * 2 + 4 * rows, rows * (300 + 4 * scales))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["block_padded"])
def test_compiled_torch_is_right(name):
    cell, inputs, outputs, expected = case(name, "torch_compile")
    assert not definition.check(cell, inputs, outputs, expected).error


@pytest.mark.parametrize(
    ("dtype", "scales"), [("fp8_row", [2.0, 1.0, 1.0]), ("fp8_block128", [[2.0, 1.0], [1.0, 1.0], [1.0, 1.0]])]
)
def test_numbers_worked_out_by_hand(dtype, scales):
    """Rows whose largest element is 896, 2**-120 and none, rounding to even, and a group of two elements."""
    cell = Cell("pack", 0, tokens=3, hidden=130, experts=1, top_k=1, dtype=dtype, layout="compact")
    x = torch.zeros(3, 130, dtype=torch.bfloat16)
    x[0, :6] = torch.tensor([-896, 34, 38, 36, 2**-9, 1.5 * 2**-8])  # / 2: -448, 17, 19, 18, 2**-10, 1.5 * 2**-9
    x[0, 128:] = torch.tensor([448, 17])
    x[1, 0] = 2**-120
    order = torch.tensor([0, 1, 2], dtype=torch.int32)
    found = definition.reference(cell, {"x": x, "order": order})
    assert torch.equal(found["scales"], torch.tensor(scales))
    expected = torch.zeros(3, 130)
    expected[0, :6] = torch.tensor([-448, 16, 20, 18, 0, 2**-8])
    expected[0, 128:] = torch.tensor([448, 16]) if dtype == "fp8_block128" else torch.tensor([224, 8])
    assert torch.equal(found["packed"].float(), expected)


@pytest.mark.parametrize("name", CELLS)
def test_what_is_wrong_is_found(name):
    """Each fault alone, the smallest of its kind."""
    cell, inputs, outputs, expected = case(name)
    order, bits = inputs["order"], outputs["packed"].view(torch.uint8)
    row, empty = int((order >= 0).nonzero()[0]), int((order < 0).nonzero()[0]) if (order < 0).any() else None
    largest = int((bits[row] & 0x7F).argmax())
    zero = torch.zeros((), dtype=torch.uint8)
    faults = {
        "one step off": (bits, (row, 5), bits[row, 5] ^ 1),
        "NaN": (bits, (row, 5), zero + 0x7F),
        "largest number lost": (bits, (row, largest), zero),
    }
    scales = outputs["scales"].view(len(order), -1)
    faults |= {"scale": (scales, (row, -1), scales[row, -1] * (1 + 2**-21)), "no scale": (scales, (row, 0), scales[row, 0] * torch.nan)}  # fmt: skip
    if empty is not None:
        faults |= {"padding": (bits, (empty, 7), zero + 1), "scale of padding": (scales, (empty, 0), scales[row, 0])}
    for what, (tensor, place, value) in faults.items():
        kept = tensor[place].clone()
        tensor[place] = value
        assert definition.check(cell, inputs, outputs, expected).error, what
        tensor[place] = kept
    assert not definition.check(cell, inputs, outputs, expected).error


@pytest.mark.parametrize("hidden", [1, 13, 64, 100, 128, 130, 300, 1000, 2880, 4096, 4097, 7168, 8191, 32768])
@pytest.mark.parametrize("tokens", [1, 16384])
def test_lanes_that_reduce_together_hold_one_scale(hidden, tokens):
    """Of every tiling that the CuTe kernel chooses: each element once, and by thread and vector the group it is in."""
    cute_pack_fp8 = pytest.importorskip("moe_routing_bench.benches.pack.cute_pack_fp8")
    for group in {hidden, 128}:
        if cute_pack_fp8.supports(
            SimpleNamespace(hidden=hidden, dtype="fp8_row" if group == hidden else "fp8_block128")
        ):
            continue
        tiling = cute_pack_fp8.choose_tiling(tokens, hidden, group)
        kind = cute_pack_fp8.scales_of(tiling, group)
        tile, v, lane = np.ix_(range(tiling.tiles), range(tiling.vectors), range(tiling.lanes))
        vector = tile * tiling.lanes * tiling.vectors + v * tiling.lanes + lane  # as in support.load_row
        inside = vector < tiling.row_vectors
        assert sorted(vector[inside]) == list(range(tiling.row_vectors)) and tiling.threads % tiling.lanes == 0
        side = lane % 32 // (32 // kind.side)
        scale = tile * kind.of_tile(tiling) + v // kind.span * kind.side + side
        for element in (vector * tiling.width, vector * tiling.width + tiling.width - 1):
            assert (element // group == scale)[inside].all(), (hidden, group, tiling)
        assert tiling.lanes == 32 or tiling.tiles == 1, "a scale of several warps is that of the whole block"


def test_rows_that_no_block_holds_are_refused():
    cute_pack_fp8 = pytest.importorskip("moe_routing_bench.benches.pack.cute_pack_fp8")
    long = SimpleNamespace(hidden=8193, dtype="fp8_row")
    assert "up to 8192 elements (in vectors of 1)" in cute_pack_fp8.supports(long)
    assert cute_pack_fp8.supports(SimpleNamespace(hidden=8193, dtype="fp8_block128")) is None


def test_an_element_that_differs_within_half_a_step_is_a_tie():
    cell, inputs, outputs, expected = case("row")
    same = expected | {"packed": outputs["packed"].clone()}
    assert definition.check(cell, inputs, outputs, same).ties == 0
    same["packed"].view(torch.uint8)[0, 0] ^= 1
    assert definition.check(cell, inputs, outputs, same).ties == 1
