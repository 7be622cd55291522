"""What `permute` computes, on what, and when an answer is right.

Inputs: topk_ids (T, k) int32. Outputs, all int32: counts (E,), offsets (E + 1,), order (row limit of the layout,) with -1
beyond the assignments, inverse (T, k). `row_map` defines them; every element is compared exactly.
"""

import torch
from torch import Tensor

from moe_routing_bench.benches.checks import Assignment, Check, Cost, both, exact, nbytes
from moe_routing_bench.grid.cell import Cell
from moe_routing_bench.workload.draw import draw_ids, generator
from moe_routing_bench.workload.row_map import row_layout, row_map
from moe_routing_kernels.permute import Permute


def problem(cell: Cell) -> Permute:
    """The sizes and the layout of a cell."""
    return row_layout(cell).problem


def build(cell: Cell, seed: int, device: str) -> dict[str, Tensor]:
    """Draw the inputs of one seed."""
    return {"topk_ids": draw_ids(cell, generator(seed, device)).contiguous()}


def empty_outputs(cell: Cell, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    """Outputs of the right shape, not initialised."""
    layout = row_layout(cell)
    shapes = {
        "counts": (layout.experts,),
        "offsets": (layout.experts + 1,),
        "order": (layout.rows,),
        "inverse": tuple(inputs["topk_ids"].shape),
    }
    return {
        name: torch.empty(shape, dtype=torch.int32, device=inputs["topk_ids"].device) for name, shape in shapes.items()
    }


def reference(cell: Cell, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    """The numpy row map, moved back to the device."""
    ids, layout = inputs["topk_ids"], row_layout(cell)
    known = row_map(layout, ids.cpu().numpy(), layout.rows)
    return {
        name: torch.from_numpy(getattr(known, name)).to(ids.device)
        for name in ("counts", "offsets", "order", "inverse")
    }


def check(
    cell: Cell,
    inputs: dict[str, Tensor],
    outputs: dict[str, Tensor],
    expected: dict[str, Tensor],
    *,
    order_only: bool = False,
    token_rows: bool = False,
) -> Check:
    """Every element of every output equal.

    An implementation may declare that it writes `order` alone, an expert's assignments in any order among its rows and numbers
    of no assignment in padding (`order_only`); or that `order` holds tokens, and an expert's rows lie in any order (`token_rows`).
    """
    if order_only:
        return exact(
            _by_expert(outputs["order"], expected, inputs), _by_expert(expected["order"], expected, inputs), "order"
        )
    if token_rows:
        return _tokens(cell, inputs, outputs, expected)
    result = Check()
    for name, want in expected.items():
        result = both(result, exact(outputs[name], want, name))
    return result


def _by_expert(order: Tensor, expected: dict[str, Tensor], inputs: dict[str, Tensor]) -> Tensor:
    """The assignments of `order` (rows,), sorted among the rows of each expert; what is no assignment comes last there, as T k."""
    assignments, bounds = inputs["topk_ids"].numel(), expected["offsets"][1:].contiguous()
    known = torch.where((order < 0) | (order > assignments), assignments, order).long()
    rows = torch.arange(len(order), dtype=bounds.dtype, device=order.device)
    expert = torch.searchsorted(bounds, rows, right=True)
    return (expert * (assignments + 1) + known).sort().values


def _tokens(cell: Cell, inputs: dict[str, Tensor], outputs: dict[str, Tensor], expected: dict[str, Tensor]) -> Check:
    """Counts and offsets equal; `inverse` takes each of an expert's rows once; `order` holds the token of each row."""
    result, rows = Check(), outputs["inverse"].reshape(-1).long()
    for name in ("counts", "offsets"):
        result = both(result, exact(outputs[name], expected[name], name))
    outside = int(((rows < 0) | (rows >= len(expected["order"]))).sum())
    if outside:
        return both(result, Check(mismatches=outside, error=f"inverse: {outside} of {len(rows)} rows out of range"))
    taken = torch.full_like(expected["order"], -1)
    taken[rows] = torch.arange(len(rows), dtype=taken.dtype, device=taken.device)
    chosen, known = (_by_expert(order, expected, inputs) for order in (taken, expected["order"]))
    result = both(result, exact(chosen, known, "inverse"))
    return both(result, exact(outputs["order"], taken.div(cell.top_k, rounding_mode="floor"), "order"))


def assignment(cell: Cell, inputs: dict[str, Tensor], expected: dict[str, Tensor]) -> Assignment:
    """Expert ids (T, k); the operation has no weights."""
    return Assignment(inputs["topk_ids"], inverse=expected["inverse"])


def cost(cell: Cell, inputs: dict[str, Tensor], outputs: dict[str, Tensor], expected: dict[str, Tensor]) -> Cost:
    """Read the ids once, write every output once."""
    return Cost(nbytes(*inputs.values()), nbytes(*outputs.values()))
