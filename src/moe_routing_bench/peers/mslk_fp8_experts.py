"""Experts of e4m3 rows and e4m3 weights by MSLK's grouped product (mslk-cuda 1.1.0, `f8f8bf16_rowwise_grouped_stacked`), a scale per row of either.

Strategy: CUTLASS's persistent grouped kernel for Hopper, both scales multiplied in its epilogue. It takes the rows per expert as int64, which
each call makes of `offsets`, and allocates its result; between the products torch activates and our Triton kernel quantises each row
again, which is declared (`rounded_inner`): all are part of the cost.

FLOPs: 6 R H I at twice the rate of 16 bits; floor: as in `cute_fp8`.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from moe_routing_bench.peers.libraries import MSLK
from moe_routing_kernels.experts import Experts
from moe_routing_kernels.experts.common import activate
from moe_routing_kernels.formats import FORMATS

_FORMATS = ("bf16", "fp8_row", "e4m3_row")  # of activations, packed rows and weights


def unsupported(problem: Experts) -> str | None:
    """Why this problem cannot run, or None."""
    given = (problem.dtype, problem.packed, problem.weights)
    if given != _FORMATS:
        return f"takes activations, rows and weights of {', '.join(_FORMATS)}, not {', '.join(given)}"
    if problem.hidden % 16 or problem.intermediate % 16:
        return f"MSLK takes {problem.weights} with hidden and intermediate that are multiples of 16 (16 bytes)"
    return "MSLK has no biases" if problem.biased else MSLK.missing()


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
    y: Tensor | None = None,
) -> Callable[[], dict[str, Tensor]]:
    """Bind packed (R, H) e4m3 and scales (R,) float32, offsets (E + 1,) int32, w13 (E, N, H) and w2 (E, H, I) e4m3 with scales (E, N, 1)
    and (E, H, 1); the call returns y (R, H) bfloat16, which MSLK allocates.

    Scales of weights become float32 when bound, as a model holds them.
    """
    from moe_routing_bench.peers import requantise

    multiply = MSLK.operators().f8f8bf16_rowwise_grouped_stacked
    up, down = ((w, s.squeeze(2).float().contiguous()) for w, s in ((w13, w13_scales), (w2, w2_scales)))
    sizes = torch.empty(problem.experts, dtype=torch.int64, device=packed.device)
    shape = (len(packed), problem.intermediate)
    activated = torch.empty(shape, dtype=FORMATS[problem.dtype].torch_dtype, device=packed.device)
    quantise, inner, inner_scales = requantise.bind(problem, activated)

    def run() -> dict[str, Tensor]:
        torch.sub(offsets[1:], offsets[:-1], out=sizes)
        sums = multiply(packed, up[0], scales[:, None], up[1], sizes)
        activate(problem.activation, sums, activated)
        quantise()
        return {"y": multiply(inner, down[0], inner_scales[:, None], down[1], sizes)}

    return run
