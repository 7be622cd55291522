"""vLLM's kernels of single operations (vllm 0.33.0, `_moe_C_stable_libtorch`).

`gate`: fused gates, for the rules that its kernels compute.

| rule | kernel |
|---|---|
| `softmax_topk_renorm`, `softmax_topk` | `topk_softmax`: the softmax over all experts in registers, then k times the largest of a row's threads |
| `llama4`, `sigmoid_renorm` | `topk_sigmoid`, likewise |
| `sqrtsoftplus_renorm` | `topk_softplus_sqrt`, likewise |
| `deepseek_v3` | `grouped_topk`: a warp per group, then the groups' experts; it allocates its results |

Where there is no kernel for a number of experts, softmax and sigmoid go through a workspace and k passes of a block per token. All
but the last also write the source row of every assignment, (T, k) int32, which is part of their cost.

Compulsory bytes: T * E * itemsize + 8 * T * k; floor: reading the logits.

`permute` (`moe_prepare_scatter`): the sort of assignments, for compact rows of all experts. CUB's stable radix sort of (expert, assignment), then a kernel for the experts' first rows and the inverse. It is what
vLLM's `moe_permute` does before it copies rows. First rows come as int64: two kernels of torch make offsets and counts of them,
which is part of this peer's cost.

Compulsory bytes: 12 * T * k + 8 * E; floor: launches.

`routing` (`moe_permute`): permute and pack fused, with the buffers that vLLM keeps from layer to layer. CUB's stable radix sort of (expert, assignment), a kernel for the experts' first rows, and one that copies rows, a block of
256 threads each, while its first thread writes the inverse.

`combine` (`moe_unpermute`): a block of 256 threads per token sums its k rows in float32. Its `moe_sum` has another boundary: it adds rows that were weighted before and lie by token, (T, k, H), without an index.

Compulsory bytes: R * H * itemsize + 8 * T * k + T * H * itemsize; floor: those over the copy bandwidth.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from moe_routing_bench.peers.loading import VLLM
from moe_routing_kernels.combine import Combine
from moe_routing_kernels.formats import FORMATS
from moe_routing_kernels.gate import Gate
from moe_routing_kernels.permute import Permute
from moe_routing_kernels.routers import ROUTERS
from moe_routing_kernels.routing import Routing

_SOFTPLUS_EXPERTS = (1, 2, 4, 8, 16, 32, 64, 128, 192, 256, 320, 384, 448, 512, 576)
_GROUPED_TOP_K = 32
_SIGMOID = 1  # `scoring_func` of grouped_topk


def unsupported_gate(problem: Gate) -> str | None:
    """Why vLLM's kernels cannot run a problem, or None."""
    formula, options = ROUTERS[problem.router].formula, ROUTERS[problem.router].options
    if formula == "softmax_topk" and "groups" in options:
        return "vLLM has no fused kernel for groups that are judged by their best expert"
    if formula == "softmax_topk" and ROUTERS[problem.router].scale != 1:
        return "vLLM's topk_softmax takes no scale of the weights"
    if formula == "sqrtsoftplus_topk" and problem.experts not in _SOFTPLUS_EXPERTS:
        return f"vLLM's topk_softplus_sqrt has no kernel for {problem.experts} experts"
    if "groups" in options and problem.top_k > _GROUPED_TOP_K:
        return f"vLLM's grouped_topk takes k up to {_GROUPED_TOP_K}, not {problem.top_k}"
    if formula not in ("softmax_topk", "topk_sigmoid", "sigmoid_topk", "sqrtsoftplus_topk"):
        return f"vLLM has no kernel for {problem.router}"
    return VLLM.missing()


def bind_gate(
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
    if router.formula == "softmax_topk":
        return lambda: operators.topk_softmax(*outputs, logits, router.options["renormalize"], None, None)
    if router.formula == "sqrtsoftplus_topk":
        return lambda: operators.topk_softplus_sqrt(*outputs, logits, True, scale, bias, None, None, None)
    renormalize = router.formula == "sigmoid_topk"
    return lambda: operators.topk_sigmoid(*outputs, logits, renormalize, bias, scale, None)


def _grouped(operators: Any, problem: Gate, logits: Tensor, bias: Tensor | None) -> Callable[[], dict[str, Tensor]]:
    options = ROUTERS[problem.router].options
    given = (options["groups"], options["keep_groups"], problem.top_k, True, options["scale"], bias, _SIGMOID)

    def run() -> dict[str, Tensor]:
        weights, ids = operators.grouped_topk(logits, *given)
        return {"topk_ids": ids, "topk_weights": weights}

    return run


def unsupported_permute(problem: Permute) -> str | None:
    """Why vLLM cannot run a problem, or None."""
    if problem.limit is not None:
        return "vLLM has no capacity limit"
    if problem.align != 1:
        return "vLLM's sort makes compact rows; its moe_align_block_size, which makes blocks, is vllm_align"
    return VLLM.missing()


def bind_permute(
    problem: Permute, *, topk_ids: Tensor, counts: Tensor, offsets: Tensor, order: Tensor, inverse: Tensor
) -> Callable[[], None]:
    """Bind topk_ids (T, k) int32 -> counts (E,), offsets (E + 1,), order (T k,), inverse (T, k), all int32."""
    operators, experts = VLLM.operators(), problem.experts
    first = torch.empty(experts + 1, dtype=torch.int64, device=topk_ids.device)
    assignments = torch.arange(topk_ids.numel(), dtype=torch.int32, device=topk_ids.device).view_as(topk_ids)
    size = operators.moe_permute_sort_workspace_size(topk_ids.numel(), experts)
    workspace = torch.empty(size, dtype=torch.int8, device=topk_ids.device)
    sorted_ids, mapped_ids = torch.empty_like(topk_ids), torch.empty_like(topk_ids)
    scratch = (workspace, sorted_ids, order.view_as(topk_ids), mapped_ids)

    def run() -> None:
        operators.moe_prepare_scatter(topk_ids, assignments, None, experts, experts, first, inverse, *scratch)
        offsets.copy_(first)
        torch.sub(offsets[1:], offsets[:-1], out=counts)

    return run


def unsupported_routing(problem: Routing) -> str | None:
    """Why it cannot run, or None."""
    if problem.layout.capacity is not None:
        return "vLLM has no capacity limit"
    if FORMATS[problem.dtype].row_bytes(problem.hidden) % 16:
        return "vLLM's moe_permute takes rows of whole 16 bytes"
    return VLLM.missing()


def bind_routing(
    problem: Routing, *, topk_ids: Tensor, x: Tensor, inverse: Tensor, packed: Tensor
) -> Callable[[], dict[str, Tensor]]:
    """Bind topk_ids (T, k) int32 and x (T, H) -> inverse (T, k) int32 and packed (T k, H); returns order (T k,) int32."""
    operators, (experts, top_k) = VLLM.operators(), (problem.layout.experts, problem.layout.top_k)
    rows = topk_ids.numel()
    first = torch.empty(experts + 1, dtype=torch.int64, device=x.device)
    assignments = torch.arange(rows, dtype=torch.int32, device=x.device).view_as(topk_ids)
    order = torch.empty(rows, dtype=torch.int32, device=x.device)
    workspace = torch.empty(operators.moe_permute_sort_workspace_size(rows, experts), dtype=torch.int8, device=x.device)
    scratch = (workspace, *(torch.empty_like(topk_ids) for _ in range(3)))
    given = (x, topk_ids, assignments, None, experts, experts, top_k)

    def run() -> dict[str, Tensor]:
        operators.moe_permute_with_scratch(*given, packed, first, inverse, order, *scratch)
        return {"order": order}

    return run


def unsupported_combine(problem: Combine) -> str | None:
    """Why vLLM cannot run a problem, or None."""
    if problem.dropping:
        return "vLLM's moe_unpermute takes a row for every assignment: none may be dropped"
    if FORMATS[problem.dtype].row_bytes(problem.hidden) % 16:
        return "vLLM's moe_unpermute takes rows of whole 16 bytes"
    return VLLM.missing()


def bind_combine(
    problem: Combine, *, y: Tensor, inverse: Tensor, topk_weights: Tensor, combined: Tensor
) -> Callable[[], None]:
    """Bind y (R, H), inverse (T, k) int32, topk_weights (T, k) float32; the call writes combined (T, H)."""
    operators, top_k = VLLM.operators(), problem.top_k
    return lambda: operators.moe_unpermute(y, topk_weights, inverse, None, top_k, combined)
