"""What adapters of several libraries have in common: limits and results of whole layers, and quantised rows between two products."""

from collections.abc import Callable, Collection

import torch
from torch import Tensor

from moe_routing_kernels.experts import Experts
from moe_routing_kernels.experts.common import between
from moe_routing_kernels.formats import empty_rows
from moe_routing_kernels.layer import Layer


def layer_unsupported(
    problem: Layer, library: str, activations: Collection[str], formats: Collection[str] = ("bf16", "fp16")
) -> str | None:
    """Why a library without capacities, with these activations and one of these formats throughout, cannot run a layer, or None."""
    if reason := dropping(problem, library):
        return reason
    if problem.activation not in activations:
        return f"{library} has no {problem.activation}"
    if not problem.dtype == problem.packed == problem.weights or problem.dtype not in formats:
        given = f"{problem.dtype}, {problem.packed} and {problem.weights}"
        return f"{library} takes tokens, rows and weights of one format ({', '.join(formats)}), not {given}"
    return None


def dropping(problem: Layer, library: str) -> str | None:
    """Why a library that gives every assignment a row cannot run a layer, or None."""
    if problem.layout.capacity is not None:
        return f"{library} has no capacity limit"
    if problem.layout.ranks > 1:
        return f"{library} is called for all experts here, not for those of one of {problem.layout.ranks} ranks"
    return None


def returned(total: Tensor, residual: Tensor | None) -> dict[str, Tensor]:
    """The outputs of a library that allocates its result (T, H), to which torch adds a residual (T, H) in place."""
    return {"combined": total if residual is None else total.add_(residual)}


def requantise(problem: Experts, activated: Tensor) -> tuple[Callable[[], object], Tensor, Tensor]:
    """The call that quantises activated (R, I) as packed rows are, and what it writes: (R, I) e4m3 and their scales float32."""
    from moe_routing_kernels.pack import triton_pack_fp8  # imports triton

    inner = empty_rows(problem.packed_format, len(activated), problem.intermediate, activated.device)
    itself = torch.arange(len(activated), dtype=torch.int32, device=activated.device)
    call = triton_pack_fp8.bind(
        between(problem), x=activated, order=itself, inverse=itself[:, None], **inner, checked_rows=0
    )
    return call, inner["packed"], inner["scales"]
