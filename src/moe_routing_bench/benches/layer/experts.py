"""Three ways to run SwiGLU experts over packed rows: y = (silu(x W1^T) * (x W3^T)) W2^T for every expert.

Each takes (cell, buffers, y) and returns the call that writes y (R, H) from buffers["packed"] (R, H), with w13 (E, 2 I, H)
holding W1 above W3, w2 (E, H, I), and offsets (E + 1,) int32.
"""

import itertools
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from moe_routing_bench.grid import Cell

LAYOUTS = {"loop": "compact", "bmm": "padded", "grouped_mm": "compact"}


def unsupported(name: str, cell: Cell) -> str | None:
    """Why this computation cannot run the cell, or None."""
    if name == "grouped_mm" and not hasattr(F, "grouped_mm"):
        return f"torch {torch.__version__} has no torch.nn.functional.grouped_mm"
    if name == "grouped_mm" and cell.dtype != "bf16":
        return f"torch.nn.functional.grouped_mm takes bf16 rows, this cell has {cell.dtype}"
    if name == "grouped_mm" and ((cell.hidden or 0) % 8 or (cell.intermediate or 0) % 8):
        return "torch.nn.functional.grouped_mm needs hidden and intermediate that are multiples of 8 (16 bytes)"
    return None


def _swiglu(gate_up: Tensor) -> Tensor:
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate) * up


def loop(cell: Cell, buffers: dict[str, Tensor], y: Tensor) -> Callable[[], None]:
    """One pair of matrix products an expert. The loads are read on the host every call: its true cost is the wall time."""
    packed, w13, w2 = buffers["packed"], buffers["w13"], buffers["w2"]

    def run() -> None:
        bounds = buffers["offsets"].tolist()
        for e, (first, end) in enumerate(itertools.pairwise(bounds)):
            if end > first:
                torch.mm(_swiglu(packed[first:end] @ w13[e].T), w2[e].T, out=y[first:end])

    return run


def bmm(cell: Cell, buffers: dict[str, Tensor], y: Tensor) -> Callable[[], None]:
    """One batched product over rows padded to the capacity: padding is computed too."""
    rows = buffers["packed"].view(cell.experts or 0, -1, cell.hidden or 0)
    w13, w2 = buffers["w13"].transpose(1, 2), buffers["w2"].transpose(1, 2)

    def run() -> None:
        torch.bmm(_swiglu(torch.bmm(rows, w13)), w2, out=y.view_as(rows))

    return run


def grouped_mm(cell: Cell, buffers: dict[str, Tensor], y: Tensor) -> Callable[[], None]:
    """`torch.nn.functional.grouped_mm` over compact rows; rows after the last expert are left as they are."""
    packed, ends = buffers["packed"], buffers["offsets"][1:]
    w13, w2 = buffers["w13"].transpose(1, 2), buffers["w2"].transpose(1, 2)

    def run() -> None:
        y.copy_(F.grouped_mm(_swiglu(F.grouped_mm(packed, w13, offs=ends)), w2, offs=ends))

    return run


COMPUTE = {"loop": loop, "bmm": bmm, "grouped_mm": grouped_mm}
