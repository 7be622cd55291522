"""Shared by the experts: the activation, dequantised rows, and the formats that torch can multiply."""

import torch
import torch.nn.functional as F
from torch import Tensor

from moe_routing_kernels.activations import activation_of
from moe_routing_kernels.experts import Experts
from moe_routing_kernels.formats import FORMATS, dequantise
from moe_routing_kernels.layer import Layer
from moe_routing_kernels.pack import Pack


def activate(activation: str, preact: Tensor, out: Tensor | None = None) -> Tensor:
    """Pre-activations (..., 2 I), gate and up, or (..., I) of `relu2` -> activated (..., I), in `out` if not None. Keeps the dtype."""
    known = activation_of(activation)
    if known.value == "relu2":
        return torch.square(F.relu(preact), out=out)
    gate, up = preact.chunk(2, dim=-1)
    if known.limit is not None:
        gate, up = gate.clamp(max=known.limit), up.clamp(-known.limit, known.limit)
    if known.value == "gelu":
        value = F.gelu(gate, approximate="tanh")
    else:
        value = F.silu(gate) if known.alpha == 1 else gate * torch.sigmoid(known.alpha * gate)
    return torch.mul(value, up + known.shift if known.shift else up, out=out)


def feed_forward(
    activation: str,
    rows: Tensor,
    expert: int,
    w13: Tensor,
    w2: Tensor,
    b13: Tensor | None,
    b2: Tensor | None,
    out: Tensor,
) -> None:
    """The feed-forward network of expert `expert`: rows (n, H) -> out (n, H), with w13 (E, N, H), w2 (E, H, I) and biases."""
    up, down = w13[expert].T, w2[expert].T
    inner = activate(activation, rows @ up if b13 is None else torch.addmm(b13[expert], rows, up))
    torch.mm(inner, down, out=out) if b2 is None else torch.addmm(b2[expert], inner, down, out=out)


def experts_of_rows(offsets: Tensor, rows: int) -> Tensor:
    """The expert of each of `rows` rows that `offsets` (E + 1,) gives to experts: (rows,); nothing is read on the host.

    Rows of no expert get the last expert.
    """
    numbers = torch.arange(rows, dtype=offsets.dtype, device=offsets.device)
    return torch.searchsorted(offsets[1:], numbers, right=True).clamp_max(len(offsets) - 2)


def plain_rows(problem: Experts, packed: Tensor, scales: Tensor | None) -> Tensor:
    """Packed rows (R, H) in the dtype of the activations: quantised rows are multiplied by their scales (R,) or (R, groups)."""
    if not problem.packed_format.quantised:
        return packed
    assert scales is not None, f"{problem.packed} has scales"
    return dequantise(packed, scales, problem.packed_format).to(FORMATS[problem.dtype].torch_dtype)


def between(problem: Experts) -> Pack:
    """The problem that quantises the first GEMM's results as packed rows are: a pack that keeps each row's place."""
    return Pack(problem.rows, problem.intermediate, 1, problem.rows, problem.dtype, problem.packed, padding=False)


def unaligned(problem: Experts | Layer, library: str = "torch.nn.functional.grouped_mm") -> str | None:
    """Why the grouped GEMM of torch, or of another library, cannot take 16-bit rows of these sizes, or None."""
    if problem.hidden % 8 or problem.intermediate % 8:
        return f"{library} needs hidden and intermediate that are multiples of 8 (16 bytes)"
    return None


def other_rows(problem: Experts) -> str | None:
    """Why rows of this format cannot be operands of a 16-bit GEMM, or None."""
    return None if problem.packed in ("bf16", "fp16") else f"takes bf16 and fp16 rows, not {problem.packed}"


def mixed_formats(problem: Experts) -> str | None:
    """Why torch cannot multiply rows and weights of these formats, or None."""
    if FORMATS[problem.dtype].quantised or problem.weights != problem.dtype:
        return f"activations and weights need one plain format, not {problem.dtype} and {problem.weights}"
    if not problem.packed_format.quantised and problem.packed != problem.dtype:
        return f"rows need the format of the activations or a quantised one, not {problem.packed} with {problem.dtype}"
    return None


def not_quantised(problem: Experts) -> str | None:
    """Why there is nothing to dequantise, or None."""
    return None if problem.quantised_weights else f"takes quantised weights, not {problem.weights}"


def other_activations(problem: Experts) -> str | None:
    """Why rows cannot be multiplied in the format in which they are packed, or None."""
    if problem.packed != problem.dtype:
        return f"rows need the format of the activations, {problem.dtype}, not {problem.packed}"
    return None
