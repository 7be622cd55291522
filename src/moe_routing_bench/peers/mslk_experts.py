"""Experts by MSLK's grouped matrix products (mslk-cuda 1.1.0, `bf16bf16bf16_grouped_stacked`, once part of FBGEMM).

Strategy: CUTLASS's persistent grouped kernel for Hopper, a configuration picked from the sizes by a heuristic. It takes the rows per
expert as int64, which each call makes of `offsets`; torch's activation stands between the products. Both are part of the cost.

FLOPs: 6 R H I; floor: as in `triton_experts`.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from moe_routing_bench.peers.libraries import MSLK
from moe_routing_kernels.experts import Experts
from moe_routing_kernels.experts.common import activate, mixed_formats, unaligned


def unsupported(problem: Experts) -> str | None:
    """Why this problem cannot run, or None."""
    if problem.packed != "bf16":
        return f"MSLK's plain grouped product takes bf16 rows, not {problem.packed}"
    if problem.biased:
        return "MSLK has no biases"
    return unaligned(problem, "MSLK") or mixed_formats(problem) or MSLK.missing()


def bind(
    problem: Experts, *, packed: Tensor, offsets: Tensor, w13: Tensor, w2: Tensor, y: Tensor
) -> Callable[[], None]:
    """Bind packed (R, H), offsets (E + 1,) int32, w13 (E, N, H), w2 (E, H, I), all contiguous -> y (R, H)."""
    multiply = MSLK.operators().bf16bf16bf16_grouped_stacked
    sizes = torch.empty(problem.experts, dtype=torch.int64, device=packed.device)
    sums = packed.new_empty(len(packed), w13.shape[1])

    def run() -> None:
        torch.sub(offsets[1:], offsets[:-1], out=sizes)
        multiply(packed, w13, sizes, sums)
        multiply(activate(problem.activation, sums), w2, sizes, y)

    return run
