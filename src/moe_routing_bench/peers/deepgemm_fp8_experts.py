"""Experts of e4m3 rows and e4m3 weights by DeepGEMM's grouped products (tokenspeed-deepgemm 2.5.0), scales of 128 numbers on both sides.

Strategy: that of `deepgemm_experts`, in 8 bits; each 128 columns' sums are promoted to float32 with both scales. Before a product the library
brings the scales of rows into columns, and between the products torch activates and our Triton kernel quantises each row again, which
is declared (`rounded_inner`): all are part of the cost.

FLOPs: 6 R H I over the rows in use, with the padding, at twice the rate of 16 bits; floor: as in `cute_fp8`.
"""

from collections.abc import Callable

from torch import Tensor

from moe_routing_bench.peers.deepgemm_experts import BLOCK, blocks_of_rows
from moe_routing_kernels.experts import Experts
from moe_routing_kernels.experts.common import activate

_FORMATS = ("bf16", "fp8_block128", "e4m3_block128")  # of activations, packed rows and weights


def unsupported(problem: Experts) -> str | None:
    """Why this problem cannot run, or None."""
    if problem.align % BLOCK:
        return f"DeepGEMM takes rows of experts in whole blocks of {BLOCK} (layout block{BLOCK})"
    given = (problem.dtype, problem.packed, problem.weights)
    if given != _FORMATS:
        return f"takes activations, rows and weights of {', '.join(_FORMATS)}, not {', '.join(given)}"
    if problem.hidden % BLOCK or problem.intermediate % BLOCK:
        return f"takes hidden and intermediate that are multiples of {BLOCK}, so that no group of a scale is shorter"
    return "DeepGEMM has no biases" if problem.biased else None


def bind(
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

    from moe_routing_bench.peers import requantise

    number, expert_of = blocks_of_rows(problem, packed, offsets)
    sums = y.new_empty(len(y), w13.shape[1])
    activated = y.new_empty(len(y), problem.intermediate)
    quantise, inner, inner_scales = requantise.bind(problem, activated)

    def run() -> None:
        number()
        multiply((packed, scales), (w13, w13_scales), sums, expert_of)
        activate(problem.activation, sums, activated)
        quantise()
        multiply((inner, inner_scales), (w2, w2_scales), y, expert_of)

    return run
