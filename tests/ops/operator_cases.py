"""Arguments of every operator in every layout, dtype and form, for the CPU and for a GPU: the same table."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from moe_routing_kernels.ops import reference

LAYOUTS = ("contiguous", "transposed", "expanded", "sliced", "empty")
DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
# Each layout and each dtype, not all pairs: strides of a fake are computed without its dtype, and its dtype without strides.
EACH = (
    *((layout, torch.float32) for layout in LAYOUTS),
    *(("contiguous", dtype) for dtype in DTYPES if dtype != torch.float32),
)
TOKENS, TOP_K, EXPERTS, HIDDEN, INTERMEDIATE = 5, 2, 4, 16, 24
FORMS = {"swiglu": 2, "relu2": 1, "swiglu_oai": 2}  # activation: rows of w13 per row of w2


def laid(tensor: Tensor, layout: str) -> Tensor:
    """The tensor in a layout: as it is or transposed, its first row repeated by a stride of 0, or a part of a larger one, unaligned."""
    if layout == "transposed":
        return tensor.mT.contiguous().mT if tensor.dim() > 1 else tensor.repeat_interleave(2)[::2]
    if layout == "expanded":
        return tensor[:1].expand(tensor.shape)
    if layout == "sliced":
        wide = tensor.new_zeros(*tensor.shape[:-1], tensor.shape[-1] + 3)
        wide[..., 1:-2] = tensor
        return wide[..., 1:-2]
    return tensor


def check_outputs(name: str, given: tuple) -> None:
    """Outputs of a call are contiguous, share no memory, and do not depend on the layout of the inputs."""
    operator = getattr(torch.ops.moe_routing_kernels, name.partition("-")[0])
    outputs = _tensors(operator(*given))
    written = [output.untyped_storage().data_ptr() for output in outputs if output.numel()]
    read = [tensor.untyped_storage().data_ptr() for tensor in _tensors(given) if tensor.numel()]
    assert all(output.is_contiguous() for output in outputs), name
    assert len(set(written)) == len(written) and not set(written) & set(read), f"{name}: memory is shared"
    plain = [value.contiguous() if isinstance(value, Tensor) else value for value in given]
    for got, want in zip(outputs, _tensors(operator(*plain)), strict=True):
        torch.testing.assert_close(got, want, equal_nan=True, msg=lambda text: f"{name}: {text}")


def _tensors(values: Any) -> list[Tensor]:
    given = (values,) if isinstance(values, Tensor) else values
    return [value for value in given if isinstance(value, Tensor)]


def cases(
    layout: str, dtype: torch.dtype, device: str = "cpu", backends: tuple[str, ...] = ("",)
) -> Iterator[tuple[str, tuple]]:
    """Names and positional arguments of calls; indices are expanded only where they stay valid."""
    torch.manual_seed(17)
    tokens = 0 if layout == "empty" else TOKENS

    def data(*shape: int, of: torch.dtype = dtype) -> Tensor:
        return laid(torch.randn(shape, device=device).div(2).to(of), layout)

    def index(tensor: Tensor) -> Tensor:
        return tensor if layout == "expanded" else laid(tensor, layout)

    logits, wide = data(tokens, EXPERTS), reference.wide(dtype)
    for rule, bias in (("softmax_topk", None), ("sigmoid_renorm", data(EXPERTS, of=wide))):
        yield f"gate-{rule}", (logits, bias, TOP_K, rule, None)
    ids = torch.stack([torch.randperm(EXPERTS)[:TOP_K] for _ in range(TOKENS)])[:tokens].to(device)
    for capacity, rows in ((None, "compact"), (2, "compact"), (3, "padded"), (None, "block64")):
        for chosen in (ids.int(), ids):
            given = laid(chosen, layout)
            yield f"permute-{rows}-{capacity}-{chosen.dtype}", (given, EXPERTS, capacity, rows)
    for name, capacity in (("all", None), ("dropped", 1)):
        _, offsets, order, inverse = reference.permute(ids.int(), EXPERTS, capacity, "compact")
        row_map = {"order": index(order), "inverse": index(inverse), "offsets": index(offsets)}
        yield from _of_rows(name, data, row_map, wide)
        for activation in FORMS:
            yield from _of_experts(f"{name}-{activation}", data, row_map, wide, activation, capacity, backends)


def _of_rows(name: str, data: Any, row_map: dict[str, Tensor], wide: torch.dtype) -> Iterator[tuple[str, tuple]]:
    order, inverse = row_map["order"], row_map["inverse"]
    (tokens, top_k), rows = inverse.shape, len(order)
    x, y, weights = data(tokens, HIDDEN), data(rows, HIDDEN), data(tokens, top_k, of=wide)
    yield f"pack-{name}", (x, order, inverse)
    for residual in (None, data(tokens, HIDDEN)):
        yield f"combine-{name}-{'plain' if residual is None else 'residual'}", (y, inverse, weights, residual)
    yield f"combine-{name}-narrow", (y, inverse, weights.to(y.dtype), None)
    for of_y, of_weights in ((True, True), (True, False), (False, True)):
        given = (data(tokens, HIDDEN), y if of_weights else None, inverse, weights, rows if of_y else None)
        yield f"combine_backward-{name}-{of_y}-{of_weights}", given


def _of_experts(
    name: str,
    data: Any,
    row_map: dict[str, Tensor],
    wide: torch.dtype,
    activation: str,
    capacity: int | None,
    backends: tuple[str, ...],
) -> Iterator[tuple[str, tuple]]:
    order, inverse, offsets = row_map["order"], row_map["inverse"], row_map["offsets"]
    (tokens, top_k), rows, width = inverse.shape, len(order), FORMS[activation] * INTERMEDIATE
    x, packed, weights = data(tokens, HIDDEN), data(rows, HIDDEN), data(tokens, top_k, of=wide)
    w13, w2 = data(EXPERTS, width, HIDDEN), data(EXPERTS, HIDDEN, INTERMEDIATE)
    biased = activation == "swiglu_oai"
    biases = (data(EXPERTS, width), data(EXPERTS, HIDDEN)) if biased else (None, None)
    network = (w13, w2, activation, *biases)
    yield f"experts-{name}", (packed, offsets, *network)
    yield f"feed-{name}", (x, order, inverse, offsets, *network, capacity, "decode" if biased else None)
    for backend in backends:
        yield f"experts_training-{name}-{backend}", (packed, offsets, *network, backend)
        residual = None if capacity is None else data(tokens, HIDDEN)
        given = (x, order, inverse, offsets, weights, *network, residual, backend)
        yield f"layer_training-{name}-{backend}", given
    for asked in ([True] * 5, [False] * 5, [True, False, False, False, False], [False, True, False, True, False]):
        wanted = [of_it and (i < 3 or biased) for i, of_it in enumerate(asked)]
        yield f"experts_backward-{name}-{wanted}", (data(rows, HIDDEN), packed, offsets, *network, None, wanted)
    if not biased:
        sums = torch.randn(rows, width, device=x.device).to(x.dtype)  # as the operator itself makes them
        for wanted in ([True] * 4, [True, False, False, True], [False, True, True, False]):
            given = (data(tokens, HIDDEN), packed if wanted[2] else None, order, inverse, offsets, weights, w13, w2)
            yield f"layer_backward-{name}-{wanted}", (*given, activation, sums, wanted)
