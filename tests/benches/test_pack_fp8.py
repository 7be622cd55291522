"""Pack to fp8: the definition against numbers worked out by hand, the torch implementation, and what a check must find."""

import functools
from dataclasses import replace
from types import MappingProxyType

import numpy as np
import pytest
import torch

from moe_routing_bench.benches.pack import definition
from moe_routing_bench.benches.registry import BENCHES
from moe_routing_bench.config.expand import cell_of
from moe_routing_bench.grid.cell import Cell
from moe_routing_kernels import formats
from moe_routing_kernels.pack import Pack

SHAPE = {"tokens": 37, "hidden": 300, "experts": 8, "top_k": 3, "skew": 0.5, "sampler": "exact"}
CELLS = {
    "row": cell_of("pack", packed="fp8_row", layout="compact", **SHAPE),
    "block": cell_of("pack", packed="fp8_block128", layout="compact", **SHAPE),
    "row_padded": cell_of("pack", packed="fp8_row", layout="padded", capacity_factor=0.7, **SHAPE),
    "block_padded": cell_of("pack", packed="fp8_block128", layout="block64", capacity_factor=0.7, **SHAPE),
}


@pytest.fixture
def more_groups(monkeypatch):
    """Formats of other group sizes, each a line of the table."""
    added = {
        f"fp8_block{n}": replace(formats.FORMATS["fp8_block128"], name=f"fp8_block{n}", group=n)
        for n in (32, 48, 64, 256)
    }
    monkeypatch.setattr(formats, "FORMATS", MappingProxyType({**formats.FORMATS, **added}))


def case(name: str, implementation: str = "torch"):
    """The cell, its inputs, the outputs of an implementation on NaN, and what they should be."""
    return case_of(CELLS[name], implementation)


def case_of(cell: Cell, implementation: str = "torch"):
    inputs = definition.build(cell, 17, "cpu")
    outputs = definition.empty_outputs(cell, inputs)
    for output in outputs.values():
        output.fill_(torch.nan)
    BENCHES["pack"].bind(implementation, cell, inputs | outputs)()
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


@pytest.mark.parametrize(("group", "scales"), [(32, 10), (48, 7), (64, 5), (256, 2)])
def test_another_group_size_is_one_line_of_the_table(group, scales, more_groups):
    cell, inputs, outputs, expected = case_of(CELLS["block_padded"].but(packed=f"fp8_block{group}"))
    found = definition.check(cell, inputs, outputs, expected)
    assert not found.error and not found.mismatches and 0.01 < found.rel_l2_error < found.tolerance
    assert outputs["scales"].shape == (len(inputs["order"]), scales)
    broken = outputs | {"scales": outputs["scales"].roll(1, dims=1)}
    assert definition.check(cell, inputs, broken, expected).error


@pytest.mark.parametrize("name", ["block_padded"])
def test_compiled_torch_is_right(name, monkeypatch):
    """Traced, but not made into machine code, which takes half a minute on a CPU; the default config does that with plain rows."""
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="aot_eager"))
    cell, inputs, outputs, expected = case(name, "torch_compile")
    assert not definition.check(cell, inputs, outputs, expected).error


@pytest.mark.parametrize(
    ("packed", "scales"), [("fp8_row", [2.0, 1.0, 1.0]), ("fp8_block128", [[2.0, 1.0], [1.0, 1.0], [1.0, 1.0]])]
)
def test_numbers_worked_out_by_hand(packed, scales):
    """Rows whose largest element is 896, 2**-120 and none, rounding to even, and a group of two elements."""
    cell = cell_of("pack", tokens=3, hidden=130, experts=1, top_k=1, packed=packed)
    x = torch.zeros(3, 130, dtype=torch.bfloat16)
    x[0, :6] = torch.tensor([-896, 34, 38, 36, 2**-9, 1.5 * 2**-8])  # / 2: -448, 17, 19, 18, 2**-10, 1.5 * 2**-9
    x[0, 128:] = torch.tensor([448, 17])
    x[1, 0] = 2**-120
    order = torch.tensor([0, 1, 2], dtype=torch.int32)
    found = definition.reference(cell, {"x": x, "order": order})
    assert torch.equal(found["scales"], torch.tensor(scales))
    expected = torch.zeros(3, 130)
    expected[0, :6] = torch.tensor([-448, 16, 20, 18, 0, 2**-8])
    expected[0, 128:] = torch.tensor([448, 16]) if packed == "fp8_block128" else torch.tensor([224, 8])
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
    faults |= {
        "scale": (scales, (row, -1), scales[row, -1] * (1 + 2**-21)),
        "no scale": (scales, (row, 0), scales[row, 0] * torch.nan),
    }
    if empty is not None:
        faults |= {"padding": (bits, (empty, 7), zero + 1), "scale of padding": (scales, (empty, 0), scales[row, 0])}
    for what, (tensor, place, value) in faults.items():
        kept = tensor[place].clone()
        tensor[place] = value
        assert definition.check(cell, inputs, outputs, expected).error, what
        tensor[place] = kept
    assert not definition.check(cell, inputs, outputs, expected).error


def packing(hidden: int, group: int | None, tokens: int = 1) -> Pack:
    """A problem whose format has one scale per `group` elements, which its caller has put into the table, or per row."""
    return Pack(tokens, hidden, 2, 2 * tokens, "bf16", "fp8_row" if group is None else f"fp8_block{group}", False)


@pytest.mark.parametrize("hidden", [1, 13, 64, 100, 128, 130, 300, 1000, 2880, 4096, 4097, 7168, 8191, 32768])
@pytest.mark.parametrize("tokens", [1, 16384])
def test_lanes_that_reduce_together_hold_one_scale(hidden, tokens, monkeypatch):
    """Of every tiling that the CuTe kernel chooses: each element once, and by thread and vector the group it is in."""
    cute_pack_fp8 = pytest.importorskip("moe_routing_kernels.pack.cute_pack_fp8")
    sizes = [1, 2, 4, 8, 16, 24, 32, 48, 64, 100, 128, 192, 256, 512, 768, 1000, 1024, 2048]
    added = {f"fp8_block{n}": replace(formats.FORMATS["fp8_block128"], name=f"fp8_block{n}", group=n) for n in sizes}
    monkeypatch.setattr(formats, "FORMATS", MappingProxyType({**formats.FORMATS, **added}))
    ran = []
    for size in (None, *sizes):
        problem = packing(hidden, size, tokens)
        if cute_pack_fp8.unsupported(problem):
            continue
        group = problem.group
        ran.append(size)
        tiling = cute_pack_fp8.choose_tiling(tokens, hidden, group)
        layout = cute_pack_fp8.scale_layout(tiling, group)
        tile, v, lane = np.ix_(range(tiling.tiles), range(tiling.vectors), range(tiling.lanes))
        vector = tile * tiling.lanes * tiling.vectors + v * tiling.lanes + lane  # as in load_row
        inside = vector < tiling.row_vectors
        assert sorted(vector[inside]) == list(range(tiling.row_vectors)) and tiling.threads % tiling.lanes == 0
        side = lane % 32 // (32 // layout.scales_per_access)
        scale = tile * layout.scales_per_tile(tiling) + v // layout.vectors_per_scale * layout.scales_per_access + side
        for element in (vector * tiling.width, vector * tiling.width + tiling.width - 1):
            assert (element // group == scale)[inside].all(), (hidden, group, tiling)
        assert tiling.lanes == 32 or tiling.tiles == 1, "a scale of several warps is that of the whole block"
        assert tiling.vectors % layout.vectors_per_scale == 0 and layout.scales_per_tile(tiling) <= 32, (
            "a lane of a tile writes one scale"
        )
        assert tiling.vectors * tiling.width <= 64, "it fits the registers"
    assert 128 in ran, "of the block formats the project has this one runs on every row"
    assert hidden % 8 or {8, 16, 32, 64, 128, 256, 512, 768, 1024} - {hidden} <= set(ran)


def test_rows_and_groups_that_no_block_holds_are_refused(monkeypatch):
    cute_pack_fp8 = pytest.importorskip("moe_routing_kernels.pack.cute_pack_fp8")
    added = {
        f"fp8_block{n}": replace(formats.FORMATS["fp8_block128"], name=f"fp8_block{n}", group=n) for n in (4, 48, 2048)
    }
    monkeypatch.setattr(formats, "FORMATS", MappingProxyType({**formats.FORMATS, **added}))
    assert "up to 8192 elements (in vectors of 1)" in cute_pack_fp8.unsupported(packing(8193, None))
    assert cute_pack_fp8.unsupported(packing(8193, 128)) is None
    for group in (4, 48, 2048):
        reason = cute_pack_fp8.unsupported(packing(4096, group))
        assert "a power of two from 8 to 256 elements or a multiple of 256 up to 1024" in reason
        assert reason.endswith(f"not {group}")


def test_an_element_that_differs_within_half_a_step_is_a_tie():
    cell, inputs, outputs, expected = case("row")
    same = expected | {"packed": outputs["packed"].clone()}
    assert definition.check(cell, inputs, outputs, same).ties == 0
    same["packed"].view(torch.uint8)[0, 0] ^= 1
    assert definition.check(cell, inputs, outputs, same).ties == 1


@pytest.mark.parametrize("packed", ["fp8_row", "fp8_block128"])
def test_the_scale_of_padding_is_one(packed):
    """To the last bit: scales of rows alone may be off by one."""
    cell, inputs, outputs, expected = case_of(CELLS["row_padded"].but(packed=packed))
    for row, right in (
        (int((inputs["order"] < 0).nonzero()[0]), False),
        (int((inputs["order"] >= 0).nonzero()[0]), True),
    ):
        scales = outputs["scales"].clone()
        scales[row] = torch.nextafter(scales[row], torch.tensor(9.0))
        found = definition.check(cell, inputs, outputs | {"scales": scales}, expected)
        assert (found.error is None) == right, found
