"""The projection in float32 (both operands widened, as Hugging Face's DeepSeek-V3 does) and the rule in plain torch."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from moe_routing_bench.grid import Cell
from moe_routing_bench.routers import ROUTERS


def prepare(
    cell: Cell, inputs: dict[str, Tensor], outputs: dict[str, Tensor], *, compiled: bool = False
) -> Callable[[], None]:
    """Bind x (T, H), router_weight (E, H) and the selection bias; the call writes topk_ids and topk_weights."""
    rule, top_k = ROUTERS[cell.router or ""].load(), cell.top_k or 0

    def route(x: Tensor, weight: Tensor, bias: Tensor | None, ids_out: Tensor, weights_out: Tensor) -> None:
        ids, weights = rule(F.linear(x.float(), weight.float()), top_k, bias)
        ids_out.copy_(ids)
        weights_out.copy_(weights)

    run = torch.compile(route, dynamic=False) if compiled else route
    x, weight = inputs["x"], inputs["router_weight"]
    return lambda: run(x, weight, inputs.get("bias"), outputs["topk_ids"], outputs["topk_weights"])
