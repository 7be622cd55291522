"""SGLang's kernels of single operations (sglang-kernel 0.4.3, `sm90/common_ops`).

`gate`: fused gates, for the rules that its kernels compute.

| rule | kernel |
|---|---|
| `softmax_topk_renorm`, `softmax_topk` | `topk_softmax`: the softmax over all experts in registers, then k times the largest of a row's threads |
| `llama4`, `sigmoid_renorm` | `topk_sigmoid`, likewise |
| `sigmoid_renorm` with 384 experts | `kimi_k2_moe_fused_gate`: a warp or a block per token; it allocates its results |
| `deepseek_v3` | `moe_fused_gate`: a thread per group, k times the largest of them; it allocates its results |

Where there is no kernel for a number of experts, softmax and sigmoid go through a workspace and k passes of a block per token.

Compulsory bytes: T * E * itemsize + 8 * T * k; floor: reading the logits.

`permute` (`prepare_moe_input`): the sort of assignments, for compact rows of all experts. A block per expert counts its assignments among all, one thread adds the counts up, and a block per expert takes rows for
its assignments by atomic additions. So the rows of an expert lie in another order in each call. `order` holds tokens where ours
holds assignments, which is all that copying rows needs. The counts lie beside the sizes of the products: a copy takes them out.

Compulsory bytes: 12 * T * k + 8 * E; floor: launches.

`combine` (`apply_shuffle_mul_sum`): a block per token sums its k rows. It takes weights of the rows' format: each call rounds them, which is part of this peer's cost and costs a rounding. Its `moe_sum`
and `moe_sum_reduce` have another boundary: they add rows that were weighted before and lie by token, (T, k, H), without an index.

Compulsory bytes: R * H * itemsize + 8 * T * k + T * H * itemsize; floor: those over the copy bandwidth.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from moe_routing_bench.peers.loading import SGLANG
from moe_routing_kernels.combine import Combine
from moe_routing_kernels.formats import FORMATS
from moe_routing_kernels.gate import Gate
from moe_routing_kernels.permute import Permute
from moe_routing_kernels.routers import ROUTERS

_KIMI_EXPERTS = 384
_GROUP = 32  # most experts of a group: those of one thread


def unsupported_gate(problem: Gate) -> str | None:
    """Why SGLang's kernels cannot run a problem, or None."""
    formula, options = ROUTERS[problem.router].formula, ROUTERS[problem.router].options
    if formula == "softmax_topk" and "groups" in options:
        return "SGLang has no fused kernel for groups that are judged by their best expert"
    if formula not in ("softmax_topk", "topk_sigmoid", "sigmoid_topk"):
        return f"SGLang's library has no kernel for {problem.router}"
    if "groups" not in options and ROUTERS[problem.router].scale != 1:
        return "the adapter of SGLang's gates without groups passes no scale of the weights"
    if "groups" in options:
        experts, size = problem.experts, problem.experts // options["groups"]
        if experts & (experts - 1) or size > _GROUP:
            return f"SGLang's moe_fused_gate takes a power of two of experts, up to {_GROUP} per group, not {experts}"
        if problem.dtype != "fp32":
            return f"SGLang's moe_fused_gate rounds scores to the format of the logits, {problem.dtype}"
    return SGLANG.missing()


def bind_gate(
    problem: Gate, *, logits: Tensor, topk_ids: Tensor, topk_weights: Tensor, bias: Tensor | None = None
) -> Callable[[], dict[str, Tensor] | None]:
    """Bind logits (T, E) and bias (E,) float32 or None -> topk_ids (T, k) int32, topk_weights (T, k) float32.

    Two of the kernels allocate both, which the call then returns.
    """
    router, operators, top_k = ROUTERS[problem.router], SGLANG.operators(), problem.top_k
    if "groups" in router.options:
        groups, keep, scale = (router.options[name] for name in ("groups", "keep_groups", "scale"))
        return _returned(lambda: operators.moe_fused_gate(logits, bias, groups, keep, top_k, 0, scale, True))
    if router.formula == "sigmoid_topk" and problem.experts == _KIMI_EXPERTS and problem.dtype == "fp32":
        return _returned(lambda: operators.kimi_k2_moe_fused_gate(logits, bias, top_k, True, 1.0, False))
    if router.formula == "softmax_topk":
        return lambda: operators.topk_softmax(topk_weights, topk_ids, logits, router.options["renormalize"], 0.0, None)
    renormalize = router.formula == "sigmoid_topk"
    return lambda: operators.topk_sigmoid(topk_weights, topk_ids, logits, renormalize, bias)


def _returned(gate: Callable[[], tuple[Tensor, Tensor]]) -> Callable[[], dict[str, Tensor]]:
    def run() -> dict[str, Tensor]:
        weights, ids = gate()
        return {"topk_ids": ids, "topk_weights": weights}

    return run


def unsupported_permute(problem: Permute) -> str | None:
    """Why SGLang cannot run a problem, or None."""
    if problem.limit is not None:
        return "SGLang has no capacity limit"
    if problem.align != 1:
        return "SGLang's sort makes compact rows; its moe_align_block_size, which makes blocks, is sglang_align"
    return SGLANG.missing()


def bind_permute(
    problem: Permute, *, topk_ids: Tensor, counts: Tensor, offsets: Tensor, order: Tensor, inverse: Tensor
) -> Callable[[], None]:
    """Bind topk_ids (T, k) int32 -> counts (E,), offsets (E + 1,), order (T k,) of tokens, inverse (T, k), all int32."""
    operators, experts = SGLANG.operators(), problem.experts
    up, down = (counts.new_empty(experts, 3) for _ in range(2))  # rows, columns and terms of both products per expert
    flat, width = inverse.view(-1), 8  # of the products, which are not run

    def run() -> None:
        operators.prepare_moe_input(topk_ids, offsets, None, up, down, order, flat, experts, width, width)
        counts.copy_(up[:, 0])

    return run


def unsupported_combine(problem: Combine) -> str | None:
    """Why SGLang cannot run a problem, or None."""
    if problem.dropping:
        return "SGLang's apply_shuffle_mul_sum takes a row for every assignment: none may be dropped"
    if problem.dtype not in ("bf16", "fp16"):
        return f"SGLang's apply_shuffle_mul_sum takes bf16 and fp16 rows, not {problem.dtype}"
    if FORMATS[problem.dtype].row_bytes(problem.hidden) % 16:
        return "SGLang's apply_shuffle_mul_sum takes rows of whole 16 bytes"
    return SGLANG.missing()


def bind_combine(
    problem: Combine, *, y: Tensor, inverse: Tensor, topk_weights: Tensor, combined: Tensor
) -> Callable[[], None]:
    """Bind y (R, H), inverse (T, k) int32, topk_weights (T, k) float32; the call writes combined (T, H)."""
    operators, weights = SGLANG.operators(), torch.empty_like(topk_weights, dtype=y.dtype)
    rows = inverse.view(-1)

    def run() -> None:
        weights.copy_(topk_weights)
        operators.apply_shuffle_mul_sum(y, combined, rows, weights.view(-1))

    return run
