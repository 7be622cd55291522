"""Experts with quantised weights in plain torch: all weights are dequantised into a workspace, which `torch_experts:grouped_mm` multiplies with.

The workspace, 2 bytes per weight in 16 bits, is allocated once for all bound calls, as one workspace would serve all layers of a model,
or in each call (`cached=False`). Experts without rows are dequantised, too: the host does not know which experts have rows. In bf16
nothing waits for the host; torch multiplies fp16 and fp32 expert by expert, and reads the offsets on the host for it.

What other implementations make of quantised weights is kept here as well: repacked weights, made `once` for all calls that are bound with
them and never timed, as models repack when they load.

`loop`: one after the other, an expert that has rows is dequantised, then multiplied with. The baseline of AutoRound's ARK (its pull request 1813).
"""

import itertools
from collections.abc import Callable, Hashable, Mapping
from dataclasses import replace
from typing import Any, TypeVar
from weakref import WeakValueDictionary

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from moe_routing_kernels.experts import Experts, torch_experts
from moe_routing_kernels.experts.common import feed_forward, not_quantised, other_activations, plain_rows, unaligned
from moe_routing_kernels.formats import FORMATS
from moe_routing_kernels.formats.quantisation import dequantise
from moe_routing_kernels.formats.weights import named

Parts = dict[str, Tensor]
Spec = dict[str, Any]
_KEPT: WeakValueDictionary[tuple, Tensor] = WeakValueDictionary()


def unsupported(problem: Experts, cached: bool = True) -> str | None:
    """Why this problem cannot run, or None."""
    if not hasattr(F, "grouped_mm"):
        return f"torch {torch.__version__} has no torch.nn.functional.grouped_mm"
    return not_quantised(problem) or other_activations(problem) or unaligned(problem)


def bind(
    problem: Experts,
    *,
    packed: Tensor,
    offsets: Tensor,
    w13: Tensor,
    w2: Tensor,
    y: Tensor | None = None,
    b13: Tensor | None = None,
    b2: Tensor | None = None,
    cached: bool = True,
    **quantisation: Tensor,
) -> Callable[[], dict[str, Tensor]]:
    """Bind packed (R, H), offsets (E + 1,) int32, the elements w13 and w2, their `quantisation` parts by name, and biases; the call returns
    y (R, H) as `torch_grouped_mm` does."""
    weights, plain = parts(w13, w2, quantisation), replace(problem, weights=problem.dtype)
    kept = kept_workspace(problem, problem.experts, packed.device) if cached else None

    def run() -> dict[str, Tensor]:
        dense = kept or tuple(torch.empty(**spec) for spec in workspace_specs(problem, problem.experts, packed.device))
        fill(problem, weights, dense)
        up, down = dense
        return torch_experts.bind_grouped_mm(plain, packed=packed, offsets=offsets, w13=up, w2=down, b13=b13, b2=b2)()

    return run


def parts(w13: Tensor, w2: Tensor, quantisation: Mapping[str, Tensor]) -> tuple[Parts, Parts]:
    """The parts of w13 and of w2 by the names of `formats.weights`: their elements, and their tensors in `quantisation`."""
    up, down = (
        {"elements": elements} | {part: quantisation[key] for part, key in named(name).items() if key in quantisation}
        for name, elements in (("w13", w13), ("w2", w2))
    )
    return up, down


def workspace_specs(problem: Experts, experts: int, device: torch.device) -> tuple[Spec, Spec]:
    """Arguments of `torch.empty` for w13 (experts, N, H) and w2 (experts, H, I) in the format of the activations."""
    hidden, inner = problem.hidden, problem.intermediate
    wide = 2 * inner if problem.gated else inner
    up, down = (
        {"size": (experts, *size), "dtype": FORMATS[problem.dtype].torch_dtype, "device": device}
        for size in ((wide, hidden), (hidden, inner))
    )
    return up, down


def kept_workspace(problem: Experts, experts: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """A weakly cached workspace per shape (`workspace_specs`), shared by all bound calls: one per call would exhaust GPU memory."""
    workspace = []
    for name, spec in zip(("w13", "w2"), workspace_specs(problem, experts, device), strict=True):
        key = (name, *spec.values())
        workspace.append(_KEPT.get(key))
        if workspace[-1] is None:
            workspace[-1] = _KEPT[key] = torch.empty(**spec)
    up, down = workspace
    return up, down


def fill(problem: Experts, weights: tuple[Parts, Parts], dense: tuple[Tensor, ...]) -> None:
    """Dequantise the parts of both weights into tensors of `workspace_specs`."""
    weight_format = problem.quantised_weights
    assert weight_format is not None, f"{problem.weights} is not quantised"
    for quantised, out in zip(weights, dense, strict=True):
        dequantise(quantised, weight_format, out)


T = TypeVar("T")
_REPACKED = WeakIdKeyDictionary()  # elements -> the last result of `make`


def once(weights: Parts, purpose: Hashable, make: Callable[[], T]) -> T:
    """The result of `make` for `weights` and a purpose. Consecutive calls for one purpose share it; it lives as long as the elements.

    It is made again for another purpose, and where a part was written to since.
    """
    known: dict[Hashable, T] = _REPACKED.setdefault(weights["elements"], {})  # type: ignore[assignment]
    key = (purpose, tuple((part.data_ptr(), part._version) for part in weights.values()))
    if key not in known:
        known.clear()
        known[key] = make()
    return known[key]


def unsupported_loop(problem: Experts) -> str | None:
    """Why this problem cannot run, or None."""
    return not_quantised(problem) or (None if problem.packed_format.quantised else other_activations(problem))


def bind_loop(
    problem: Experts,
    *,
    packed: Tensor,
    offsets: Tensor,
    w13: Tensor,
    w2: Tensor,
    y: Tensor,
    scales: Tensor | None = None,
    b13: Tensor | None = None,
    b2: Tensor | None = None,
    **quantisation: Tensor,
) -> Callable[[], None]:
    """Bind packed (R, H) and its scales, offsets (E + 1,) int32, the elements w13 and w2, their `quantisation` parts by name, and biases; the
    call writes y (R, H).

    The call reads the offsets on the host: its true cost is the wall time, and a CUDA graph cannot hold it.
    """
    weights = parts(w13, w2, quantisation)
    up, down = kept_workspace(problem, 1, packed.device)

    def run() -> None:
        for e, (first, end) in enumerate(itertools.pairwise(offsets.tolist())):
            if end > first:
                expert = slice(e, e + 1)
                w13_parts, w2_parts = ({name: part[expert] for name, part in parts.items()} for parts in weights)
                fill(problem, (w13_parts, w2_parts), (up, down))
                rows = plain_rows(problem, packed[first:end], None if scales is None else scales[first:end])
                biases = (None if bias is None else bias[expert] for bias in (b13, b2))
                feed_forward(problem.activation, rows, 0, up, down, *biases, out=y[first:end])

    return run
