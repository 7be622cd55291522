"""What `permute` computes, on what, and when an answer is right.

Inputs: topk_ids (T, k) int32. Outputs, all int32: counts (E,), offsets (E + 1,), order (row limit of the layout,) with -1
beyond the assignments, inverse (T, k). `row_map` defines them; every element is compared exactly.
"""

import torch
from torch import Tensor

from moe_routing_bench.benches.checks import Assignment, Check, Cost, both, exact, nbytes
from moe_routing_bench.grid.cell import Cell
from moe_routing_bench.kernels.permute import Permute
from moe_routing_bench.workload.draw import draw_ids, generator
from moe_routing_bench.workload.rows import row_layout, row_map


def problem(cell: Cell) -> Permute:
    """The sizes and the layout of a cell."""
    return row_layout(cell).problem


def build(cell: Cell, seed: int, device: str) -> dict[str, Tensor]:
    """Draw the inputs of one seed."""
    return {"topk_ids": draw_ids(cell, generator(seed, device)).contiguous()}


def empty_outputs(cell: Cell, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    """Outputs of the right shape, not initialised."""
    experts = cell.experts
    shapes = {
        "counts": (experts,),
        "offsets": (experts + 1,),
        "order": (row_layout(cell).rows,),
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


def check(cell: Cell, inputs: dict[str, Tensor], outputs: dict[str, Tensor], expected: dict[str, Tensor]) -> Check:
    """Every element of every output equal."""
    result = Check()
    for name, want in expected.items():
        result = both(result, exact(outputs[name], want, name))
    return result


def assignment(cell: Cell, inputs: dict[str, Tensor], expected: dict[str, Tensor]) -> Assignment:
    """Expert ids (T, k); the operation has no weights."""
    return Assignment(inputs["topk_ids"], inverse=expected["inverse"])


def cost(cell: Cell, inputs: dict[str, Tensor], outputs: dict[str, Tensor], expected: dict[str, Tensor]) -> Cost:
    """Read the ids once, write every output once."""
    return Cost(nbytes(*inputs.values()), nbytes(*outputs.values()))
