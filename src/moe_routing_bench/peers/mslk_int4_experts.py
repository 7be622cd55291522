"""Experts with 4-bit weights by MSLK's grouped product (mslk-cuda 1.1.0, `bf16i4bf16_shuffled_grouped`), bf16 rows times int4 in groups of 128.

Strategy: CUTLASS's mixed-input grouped kernel for Hopper, weights on the M side and dequantised in registers, tiles picked by all rows together.
Weights are shuffled when bound by the library's own `preshuffle_i4`, as deployments do when they load a model. The kernel is given zero
points and ignores them, so formats that have them are left out. It takes the rows per expert as int64 and allocates its result; torch's
activation stands between the products: all are part of the cost.

FLOPs: 6 R H I; floor: as in `cute_quantised`.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from moe_routing_bench.peers.libraries import MSLK
from moe_routing_kernels.experts import Experts
from moe_routing_kernels.experts.common import activate, other_activations
from moe_routing_kernels.experts.dequant import Parts, once, parts
from moe_routing_kernels.formats import FORMATS

_GROUP = 128
_SIGNS = 0x88  # of both codes of a byte: a code less 8, in two's complement, is the code with its highest bit turned


def unsupported(problem: Experts) -> str | None:
    """Why this problem cannot run, or None."""
    if (problem.dtype, problem.weights) != ("bf16", f"int4_g{_GROUP}"):
        given = f"{problem.dtype} and {problem.weights}"
        return f"MSLK's grouped product takes bf16 activations and weights int4_g{_GROUP}, not {given}"
    if problem.hidden % _GROUP or problem.intermediate % _GROUP:
        return f"MSLK takes {problem.weights} with hidden and intermediate that are multiples of {_GROUP}"
    if problem.biased:
        return "MSLK has no biases"
    return other_activations(problem) or MSLK.missing()


def bind(
    problem: Experts,
    *,
    packed: Tensor,
    offsets: Tensor,
    w13: Tensor,
    w2: Tensor,
    w13_scales: Tensor,
    w2_scales: Tensor,
    y: Tensor | None = None,
) -> Callable[[], dict[str, Tensor]]:
    """Bind packed (R, H), offsets (E + 1,) int32, w13 (E, N, H / 2) and w2 (E, H, I / 2) with scales (E, N, H / 128) and
    (E, H, I / 128), all contiguous; the call returns y (R, H), which MSLK allocates."""
    operators = MSLK.operators()
    both = parts(w13, w2, {"w13_scales": w13_scales, "w2_scales": w2_scales})
    up, down = (once(one, "MSLK", lambda one=one: shuffled(operators, one)) for one in both)
    sizes = torch.empty(problem.experts, dtype=torch.int64, device=packed.device)

    def run() -> dict[str, Tensor]:
        torch.sub(offsets[1:], offsets[:-1], out=sizes)
        sums = operators.bf16i4bf16_shuffled_grouped(packed, *up, sizes)
        return {"y": operators.bf16i4bf16_shuffled_grouped(activate(problem.activation, sums), *down, sizes)}

    return run


def shuffled(operators: Any, weights: Parts) -> tuple[Tensor, Tensor, Tensor]:
    """Weights (E, N, K) of int4_g128 -> what the product takes: elements (E, N, K / 2) int8, scales (E, K / 128, N) and zeros as many."""
    elements = weights["elements"].bitwise_xor(_SIGNS).view(torch.int8)
    scales = weights["scales"].to(FORMATS["bf16"].torch_dtype).mT.contiguous()
    found = [operators.preshuffle_i4(*one) for one in zip(elements, scales, strict=True)]
    shuffled_elements, shuffled_scales = (torch.stack(one) for one in zip(*found, strict=True))
    return shuffled_elements, shuffled_scales, torch.zeros_like(shuffled_scales)
