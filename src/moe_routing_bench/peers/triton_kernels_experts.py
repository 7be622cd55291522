"""Experts by OpenAI's triton_kernels, as sglang-kernel 0.4.3 carries them: `matmul_ogs` over ragged rows.

Strategy: persistent Triton kernels that load by TMA, tiles picked from the sizes by a heuristic. A table of which tile has which rows
of which expert, for each height of tiles, is made of the rows per expert in each call, and torch's activation stands between the
products: both are part of the cost. (Their own activation takes gate and up side by side, and rows of gpt-oss.)

FLOPs: 6 R H I; floor: as in `triton_experts`.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from moe_routing_kernels.experts import Experts
from moe_routing_kernels.experts.common import activate, mixed_formats, other_rows, unaligned


def unsupported(problem: Experts) -> str | None:
    """Why this problem cannot run, or None."""
    if problem.biased:
        return "the biases of triton_kernels are float32"
    return other_rows(problem) or unaligned(problem, "triton_kernels") or mixed_formats(problem)


def bind(
    problem: Experts, *, packed: Tensor, offsets: Tensor, w13: Tensor, w2: Tensor, y: Tensor
) -> Callable[[], None]:
    """Bind packed (R, H), offsets (E + 1,) int32, w13 (E, N, H), w2 (E, H, I), all contiguous -> y (R, H)."""
    from triton_kernels.matmul_ogs import RoutingData, matmul_ogs  # pyright: ignore[reportMissingImports]
    from triton_kernels.tensor_details.ragged_tensor import (  # pyright: ignore[reportMissingImports]
        make_ragged_tensor_metadata,
    )

    sizes, sums = torch.empty_like(offsets[1:]), packed.new_empty(len(packed), w13.shape[1])
    up, down = w13.mT, w2.mT

    def run() -> None:
        torch.sub(offsets[1:], offsets[:-1], out=sizes)
        tiles = RoutingData(None, sizes, problem.experts, 1, make_ragged_tensor_metadata(sizes, len(packed)))
        matmul_ogs(packed, up, None, tiles, y=sums)
        matmul_ogs(activate(problem.activation, sums), down, None, tiles, y=y)

    return run
