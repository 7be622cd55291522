"""vLLM's `moe_unpermute` as an optional peer (vllm 0.33.0): a block of 256 threads per token sums its k rows in float32.

Its `moe_sum` has another boundary: it adds rows that were weighted before and lie by token, (T, k, H), without an index.

Compulsory bytes: R * H * itemsize + 8 * T * k + T * H * itemsize; floor: those over the copy bandwidth.
"""

from collections.abc import Callable

from torch import Tensor

from moe_routing_bench.peers.libraries import VLLM
from moe_routing_kernels.combine import Combine
from moe_routing_kernels.formats import FORMATS


def unsupported(problem: Combine) -> str | None:
    """Why vLLM cannot run a problem, or None."""
    if problem.dropping:
        return "vLLM's moe_unpermute takes a row for every assignment: none may be dropped"
    if FORMATS[problem.dtype].row_bytes(problem.hidden) % 16:
        return "vLLM's moe_unpermute takes rows of whole 16 bytes"
    return VLLM.missing()


def bind(problem: Combine, *, y: Tensor, inverse: Tensor, topk_weights: Tensor, combined: Tensor) -> Callable[[], None]:
    """Bind y (R, H), inverse (T, k) int32, topk_weights (T, k) float32; the call writes combined (T, H)."""
    operators, top_k = VLLM.operators(), problem.top_k
    return lambda: operators.moe_unpermute(y, topk_weights, inverse, None, top_k, combined)
