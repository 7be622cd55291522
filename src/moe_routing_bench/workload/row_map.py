"""Where every assignment's row goes: the reference of `permute`, in numpy, and what `pack` and `combine` are given.

An assignment a = t * k + j sends token t to its j-th expert. Rows are grouped by expert, stable in a. Tokens over an
expert's capacity are dropped in position order (the later assignments go). Layouts: ``compact`` (experts follow one
another), ``padded`` (every expert has exactly `capacity` rows), ``blockN`` (each expert's rows rounded up to N).
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from moe_routing_bench.grid.cell import Cell
from moe_routing_kernels.permute import RowLayout, capacity_of

Int32 = NDArray[np.int32]


@dataclass(frozen=True)
class RowMap:
    """`counts` (E,) kept rows per expert, `offsets` (E + 1,) first row of each expert and the number of rows in use,
    `order` (rows,) assignment of each row or -1 for padding, `inverse` (T, k) row of each assignment or -1 if dropped."""

    counts: Int32
    offsets: Int32
    order: Int32
    inverse: Int32


def row_layout(cell: Cell) -> RowLayout:
    """The layout of a cell's rows; without capacity factor or layout among the axes of its bench, all rows in compact order.

    Of several expert-parallel ranks it is that of the first, which has the first experts.
    """
    factor, ranks = cell.get("capacity_factor"), cell.get("ep") or 1
    capacity = None if factor is None else capacity_of(factor, cell.tokens, cell.top_k, cell.experts)
    layout = cell.get("layout") or "compact"
    return RowLayout(cell.tokens, cell.top_k, cell.experts // ranks, capacity, layout, ranks)


def row_map(layout: RowLayout, ids: Int32, rows: int | None = None) -> RowMap:
    """The row map of ids (T, k). `rows` is the length of `order`: by default the rows in use, at least 1."""
    experts, flat = layout.experts, np.minimum(ids.reshape(-1), layout.experts)  # other ranks' are one more
    by_expert = np.argsort(flat, kind="stable")
    loads = np.bincount(flat, minlength=experts + 1)
    first = np.concatenate([[0], np.cumsum(loads)])
    rank = np.empty(len(flat), np.int64)
    rank[by_expert] = np.arange(len(flat)) - np.repeat(first[:-1], loads)
    counts = np.minimum(loads[:experts], layout.limit)
    size = np.full(experts, layout.limit) if layout.padded else -(-counts // layout.align) * layout.align
    offsets = np.concatenate([[0], np.cumsum(size)])
    row = np.where((rank < layout.limit) & (flat < experts), offsets[flat] + rank, -1)
    order = np.full(max(1, int(offsets[-1])) if rows is None else rows, -1, np.int32)
    order[row[row >= 0]] = np.flatnonzero(row >= 0)
    return RowMap(counts.astype(np.int32), offsets.astype(np.int32), order, row.reshape(ids.shape).astype(np.int32))
