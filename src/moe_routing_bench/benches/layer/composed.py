"""The layer from the stages that the table names, with one of three ways to run the experts."""

from torch import Tensor

from moe_routing_bench.benches import composite
from moe_routing_bench.benches.layer import experts as compute
from moe_routing_bench.grid import Cell


def supports(cell: Cell, *, experts: str, **chosen: str) -> str | None:
    """Why the chosen stages or the expert computation cannot run this cell, or None."""
    return compute.unsupported(experts, cell) or composite.supports(cell, compute.LAYOUTS[experts], **chosen)


def prepare(
    cell: Cell, inputs: dict[str, Tensor], outputs: dict[str, Tensor], *, experts: str, **chosen: str
) -> composite.Staged:
    """Bind logits (T, E), x (T, H), w13 (E, 2 I, H), w2 (E, H, I); the call writes combined (T, H)."""
    return composite.prepare(cell, inputs, outputs, compute.LAYOUTS[experts], compute.COMPUTE[experts], **chosen)
