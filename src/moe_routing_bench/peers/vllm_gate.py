"""vLLM's fused gates as an optional peer (vllm 0.33.0, `_moe_C_stable_libtorch`), for the rules that its kernels compute.

| rule | kernel |
|---|---|
| `softmax_topk_renorm`, `softmax_topk` | `topk_softmax`: the softmax over all experts in registers, then k times the largest of a row's threads |
| `llama4`, `sigmoid_renorm` | `topk_sigmoid`, likewise |
| `sqrtsoftplus_renorm` | `topk_softplus_sqrt`, likewise |
| `deepseek_v3` | `grouped_topk`: a warp per group, then the groups' experts; it allocates its results |

Where there is no kernel for a number of experts, softmax and sigmoid go through a workspace and k passes of a block per token. All
but the last also write the source row of every assignment, (T, k) int32, which is part of their cost.

Compulsory bytes: T * E * itemsize + 8 * T * k; floor: reading the logits.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from moe_routing_bench.peers.libraries import VLLM
from moe_routing_kernels.gate import Gate
from moe_routing_kernels.routers import ROUTERS

_SOFTPLUS_EXPERTS = (1, 2, 4, 8, 16, 32, 64, 128, 192, 256, 320, 384, 448, 512, 576)
_GROUPED_TOP_K = 32
_SIGMOID = 1  # `scoring_func` of grouped_topk


def unsupported(problem: Gate) -> str | None:
    """Why vLLM's kernels cannot run a problem, or None."""
    module, options = ROUTERS[problem.router].module, ROUTERS[problem.router].options
    if module == "softmax_topk" and "groups" in options:
        return "vLLM has no fused kernel for groups that are judged by their best expert"
    if module == "softmax_topk" and ROUTERS[problem.router].scale != 1:
        return "vLLM's topk_softmax takes no scale of the weights"
    if module == "sqrtsoftplus_topk" and problem.experts not in _SOFTPLUS_EXPERTS:
        return f"vLLM's topk_softplus_sqrt has no kernel for {problem.experts} experts"
    if "groups" in options and problem.top_k > _GROUPED_TOP_K:
        return f"vLLM's grouped_topk takes k up to {_GROUPED_TOP_K}, not {problem.top_k}"
    if module not in ("softmax_topk", "topk_sigmoid", "sigmoid_topk", "sqrtsoftplus_topk"):
        return f"vLLM has no kernel for {problem.router}"
    return VLLM.missing()


def bind(
    problem: Gate, *, logits: Tensor, topk_ids: Tensor, topk_weights: Tensor, bias: Tensor | None = None
) -> Callable[[], dict[str, Tensor] | None]:
    """Bind logits (T, E) and bias (E,) float32 or None -> topk_ids (T, k) int32, topk_weights (T, k) float32.

    `grouped_topk` allocates both, which the call then returns.
    """
    router, operators = ROUTERS[problem.router], VLLM.operators()
    scale = router.options.get("scale", 1.0)
    if "groups" in router.options:
        return _grouped(operators, problem, logits, bias)
    outputs = (topk_weights, topk_ids, torch.empty_like(topk_ids))
    if router.module == "softmax_topk":
        return lambda: operators.topk_softmax(*outputs, logits, router.options["renormalize"], None, None)
    if router.module == "sqrtsoftplus_topk":
        return lambda: operators.topk_softplus_sqrt(*outputs, logits, True, scale, bias, None, None, None)
    renormalize = router.module == "sigmoid_topk"
    return lambda: operators.topk_sigmoid(*outputs, logits, renormalize, bias, scale, None)


def _grouped(operators: Any, problem: Gate, logits: Tensor, bias: Tensor | None) -> Callable[[], dict[str, Tensor]]:
    options = ROUTERS[problem.router].options
    given = (options["groups"], options["keep_groups"], problem.top_k, True, options["scale"], bias, _SIGMOID)

    def run() -> dict[str, Tensor]:
        weights, ids = operators.grouped_topk(logits, *given)
        return {"topk_ids": ids, "topk_weights": weights}

    return run
