"""The rule in plain torch (`torch.topk`), eager or as one `torch.compile` graph."""

from collections.abc import Callable

import torch
from torch import Tensor

from moe_routing_kernels.gate import Gate
from moe_routing_kernels.routers import ROUTERS


def bind(
    problem: Gate,
    *,
    logits: Tensor,
    topk_ids: Tensor,
    topk_weights: Tensor,
    bias: Tensor | None = None,
    compiled: bool = False,
) -> Callable[[], None]:
    """Bind logits (T, E), bias (E,) for rules that have one -> topk_ids (T, k), topk_weights (T, k)."""
    rule, top_k = ROUTERS[problem.router].load(), problem.top_k

    def gate(logits: Tensor, bias: Tensor | None, ids_out: Tensor, weights_out: Tensor) -> None:
        ids, weights = rule(logits, top_k, bias)
        ids_out.copy_(ids)
        weights_out.copy_(weights)

    run = torch.compile(gate, dynamic=False) if compiled else gate
    return lambda: run(logits, bias, topk_ids, topk_weights)
