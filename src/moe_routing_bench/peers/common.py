"""What adapters of several libraries have in common: limits and results of whole layers, quantised rows between two products, and what fused
Triton experts are given, their formats of weights and the order in which they take them.
"""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from moe_routing_kernels.activations import activation_of
from moe_routing_kernels.experts import Experts
from moe_routing_kernels.experts.common import between
from moe_routing_kernels.experts.dequant import Parts, once, parts
from moe_routing_kernels.formats import ROW, empty_rows
from moe_routing_kernels.formats.groups import pack
from moe_routing_kernels.formats.weights import WeightFormat
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


_FP8 = {"e4m3_row": "fp8_row", "e4m3_block128": "fp8_block128"}  # weights, and the rows that go with them
_SIGN = 0x80  # of a byte: a code less 128, in two's complement, is the code with its highest bit turned


@dataclass(frozen=True)
class Product:
    """Weights as the kernels take them, and what belongs to them."""

    weights: Tensor
    scales: Tensor | None = None
    zeros: Tensor | None = None
    bias: Tensor | None = None


@dataclass(frozen=True)
class Fused:
    """Both products; the format by the name that tables of tiles have for it, None of plain weights; `block`, rows and columns of a scale,
    0 rows of integers in groups, None of scales of whole rows."""

    up: Product
    down: Product
    form: str | None
    block: list[int] | None

    def options(self) -> dict[str, Any]:
        """What both libraries call by one name."""
        return {
            **{f"use_{form}": form == self.form for form in ("fp8_w8a8", "int8_w8a16", "int4_w4a16")},
            "per_channel_quant": self.form == "fp8_w8a8" and self.block is None,
            "block_shape": self.block,
            "w1_scale": self.up.scales,
            "w2_scale": self.down.scales,
            "w1_zp": self.up.zeros,
            "w2_zp": self.down.zeros,
        }


def formats_unsupported(problem: Layer, library: str, activations: Collection[str], fp8: bool) -> str | None:
    """Why the kernels cannot take the formats and the activation of a layer, or None; with `fp8` those are 8-bit floats."""
    form = problem.experts.quantised_weights
    if form is None:
        given = f"{problem.packed} rows and {problem.weights}"
        return f"takes {_pairs()}, not {given}" if fp8 else layer_unsupported(problem, library, activations)
    if reason := dropping(problem, library):
        return reason
    if problem.activation not in activations:
        return f"{library} has no {problem.activation}"
    if problem.dtype not in ("bf16", "fp16"):
        return f"{library} takes bf16 and fp16 tokens, not {problem.dtype}"
    given = f"{problem.weights} with {problem.packed} rows"
    if fp8 and _FP8.get(form.name) != problem.packed:
        return f"takes {_pairs()}, not {given}"
    if not fp8 and (problem.packed != problem.dtype or not _integers(form)):
        return f"{library} takes integers of 8 and 4 bits in groups with rows of the tokens' format, not {given}"
    if form.group != ROW and any(size % form.group for size in (problem.hidden, problem.intermediate)):
        return f"{library} takes {form.name} with hidden and intermediate that are multiples of {form.group}"
    if activation_of(problem.activation).shift and ((problem.experts.biased and not fp8) or form.rows > 1):
        return f"{library} is without {form.name} with {problem.activation}"
    return None


def fused_weights(
    problem: Layer, w13: Tensor, w2: Tensor, b13: Tensor | None, b2: Tensor | None, scales: Mapping[str, Tensor]
) -> Fused:
    """w13 (E, N, H), w2 (E, H, I), biases b13 (E, N) and b2 (E, H), and parts of quantised weights by name -> the kernels' operands."""
    form, (up, down) = problem.experts.quantised_weights, parts(w13, w2, scales)
    if activation_of(problem.activation).shift:  # gpt-oss's, of which checkpoints have gate and up in turns
        up = once(up, "in turns", lambda given=up: {name: in_turns(part) for name, part in given.items()})
        b13 = None if b13 is None else in_turns(b13)
    first, second = _product(up, form, b13), _product(down, form, b2)
    if form is None:
        return Fused(first, second, None, None)
    if form.codec == "float8":
        return Fused(first, second, "fp8_w8a8", None if form.group == ROW else [form.rows, form.group])
    return Fused(first, second, f"int{form.bits}_w{form.bits}a16", None if form.group == ROW else [0, form.group])


def _pairs() -> str:
    return " and ".join(f"{weights} with {rows} rows" for weights, rows in _FP8.items())


def _integers(form: WeightFormat) -> bool:
    """Whether the kernels take it: 8 bits, of whole rows without zero points, and 4 bits in groups."""
    if form.codec != "integers":
        return False
    return form.bits in (8, 4) if form.group != ROW else form.bits == 8 and not form.zero_points


def _product(weights: Parts, form: WeightFormat | None, bias: Tensor | None) -> Product:
    elements = weights["elements"]
    if form is None:
        return Product(elements, bias=bias)
    scales = weights["scales"]
    if form.group != ROW:
        return Product(elements, scales, _zeros(weights, form), bias)
    if form.codec == "float8":
        return Product(elements, scales[..., 0].float(), bias=bias)
    return Product(once(weights, "signed", lambda: elements.bitwise_xor(_SIGN).view(torch.int8)), scales[..., 0])


def _zeros(weights: Parts, form: WeightFormat) -> Tensor | None:
    """Zero points (E, N, groups), those of two rows in a byte where they have 4 bits: (E, N / 2, groups)."""
    return pack(weights["zeros"].mT.contiguous(), form.bits).mT.contiguous() if form.zero_points else None


def in_turns(halves: Tensor) -> Tensor:
    """(E, 2 I, ...), gate above up -> gate and up in turns."""
    return halves.unflatten(1, (2, -1)).transpose(1, 2).flatten(1, 2).contiguous()
