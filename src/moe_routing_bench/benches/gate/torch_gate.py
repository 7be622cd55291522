"""The rule in plain torch (`torch.topk`), eager or as one `torch.compile` graph."""

from collections.abc import Callable

import torch
from torch import Tensor

from moe_routing_bench.grid import Cell
from moe_routing_bench.routers import ROUTERS


def prepare(
    cell: Cell, inputs: dict[str, Tensor], outputs: dict[str, Tensor], *, compiled: bool = False
) -> Callable[[], None]:
    """Bind logits (T, E) and the selection bias; the call writes topk_ids and topk_weights."""
    rule, top_k = ROUTERS[cell.router or ""].load(), cell.top_k or 0

    def gate(logits: Tensor, bias: Tensor | None, ids_out: Tensor, weights_out: Tensor) -> None:
        ids, weights = rule(logits, top_k, bias)
        ids_out.copy_(ids)
        weights_out.copy_(weights)

    run = torch.compile(gate, dynamic=False) if compiled else gate
    return lambda: run(inputs["logits"], inputs.get("bias"), outputs["topk_ids"], outputs["topk_weights"])
