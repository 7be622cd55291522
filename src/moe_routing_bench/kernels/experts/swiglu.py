"""What experts share: the activation, rows as numbers, and which formats torch can multiply."""

import torch.nn.functional as F
from torch import Tensor

from moe_routing_bench.formats import FORMATS, dequantise
from moe_routing_bench.kernels.experts import Experts
from moe_routing_bench.kernels.layer import Layer


def swiglu(gate_up: Tensor) -> Tensor:
    """(..., 2 I) gate beside up -> (..., I): silu(gate) * up."""
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate) * up


def plain_rows(problem: Experts, packed: Tensor, scales: Tensor | None) -> Tensor:
    """Packed rows (R, H) in the dtype of the activations: quantised ones times their scales (R,) or (R, groups)."""
    if not problem.packed_format.quantised:
        return packed
    assert scales is not None, f"{problem.packed} has scales"
    return dequantise(packed, scales, problem.packed_format).to(FORMATS[problem.dtype].torch_dtype)


def unaligned(problem: Experts | Layer, library: str = "torch.nn.functional.grouped_mm") -> str | None:
    """Why the grouped product of torch, or of another library, cannot take 16-bit rows of these sizes, or None."""
    if problem.hidden % 8 or problem.intermediate % 8:
        return f"{library} needs hidden and intermediate that are multiples of 8 (16 bytes)"
    return None


def mixed_formats(problem: Experts) -> str | None:
    """Why torch cannot multiply rows and weights of these formats, or None."""
    if FORMATS[problem.dtype].quantised or problem.weights != problem.dtype:
        return f"activations and weights need one plain format, not {problem.dtype} and {problem.weights}"
    if not problem.packed_format.quantised and problem.packed != problem.dtype:
        return f"rows need the format of the activations or a quantised one, not {problem.packed} with {problem.dtype}"
    return None
