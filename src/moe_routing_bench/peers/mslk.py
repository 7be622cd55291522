"""Experts by MSLK's grouped matrix products (mslk-cuda 1.1.0, once part of FBGEMM), persistent CUTLASS kernels for Hopper.

`bf16` (`bf16bf16bf16_grouped_stacked`): CUTLASS's persistent grouped kernel for Hopper, a configuration picked from the sizes by a heuristic. It takes the rows per
expert as int64, which each call makes of `offsets`; torch's activation stands between the products. Both are part of the cost.

FLOPs: 6 R H I; floor: as in `triton_experts`.

`fp8` (`f8f8bf16_rowwise_grouped_stacked`): e4m3 rows and e4m3 weights, a scale per row of either. CUTLASS's persistent grouped kernel for Hopper, both scales multiplied in its epilogue. It takes the rows per expert as int64, which
each call makes of `offsets`, and allocates its result; between the products torch activates and our Triton kernel quantises each row
again, which is declared (`rounded_inner`): all are part of the cost.

FLOPs: 6 R H I at twice the rate of 16 bits; floor: as in `cute_fp8`.

`int4` (`bf16i4bf16_shuffled_grouped`): bf16 rows times int4 in groups of 128. CUTLASS's mixed-input grouped kernel for Hopper, weights on the M side and dequantised in registers, tiles picked by all rows together.
Weights are shuffled when bound by the library's own `preshuffle_i4`, as deployments do when they load a model. The kernel is given zero
points and ignores them, so formats that have them are left out. It takes the rows per expert as int64 and allocates its result; torch's
activation stands between the products: all are part of the cost.

FLOPs: 6 R H I; floor: as in `cute_quantised`.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from moe_routing_bench.peers.common import requantise
from moe_routing_bench.peers.loading import MSLK
from moe_routing_kernels.experts import Experts
from moe_routing_kernels.experts.common import activate, mixed_formats, other_activations, unaligned
from moe_routing_kernels.experts.dequant import Parts, once, parts
from moe_routing_kernels.formats import FORMATS


def unsupported_bf16(problem: Experts) -> str | None:
    """Why this problem cannot run, or None."""
    if problem.packed != "bf16":
        return f"MSLK's plain grouped product takes bf16 rows, not {problem.packed}"
    if problem.biased:
        return "MSLK has no biases"
    return unaligned(problem, "MSLK") or mixed_formats(problem) or MSLK.missing()


def bind_bf16(
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


_FORMATS = ("bf16", "fp8_row", "e4m3_row")  # of activations, packed rows and weights


def unsupported_fp8(problem: Experts) -> str | None:
    """Why this problem cannot run, or None."""
    given = (problem.dtype, problem.packed, problem.weights)
    if given != _FORMATS:
        return f"takes activations, rows and weights of {', '.join(_FORMATS)}, not {', '.join(given)}"
    if problem.hidden % 16 or problem.intermediate % 16:
        return f"MSLK takes {problem.weights} with hidden and intermediate that are multiples of 16 (16 bytes)"
    return "MSLK has no biases" if problem.biased else MSLK.missing()


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
    y: Tensor | None = None,
) -> Callable[[], dict[str, Tensor]]:
    """Bind packed (R, H) e4m3 and scales (R,) float32, offsets (E + 1,) int32, w13 (E, N, H) and w2 (E, H, I) e4m3 with scales (E, N, 1)
    and (E, H, 1); the call returns y (R, H) bfloat16, which MSLK allocates.

    Scales of weights become float32 when bound, as a model holds them.
    """
    multiply = MSLK.operators().f8f8bf16_rowwise_grouped_stacked
    up, down = ((w, s.squeeze(2).float().contiguous()) for w, s in ((w13, w13_scales), (w2, w2_scales)))
    sizes = torch.empty(problem.experts, dtype=torch.int64, device=packed.device)
    shape = (len(packed), problem.intermediate)
    activated = torch.empty(shape, dtype=FORMATS[problem.dtype].torch_dtype, device=packed.device)
    quantise, inner, inner_scales = requantise(problem, activated)

    def run() -> dict[str, Tensor]:
        torch.sub(offsets[1:], offsets[:-1], out=sizes)
        sums = multiply(packed, up[0], scales[:, None], up[1], sizes)
        activate(problem.activation, sums, activated)
        quantise()
        return {"y": multiply(inner, down[0], inner_scales[:, None], down[1], sizes)}

    return run


_GROUP = 128
_SIGNS = 0x88  # of both codes of a byte: a code less 8, in two's complement, is the code with its highest bit turned


def unsupported_int4(problem: Experts) -> str | None:
    """Why this problem cannot run, or None."""
    if (problem.dtype, problem.weights) != ("bf16", f"int4_g{_GROUP}"):
        given = f"{problem.dtype} and {problem.weights}"
        return f"MSLK's grouped product takes bf16 activations and weights int4_g{_GROUP}, not {given}"
    if problem.hidden % _GROUP or problem.intermediate % _GROUP:
        return f"MSLK takes {problem.weights} with hidden and intermediate that are multiples of {_GROUP}"
    if problem.biased:
        return "MSLK has no biases"
    return other_activations(problem) or MSLK.missing()


def bind_int4(
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
