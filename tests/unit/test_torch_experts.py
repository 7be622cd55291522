"""The three ways to run experts in torch, on a CPU, against float64."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from moe_routing_kernels.experts import Experts, torch_experts
from moe_routing_kernels.formats import FORMATS, dequantise, quantise
from moe_routing_kernels.implementations import Entry

LOOP, BMM, GROUPED_MM = (Entry(torch_experts, name) for name in ("loop", "bmm", "grouped_mm"))

LOADS = {
    "odd": [3, 1, 7, 2],
    "empty_experts": [0, 5, 0, 0, 4, 0],
    "one_hot_expert": [0, 0, 31, 0],
    "one_row": [0, 1],
    "even": [4, 4, 4],
}
SIZES = {"odd": (13, 7), "whole_vectors": (24, 16)}  # hidden, intermediate
TOLERANCE = {"fp32": 1e-5, "bf16": 0.02}  # relative L2


def case(
    loads: list[int], sizes: str, dtype: str, packed: str, padded: bool
) -> tuple[Experts, dict[str, Tensor], Tensor]:
    """The problem, its tensors with y poisoned, and y in float64."""
    torch.manual_seed(17)
    hidden, inner = SIZES[sizes]
    number, each = len(loads), max(loads)
    rows = number * each if padded else sum(loads)
    starts = [e * each for e in range(number + 1)] if padded else [sum(loads[:e]) for e in range(number + 1)]
    problem = Experts(rows, hidden, inner, number, dtype, packed, dtype, padded)
    form, torch_dtype = FORMATS[packed], FORMATS[dtype].torch_dtype
    x = torch.randn(rows, hidden).to(torch_dtype)
    tensors = {"packed": x}
    if form.quantised:
        elements, scales = quantise(x, form)
        tensors = {"packed": elements, "scales": scales.view(form.scale_shape(rows, hidden))}
        x = dequantise(elements, scales, form).to(torch_dtype)
    tensors |= {
        "offsets": torch.tensor(starts, dtype=torch.int32),
        "w13": (torch.randn(number, 2 * inner, hidden) * hidden**-0.5).to(torch_dtype),
        "w2": (torch.randn(number, hidden, inner) * inner**-0.5).to(torch_dtype),
        "y": torch.full((rows, hidden), torch.nan, dtype=torch_dtype),
    }
    want = torch.empty(rows, hidden, dtype=torch.float64)
    for e in range(number):
        part = slice(starts[e], starts[e + 1])
        gate, up = (x[part].double() @ tensors["w13"][e].double().T).chunk(2, 1)
        want[part] = (F.silu(gate) * up) @ tensors["w2"][e].double().T
    return problem, tensors, want


def close(got: Tensor, want: Tensor, dtype: str) -> None:
    assert torch.isfinite(got).all() and got.dtype == FORMATS[dtype].torch_dtype
    assert float((got.double() - want).norm() / want.norm()) < TOLERANCE[dtype]


@pytest.mark.parametrize("packed", ["plain", "fp8_row", "fp8_block128"])
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("loads", LOADS.values(), ids=list(LOADS))
@pytest.mark.parametrize("module", [LOOP, BMM], ids=["loop", "bmm"])
def test_loop_and_bmm(module, loads, sizes, dtype, packed):
    problem, tensors, want = case(loads, sizes, dtype, dtype if packed == "plain" else packed, module is BMM)
    assert module.unsupported(problem) is None
    kept = {name: tensor.clone() for name, tensor in tensors.items() if name != "y"}
    call = module.bind(problem, **tensors)
    assert tensors["y"].isnan().all(), "binding does no work"
    call()
    close(tensors["y"], want, dtype)
    assert all(torch.equal(tensors[name].view(torch.uint8), kept[name].view(torch.uint8)) for name in kept)


def test_loop_reads_the_offsets_of_each_call():
    """Another routing in the same buffers."""
    problem, tensors, want = case([2, 5, 1], "odd", "fp32", "fp32", False)
    call = LOOP.bind(problem, **tensors)
    right = tensors["offsets"].clone()
    tensors["offsets"].copy_(torch.tensor([0, 8, 8, 8]))
    call()
    assert float((tensors["y"].double() - want).norm() / want.norm()) > 0.1
    tensors["offsets"].copy_(right)
    call()
    close(tensors["y"], want, "fp32")


@pytest.mark.skipif(not hasattr(F, "grouped_mm"), reason="this torch has no torch.nn.functional.grouped_mm")
@pytest.mark.parametrize("loads", LOADS.values(), ids=list(LOADS))
def test_grouped_mm_returns_its_result(loads):
    problem, tensors, want = case(loads, "whole_vectors", "bf16", "bf16", False)
    assert GROUPED_MM.unsupported(problem) is None
    found = GROUPED_MM.bind(problem, **tensors)()
    assert list(found) == ["y"] and tensors["y"].isnan().all(), "the bound y is not written: that would be a copy"
    close(found["y"], want, "bf16")


@pytest.mark.parametrize(
    ("module", "changes", "why"),
    [
        (BMM, {"padded": False}, "padded rows"),
        (LOOP, {"weights": "fp32"}, "one plain format"),
        (LOOP, {"packed": "fp16"}, "format of the activations"),
        (BMM, {"padded": True, "weights": "fp8_row"}, "one plain format"),
        (GROUPED_MM, {"packed": "fp8_row"}, "bf16 rows, not fp8_row"),
        (GROUPED_MM, {"intermediate": 12}, "multiples of 8"),
        (GROUPED_MM, {"dtype": "fp32"}, "one plain format"),
    ],
)
def test_what_cannot_run_is_said(module, changes, why):
    sizes = {"rows": 8, "hidden": 16, "intermediate": 16, "experts": 2}
    names = {"dtype": "bf16", "packed": "bf16", "weights": "bf16"}
    assert why in module.unsupported(Experts(**(sizes | names | changes)))
