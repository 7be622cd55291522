"""The row map against a loop over assignments, and how many rows a capacity and a layout allow."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_routing_bench.grid.cell import Cell
from moe_routing_bench.workload.row_map import row_layout, row_map
from moe_routing_kernels.permute import LAYOUTS, RowLayout, capacity_of


@st.composite
def routings(draw):
    """A layout and ids (T, k) int32 without an expert twice in a row, skewed towards the first experts."""
    experts = draw(st.integers(1, 9))
    top_k = draw(st.integers(1, experts))
    rows = draw(st.lists(st.permutations(range(experts)), min_size=1, max_size=40))
    if draw(st.booleans()):
        rows = [rows[0]] * len(rows)
    layout = draw(st.sampled_from(LAYOUTS))
    factor = draw(st.sampled_from([0.01, 0.5, 1.0, 1.25, 2.5] + [None] * (layout != "padded")))
    capacity = None if factor is None else capacity_of(factor, len(rows), top_k, experts)
    return RowLayout(len(rows), top_k, experts, capacity, layout), np.array([row[:top_k] for row in rows], np.int32)


def by_hand(layout, ids):
    """Rows of each expert, in the order of the assignments, as many as fit."""
    rows = [[] for _ in range(layout.experts)]
    for assignment, expert in enumerate(ids.reshape(-1)):
        if layout.capacity is None or len(rows[expert]) < layout.capacity:
            rows[expert].append(assignment)
    return rows


def padded_size(layout, kept):
    if layout.layout == "padded":
        return layout.capacity
    block = {"compact": 1, "block64": 64, "block128": 128}[layout.layout]
    return (kept + block - 1) // block * block


@settings(max_examples=150, deadline=None)
@given(routings())
def test_agrees_with_a_loop(case):
    layout, ids = case
    found, rows = row_map(layout, ids), by_hand(layout, ids)
    assert found.counts.tolist() == [len(one) for one in rows]
    starts = np.cumsum([0] + [padded_size(layout, len(one)) for one in rows])
    assert found.offsets.tolist() == starts.tolist()
    assert layout.used(np.bincount(ids.reshape(-1), minlength=layout.experts).tolist()) == starts[-1]
    expected = np.full(max(1, starts[-1]), -1)
    for start, one in zip(starts, rows, strict=False):
        expected[start : start + len(one)] = one
    assert found.order.tolist() == expected.tolist()
    assert {a.dtype for a in (found.counts, found.offsets, found.order, found.inverse)} == {np.dtype(np.int32)}


@settings(max_examples=100, deadline=None)
@given(routings(), st.integers(0, 5))
def test_order_and_inverse_are_one_bijection_of_the_kept(case, spare):
    layout, ids = case
    found = row_map(layout, ids, layout.rows + spare)
    assert len(found.order) == layout.rows + spare, "the bound holds for any routing"
    flat = found.inverse.reshape(-1)
    kept = np.flatnonzero(flat >= 0)
    assert found.order[flat[kept]].tolist() == kept.tolist()
    assert (found.order >= 0).sum() == len(kept) == found.counts.sum()
    expert_of_row = np.searchsorted(found.offsets, flat[kept], side="right") - 1
    assert expert_of_row.tolist() == ids.reshape(-1)[kept].tolist()
    assert found.inverse.shape == ids.shape and (flat >= -1).all()


def test_one_token_one_expert():
    found = row_map(RowLayout(1, 1, 1), np.zeros((1, 1), np.int32))
    assert (found.counts.tolist(), found.offsets.tolist()) == ([1], [0, 1])
    assert (found.order.tolist(), found.inverse.tolist()) == ([0], [[0]])


@pytest.mark.parametrize(("layout", "rows"), [("compact", 3), ("padded", 12), ("block64", 64)])
def test_everything_on_one_expert_keeps_its_first_tokens(layout, rows):
    found = row_map(RowLayout(12, 1, 4, capacity_of(1.0, 12, 1, 4), layout), np.full((12, 1), 2, np.int32))
    assert found.counts.tolist() == [0, 0, 3, 0] and found.offsets[-1] == rows
    first = int(found.offsets[2])
    assert found.order[first : first + 3].tolist() == [0, 1, 2]
    assert found.inverse.reshape(-1).tolist() == [first, first + 1, first + 2] + [-1] * 9


@pytest.mark.parametrize(
    ("factor", "tokens", "experts", "top_k", "capacity"),
    [
        (1.0, 64, 8, 2, 16),
        (1.25, 64, 8, 2, 20),
        (1.0, 10, 3, 1, 4),  # rounded up
        (1.1, 90, 9, 1, 11),  # 1.1 * 90 is 99.00000000000001 in floating point
        (1e-9, 64, 8, 2, 1),  # never nothing at all
        (100.0, 64, 8, 2, 64),  # never more than every token
    ],
)
def test_capacity(factor, tokens, experts, top_k, capacity):
    assert capacity_of(factor, tokens, top_k, experts) == capacity


@pytest.mark.parametrize(
    ("values", "layout"),
    [
        ({}, RowLayout(48, 3, 16, None, "compact", 1)),
        ({"ep": None, "layout": "block16"}, RowLayout(48, 3, 16, None, "block16", 1)),
        ({"ep": 4, "capacity_factor": 1.5}, RowLayout(48, 3, 4, capacity_of(1.5, 48, 3, 16), "compact", 4)),
    ],
)
def test_the_layout_of_a_cell_is_that_of_its_first_rank(values, layout):
    """All tokens may come to its experts, and a capacity is that of all ranks."""
    sizes = {"tokens": 48, "top_k": 3, "experts": 16}
    assert row_layout(Cell("permute", "", tuple((sizes | values).items()))) == layout
