"""What `pack` computes, on what, and when an answer is right.

Inputs: x (T, H) N(0, 1) in the cell's dtype; order (R,) and inverse (T, k) int32 as `row_map` defines them, R the rows in
use. Output: packed (R, H), row r the token of assignment order[r], padding rows zero. Compared bit by bit.
With an fp8 dtype x is bfloat16, and packed is quantised: see `fp8`.
"""

import torch
from torch import Tensor

from moe_routing_bench.benches.checks import Check, Cost, exact, nbytes
from moe_routing_bench.benches.pack import fp8
from moe_routing_bench.grid import FP8, Cell
from moe_routing_bench.row_map import row_map
from moe_routing_bench.workload import draw_ids, generator, randn


def build(cell: Cell, seed: int, device: str) -> dict[str, Tensor]:
    """Draw the inputs of one seed."""
    rng = generator(seed, device)
    ids = draw_ids(cell, rng).contiguous()
    known = row_map(cell, ids.cpu().numpy())
    return {
        "x": randn((cell.tokens or 0, cell.hidden or 0), "bf16" if cell.dtype in FP8 else cell.dtype or "", rng),
        "order": torch.from_numpy(known.order).to(device),
        "inverse": torch.from_numpy(known.inverse).to(device),
        "topk_ids": ids,
    }


def empty_outputs(cell: Cell, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    """Outputs of the right shape, not initialised."""
    if cell.dtype in FP8:
        return fp8.empty_outputs(cell, len(inputs["order"]), inputs["x"].device)
    return {"packed": inputs["x"].new_empty(len(inputs["order"]), cell.hidden or 0)}


def reference(cell: Cell, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    """Index, then zero the padding."""
    if cell.dtype in FP8:
        return fp8.reference(cell, inputs)
    order = inputs["order"].long()
    packed = inputs["x"][order.clamp_min(0) // (cell.top_k or 1)]
    packed[order < 0] = 0
    return {"packed": packed}


def check(cell: Cell, inputs: dict[str, Tensor], outputs: dict[str, Tensor], expected: dict[str, Tensor]) -> Check:
    """A copy has no rounding: every element equal."""
    if cell.dtype in FP8:
        return fp8.check(cell, inputs, outputs, expected)
    return exact(outputs["packed"], expected["packed"], "packed")


def assignment(cell: Cell, inputs: dict[str, Tensor], expected: dict[str, Tensor]) -> tuple[Tensor, None]:
    """Expert ids (T, k); the operation has no weights."""
    return inputs["topk_ids"], None


def cost(cell: Cell, inputs: dict[str, Tensor], outputs: dict[str, Tensor], expected: dict[str, Tensor]) -> Cost:
    """Read each token that is sent anywhere once and one index a row; write every row once."""
    tokens = int((inputs["inverse"] >= 0).any(1).sum())
    row = (cell.hidden or 0) * cell.dtype_bytes
    return Cost(tokens * row + nbytes(inputs["order"]), nbytes(*outputs.values()))
