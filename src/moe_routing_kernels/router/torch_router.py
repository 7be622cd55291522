"""The projection in float32 (both operands widened, as Hugging Face's DeepSeek-V3 does) and the rule in plain torch."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from moe_routing_kernels.router import Router
from moe_routing_kernels.routers import ROUTERS


def bind(
    problem: Router,
    *,
    x: Tensor,
    router_weight: Tensor,
    topk_ids: Tensor,
    topk_weights: Tensor,
    bias: Tensor | None = None,
    compiled: bool = False,
) -> Callable[[], None]:
    """Bind x (T, H), router_weight (E, H), bias (E,) for rules that have one -> topk_ids (T, k), topk_weights (T, k)."""
    rule, top_k = ROUTERS[problem.router].load(), problem.top_k

    def route(x: Tensor, weight: Tensor, bias: Tensor | None, ids_out: Tensor, weights_out: Tensor) -> None:
        ids, weights = rule(F.linear(x.float(), weight.float()), top_k, bias)
        ids_out.copy_(ids)
        weights_out.copy_(weights)

    run = torch.compile(route, dynamic=False) if compiled else route
    return lambda: run(x, router_weight, bias, topk_ids, topk_weights)
