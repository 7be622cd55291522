"""What `combine` computes, on what, and when an answer is right.

Inputs: y (R, H) N(0, 1) in the cell's dtype, inverse (T, k) int32 (row or -1), weights (T, k) float32.
Output: combined (T, H), the sum over kept assignments of weight times row, accumulated in float32, rounded once.
"""

import torch
from torch import Tensor

from moe_routing_bench.benches.checks import Check, Cost, close, nbytes, tolerance
from moe_routing_bench.grid import Cell
from moe_routing_bench.row_map import row_map
from moe_routing_bench.workload import draw_ids, generator, randn


def build(cell: Cell, seed: int, device: str) -> dict[str, Tensor]:
    """Draw the inputs of one seed."""
    rng = generator(seed, device)
    ids = draw_ids(cell, rng).contiguous()
    known = row_map(cell, ids.cpu().numpy())
    return {
        "y": randn((len(known.order), cell.hidden or 0), cell.dtype or "", rng),
        "inverse": torch.from_numpy(known.inverse).to(device),
        "weights": torch.randn(ids.shape, generator=rng, device=device).softmax(1),
        "topk_ids": ids,
    }


def empty_outputs(cell: Cell, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    """Outputs of the right shape, not initialised."""
    return {"combined": inputs["y"].new_empty(cell.tokens or 0, cell.hidden or 0)}


def reference(cell: Cell, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    """One expert choice at a time in float32 (float64 for float32 inputs)."""
    wide = torch.float64 if cell.dtype == "fp32" else torch.float32
    y, inverse = inputs["y"], inputs["inverse"].long()
    total = torch.zeros(cell.tokens or 0, cell.hidden or 0, dtype=wide, device=y.device)
    for j in range(cell.top_k or 0):
        weight = torch.where(inverse[:, j] >= 0, inputs["weights"][:, j], 0.0).to(wide)
        total += weight.unsqueeze(1) * y[inverse[:, j].clamp_min(0)].to(wide)
    return {"combined": total}


def check(cell: Cell, inputs: dict[str, Tensor], outputs: dict[str, Tensor], expected: dict[str, Tensor]) -> Check:
    """One rounding to the cell's dtype; in float32 also the k roundings of the sum."""
    roundings = 1 + 2 * (cell.top_k or 0) if cell.dtype == "fp32" else 1
    return close(outputs["combined"], expected["combined"], tolerance(cell.dtype or "", roundings), "combined")


def assignment(cell: Cell, inputs: dict[str, Tensor], expected: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Expert ids (T, k) and weights (T, k)."""
    return inputs["topk_ids"], inputs["weights"]


def cost(cell: Cell, inputs: dict[str, Tensor], outputs: dict[str, Tensor], expected: dict[str, Tensor]) -> Cost:
    """Read each kept row, index and weight once; write every token once."""
    kept = int((inputs["inverse"] >= 0).sum())
    read = kept * (cell.hidden or 0) * cell.dtype_bytes + nbytes(inputs["inverse"], inputs["weights"])
    return Cost(read, nbytes(outputs["combined"]))
