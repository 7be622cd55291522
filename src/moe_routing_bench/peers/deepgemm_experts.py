"""Experts by DeepGEMM's grouped matrix products (tokenspeed-deepgemm 2.5.0, the same kernels as deepseek-ai/DeepGEMM).

Strategy: persistent warp-specialised kernels for Hopper, compiled when they first run with these sizes, with tiles picked by a
heuristic. Each tile of 128 rows is of one expert, whose number is read from a list with an entry per row; tiles of none are left
out. The list is made of `offsets` in each call, and torch's activation stands between the products: both are part of the cost.

FLOPs: 6 R H I over the rows in use, with the padding; floor: as in `triton_experts`.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from moe_routing_kernels.experts import Experts
from moe_routing_kernels.experts.common import activate, mixed_formats

BLOCK = 128  # rows that are of one expert
_STEP = 64  # elements of the inner dimension that it takes at a time


def unsupported(problem: Experts) -> str | None:
    """Why this problem cannot run, or None."""
    if problem.align % BLOCK:
        return f"DeepGEMM takes rows of experts in whole blocks of {BLOCK} (layout block{BLOCK})"
    if problem.packed != "bf16":
        return f"DeepGEMM's plain grouped product takes bf16 rows, not {problem.packed}"
    if problem.biased:
        return "DeepGEMM has no biases"
    if reason := mixed_formats(problem):
        return reason
    if problem.hidden % _STEP or problem.intermediate % _STEP:
        return f"DeepGEMM's product needs hidden and intermediate that are multiples of {_STEP}"
    return None


def bind(
    problem: Experts, *, packed: Tensor, offsets: Tensor, w13: Tensor, w2: Tensor, y: Tensor
) -> Callable[[], None]:
    """Bind packed (R, H), offsets (E + 1,) int32, w13 (E, N, H), w2 (E, H, I), all contiguous -> y (R, H)."""
    from deep_gemm import m_grouped_bf16_gemm_nt_contiguous as multiply  # pyright: ignore[reportMissingImports]

    number, expert_of = blocks_of_rows(problem, packed, offsets)
    sums = packed.new_empty(len(packed), w13.shape[1])

    def run() -> None:
        number()
        multiply(packed, w13, sums, expert_of)
        multiply(activate(problem.activation, sums), w2, y, expert_of)

    return run


def blocks_of_rows(problem: Experts, packed: Tensor, offsets: Tensor) -> tuple[Callable[[], None], Tensor]:
    """A call that numbers each of the packed rows (R, H) with its expert by `offsets` (E + 1,), -1 where it has none, and what it writes to, (R,) int32."""
    rows, ends = torch.arange(len(packed), dtype=torch.int32, device=packed.device), offsets[1:]
    expert_of = torch.empty_like(rows)

    def number() -> None:
        torch.searchsorted(ends, rows, right=True, out_int32=True, out=expert_of)
        expert_of.masked_fill_(expert_of == problem.experts, -1)

    return number, expert_of
