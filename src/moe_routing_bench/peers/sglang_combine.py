"""SGLang's `apply_shuffle_mul_sum` as an optional peer (sglang-kernel 0.4.3): a block per token sums its k rows.

It takes weights of the rows' format: each call rounds them, which is part of this peer's cost and costs a rounding. Its `moe_sum`
and `moe_sum_reduce` have another boundary: they add rows that were weighted before and lie by token, (T, k, H), without an index.

Compulsory bytes: R * H * itemsize + 8 * T * k + T * H * itemsize; floor: those over the copy bandwidth.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from moe_routing_bench.peers.libraries import SGLANG
from moe_routing_kernels.combine import Combine
from moe_routing_kernels.formats import FORMATS


def unsupported(problem: Combine) -> str | None:
    """Why SGLang cannot run a problem, or None."""
    if problem.dropping:
        return "SGLang's apply_shuffle_mul_sum takes a row for every assignment: none may be dropped"
    if problem.dtype not in ("bf16", "fp16"):
        return f"SGLang's apply_shuffle_mul_sum takes bf16 and fp16 rows, not {problem.dtype}"
    if FORMATS[problem.dtype].row_bytes(problem.hidden) % 16:
        return "SGLang's apply_shuffle_mul_sum takes rows of whole 16 bytes"
    return SGLANG.missing()


def bind(problem: Combine, *, y: Tensor, inverse: Tensor, topk_weights: Tensor, combined: Tensor) -> Callable[[], None]:
    """Bind y (R, H), inverse (T, k) int32, topk_weights (T, k) float32; the call writes combined (T, H)."""
    operators, weights = SGLANG.operators(), torch.empty_like(topk_weights, dtype=y.dtype)
    rows = inverse.view(-1)

    def run() -> None:
        weights.copy_(topk_weights)
        operators.apply_shuffle_mul_sum(y, combined, rows, weights.view(-1))

    return run
