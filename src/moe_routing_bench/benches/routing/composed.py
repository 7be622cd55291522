"""Routing end to end with identity experts, from the stages that the table names."""

from torch import Tensor

from moe_routing_bench.benches import composite
from moe_routing_bench.grid import Cell


def supports(cell: Cell, **chosen: str) -> str | None:
    """Why the chosen stages cannot run this cell, or None."""
    return composite.supports(cell, "compact", **chosen)


def prepare(cell: Cell, inputs: dict[str, Tensor], outputs: dict[str, Tensor], **chosen: str) -> composite.Staged:
    """Bind logits (T, E), x (T, H); the call writes combined (T, H)."""
    return composite.prepare(cell, inputs, outputs, "compact", None, **chosen)
