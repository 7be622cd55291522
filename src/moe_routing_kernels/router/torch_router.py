"""The projection in float32 (both operands widened, as Hugging Face's DeepSeek-V3 does) and the rule in plain torch.

`matmul`: the projection as one library GEMM with float32 output, then an implementation of `gate`; not fused.
"""

from collections.abc import Callable
from types import ModuleType

import torch
import torch.nn.functional as F
from torch import Tensor

from moe_routing_kernels.gate import torch_gate
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


def unsupported_matmul(problem: Router, *, gate: str) -> str | None:
    """Why the gate cannot run this problem, or None."""
    module = _module(gate)
    return module.unsupported(problem.gate) if hasattr(module, "unsupported") else None


def precompile_matmul(problem: Router, arch: str, *, gate: str) -> None:
    """Put the gate's kernel into the cache, where it has one to compile; needs no GPU."""
    module = _module(gate)
    if hasattr(module, "precompile"):
        module.precompile(problem.gate, arch)


def bind_matmul(
    problem: Router,
    *,
    x: Tensor,
    router_weight: Tensor,
    topk_ids: Tensor,
    topk_weights: Tensor,
    bias: Tensor | None = None,
    gate: str,
) -> Callable[[], None]:
    """Bind x (T, H), router_weight (E, H), bias (E,) for rules that have one -> topk_ids (T, k), topk_weights (T, k)."""
    transposed = router_weight.T
    logits = torch.empty(len(x), len(router_weight), dtype=torch.float32, device=x.device)
    choose = _module(gate).bind(problem.gate, logits=logits, bias=bias, topk_ids=topk_ids, topk_weights=topk_weights)

    def run() -> None:
        torch.mm(x, transposed, out_dtype=torch.float32, out=logits)
        choose()

    return run


def _module(gate: str) -> ModuleType:
    """The implementation `torch` or `cute` of gate."""
    if gate == "torch":
        return torch_gate
    from moe_routing_kernels.gate import cute_gate  # needs the CuTe DSL, which `torch` does not

    return cute_gate
