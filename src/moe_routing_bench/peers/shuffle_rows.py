"""`shuffle_rows` of vLLM (0.33.0) and SGLang (sglang-kernel 0.4.3) as optional peers: a block of 256 threads copies a row.

Strategy: each thread copies 16 bytes at a time; rows are in the order of the output. The kernel takes the token of each row where
`order` holds assignments, so each call divides them (R int32, read and written), which is part of the cost.

Compulsory bytes: (T + R) * H * itemsize + 4 * R; floor: those over the copy bandwidth.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from moe_routing_bench.peers.libraries import LIBRARIES
from moe_routing_kernels.formats import FORMATS
from moe_routing_kernels.pack import Pack


def unsupported(problem: Pack, *, library: str) -> str | None:
    """Why a library, `vLLM` or `SGLang`, cannot run a problem, or None."""
    if problem.packed != problem.dtype:
        return f"{library}'s shuffle_rows copies rows as they are, not as {problem.packed}"
    if problem.padding:
        return f"{library}'s shuffle_rows writes no padding rows"
    if FORMATS[problem.dtype].row_bytes(problem.hidden) % 16:
        return f"{library}'s shuffle_rows takes rows of whole 16 bytes"
    return LIBRARIES[library].missing()


def bind(
    problem: Pack, *, x: Tensor, order: Tensor, inverse: Tensor, packed: Tensor, library: str
) -> Callable[[], None]:
    """Bind x (T, H) and order (R,) int32; the call writes packed (R, H)."""
    operators, top_k, tokens = LIBRARIES[library].operators(), problem.top_k, torch.empty_like(order)

    def run() -> None:
        torch.div(order, top_k, rounding_mode="floor", out=tokens)
        operators.shuffle_rows(x, tokens, packed)

    return run
