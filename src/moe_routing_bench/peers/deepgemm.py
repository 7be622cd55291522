"""Experts by DeepGEMM's grouped matrix products, in 16 bits (`bf16`) and in 8 (`fp8`) (tokenspeed-deepgemm 2.5.0, the same kernels as deepseek-ai/DeepGEMM).

`bf16`: persistent warp-specialised kernels for Hopper, compiled when they first run with these sizes, with tiles picked by a
heuristic. Each tile of 128 rows is of one expert, whose number is read from a list with an entry per row; tiles of none are left
out. The list is made of `offsets` in each call, and torch's activation stands between the products: both are part of the cost.

FLOPs: 6 R H I over the rows in use, with the padding; floor: as in `triton_experts`.

`fp8`: e4m3 rows and e4m3 weights, scales of 128 numbers on both sides. Each 128 columns' sums are promoted to float32 with both scales. Before a product the library
brings the scales of rows into columns, and between the products torch activates and our Triton kernel quantises each row again, which
is declared (`rounded_inner`): all are part of the cost.

FLOPs: 6 R H I over the rows in use, with the padding, at twice the rate of 16 bits; floor: as in `cute_fp8`.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from moe_routing_bench.peers.common import requantise
from moe_routing_kernels.experts import Experts
from moe_routing_kernels.experts.common import activate, mixed_formats

BLOCK = 128  # rows that are of one expert
_STEP = 64  # elements of the inner dimension that it takes at a time


def unsupported_bf16(problem: Experts) -> str | None:
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


def bind_bf16(
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


_FORMATS = ("bf16", "fp8_block128", "e4m3_block128")  # of activations, packed rows and weights


def unsupported_fp8(problem: Experts) -> str | None:
    """Why this problem cannot run, or None."""
    if problem.align % BLOCK:
        return f"DeepGEMM takes rows of experts in whole blocks of {BLOCK} (layout block{BLOCK})"
    given = (problem.dtype, problem.packed, problem.weights)
    if given != _FORMATS:
        return f"takes activations, rows and weights of {', '.join(_FORMATS)}, not {', '.join(given)}"
    if problem.hidden % BLOCK or problem.intermediate % BLOCK:
        return f"takes hidden and intermediate that are multiples of {BLOCK}, so that no group of a scale is shorter"
    return "DeepGEMM has no biases" if problem.biased else None


def bind_fp8(
    problem: Experts,
    *,
    packed: Tensor,
    scales: Tensor,
    offsets: Tensor,
    w13: Tensor,
    w2: Tensor,
    w13_scales: Tensor,
    w2_scales: Tensor,
    y: Tensor,
) -> Callable[[], None]:
    """Bind packed (R, H) e4m3 with scales (R, H / 128) float32, offsets (E + 1,) int32, w13 (E, N, H) and w2 (E, H, I) e4m3 with scales
    of 128 x 128, all contiguous -> y (R, H) bf16."""
    from deep_gemm import m_grouped_fp8_gemm_nt_contiguous as multiply  # pyright: ignore[reportMissingImports]

    number, expert_of = blocks_of_rows(problem, packed, offsets)
    sums = y.new_empty(len(y), w13.shape[1])
    activated = y.new_empty(len(y), problem.intermediate)
    quantise, inner, inner_scales = requantise(problem, activated)

    def run() -> None:
        number()
        multiply((packed, scales), (w13, w13_scales), sums, expert_of)
        activate(problem.activation, sums, activated)
        quantise()
        multiply((inner, inner_scales), (w2, w2_scales), y, expert_of)

    return run
