"""Quantised experts in torch, on a CPU, against float64 over what the parts stand for."""

import gc
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from moe_routing_kernels.experts import Experts, dequant, torch_experts
from moe_routing_kernels.formats import FORMATS
from moe_routing_kernels.formats import quantise as quantise_rows
from moe_routing_kernels.formats.quantisation import dequantise, quantise
from moe_routing_kernels.formats.weights import WEIGHTS, named
from moe_routing_kernels.implementations import Entry

LOOP, SCALED = Entry(dequant, "loop"), Entry(torch_experts, "scaled_grouped_mm")

LOADS = {"odd": [3, 1, 7, 2], "empty_experts": [0, 5, 0, 0, 4, 0], "one_hot_expert": [0, 0, 31, 0], "one_row": [0, 1]}
SIZES = {"whole_groups": (128, 64), "shorter_groups": (72, 40), "odd": (36, 20)}  # hidden, intermediate
TOLERANCE = {"fp32": 1e-5, "fp16": 0.002, "bf16": 0.02}  # relative L2


def case(loads, weights, dtype="bf16", sizes="whole_groups", packed=None) -> tuple[Experts, dict[str, Tensor], Tensor]:
    """The problem, its tensors with y poisoned, and y in float64."""
    torch.manual_seed(17)
    (hidden, inner), number, form = SIZES[sizes], len(loads), WEIGHTS[weights]
    problem = Experts(sum(loads), hidden, inner, number, dtype, packed or dtype, weights)
    torch_dtype, starts = FORMATS[dtype].torch_dtype, [sum(loads[:e]) for e in range(number + 1)]
    x = torch.randn(sum(loads), hidden).to(torch_dtype)
    tensors = {"packed": x, "offsets": torch.tensor(starts, dtype=torch.int32), "y": torch.full_like(x, torch.nan)}
    if packed:
        elements, scales = quantise_rows(x, FORMATS[packed])
        tensors |= {"packed": elements, "scales": scales.squeeze(1)}
        x = elements.double() * scales
    dense = {}
    for name, shape in (("w13", (number, 2 * inner, hidden)), ("w2", (number, hidden, inner))):
        parts = quantise(torch.randn(shape) * shape[2] ** -0.5, form, dtype)
        tensors |= {named(name).get(part, name): one for part, one in parts.items()}
        dense[name] = torch.empty(shape, dtype=torch.float64)
        dequantise(parts, form, dense[name])
    want = torch.empty(x.shape, dtype=torch.float64)
    for e in range(number):
        part = slice(starts[e], starts[e + 1])
        gate, up = (x[part].double() @ dense["w13"][e].T).chunk(2, 1)
        want[part] = (F.silu(gate) * up) @ dense["w2"][e].T
    return problem, tensors, want


def run(module, problem, tensors, **options) -> Tensor:
    assert module.unsupported(problem, **options) is None
    kept = {name: tensor.clone() for name, tensor in tensors.items() if name != "y"}
    call = module.bind(problem, **tensors, **options)
    assert tensors["y"].isnan().all(), "binding does no work"
    returned = call() or {}
    assert all(torch.equal(tensors[name].view(torch.uint8), kept[name].view(torch.uint8)) for name in kept)
    return returned.get("y", tensors["y"])


def close(got: Tensor, want: Tensor, dtype: str) -> None:
    assert torch.isfinite(got).all() and got.dtype == FORMATS[dtype].torch_dtype
    assert float((got.double() - want).norm() / want.norm()) < TOLERANCE[dtype]


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("weights", WEIGHTS)
@pytest.mark.parametrize("module", [dequant, LOOP], ids=["dequant", "loop"])
def test_every_format(module, weights, dtype):
    problem, tensors, want = case(LOADS["odd"], weights, dtype)
    close(run(module, problem, tensors), want, dtype)


@pytest.mark.parametrize(
    "weights", ["int8z_g32", "int4_g128", "int2z_row", "e4m3_block128", "e5m2_g128", "mxfp4", "nvfp4"]
)
@pytest.mark.parametrize("loads", LOADS.values(), ids=list(LOADS))
@pytest.mark.parametrize(
    ("module", "sizes", "options"),
    [(dequant, "shorter_groups", {"cached": False}), (dequant, "whole_groups", {}), (LOOP, "odd", {})],
    ids=["uncached", "cached", "loop"],
)
def test_loads_and_sizes(module, sizes, options, loads, weights):
    problem, tensors, want = case(loads, weights, "fp32", sizes)
    close(run(module, problem, tensors, **options), want, "fp32")


@pytest.mark.parametrize("packed", ["fp8_row", "fp8_block128"])
def test_the_loop_takes_quantised_rows(packed):
    problem, tensors, _ = case(LOADS["odd"], "int4_g32", "bf16", packed=packed)
    plain = replace(problem, packed="bf16")
    form = FORMATS[packed]
    rows, scales = quantise_rows(torch.randn(problem.rows, problem.hidden), form)
    quantised = tensors | {"packed": rows, "scales": scales.view(form.scale_shape(*rows.shape))}
    dense = tensors | {"packed": (rows.float() * scales).bfloat16()}
    dense.pop("scales")
    assert torch.equal(run(LOOP, problem, quantised), run(LOOP, plain, dense | {"y": tensors["y"] * torch.nan}))


def test_bound_calls_share_a_workspace_while_somebody_has_it():
    """Of two matrices of one shape each has its own."""
    problem = replace(case([1, 1], "int8_row")[0], hidden=64, intermediate=64, activation="relu2")
    one, other = (dequant.kept_workspace(problem, 2, torch.device("cpu")) for _ in range(2))
    assert one[0] is other[0] and one[1] is other[1] and one[0] is not one[1] and one[0].shape == one[1].shape
    assert dequant.kept_workspace(problem, 1, torch.device("cpu"))[0] is not one[0]
    held = len(dequant._KEPT)
    del one, other
    gc.collect()
    assert len(dequant._KEPT) == held - 2


def test_what_is_made_of_weights_is_made_again_where_one_was_written_to():
    """In place, so that the part has the address that it had; and for another purpose."""
    parts = {"elements": torch.zeros(4), "scales": torch.ones(4)}
    made = []

    def make():
        made.append(float(parts["scales"].sum()))
        return made[-1]

    assert [dequant.once(parts, "a", make) for _ in range(2)] == [4.0, 4.0] and made == [4.0]
    parts["scales"].mul_(2)
    assert dequant.once(parts, "a", make) == 8.0
    parts["elements"].add_(1)
    dequant.once(parts, "a", make)
    dequant.once(parts, "b", make)
    assert made == [4.0, 8.0, 8.0, 8.0]


def scaled(rows, weights, row_scales, row_kind, weight_scales, weight_kind, offs):
    """What torch documents: rows (R, K) times weights (E, K, N), column-major, each with a scale per row of its own."""
    assert row_kind == weight_kind == F.ScalingType.RowWise and weights.stride(1) == 1 and rows.stride(1) == 1
    assert row_scales.shape == rows.shape[:1] and weight_scales.shape == (len(weights), weights.shape[2])
    assert row_scales.dtype == weight_scales.dtype == torch.float32 and weight_scales.is_contiguous()
    out, first = torch.empty(len(rows), weights.shape[2]), 0
    for e, end in enumerate(offs.tolist()):
        sums = rows[first:end].float() @ weights[e].float()
        out[first:end], first = sums * row_scales[first:end, None] * weight_scales[e], end
    return out.bfloat16()


def test_scaled_products_round_what_is_between_them(monkeypatch):
    """With torch's product replaced: it has no form for a CPU."""
    monkeypatch.setattr(F, "scaled_grouped_mm", scaled, raising=False)
    problem, tensors, want = case(LOADS["odd"], "e4m3_row", packed="fp8_row")
    got = run(SCALED, problem, tensors)
    error = float((got.double() - want).norm() / want.norm())
    assert got.dtype == torch.bfloat16 and 0.01 < error < 2.0**-4


def test_rows_are_quantised_as_the_table_says():
    x = torch.randn(7, 48).bfloat16()
    x[3] = 0
    elements, scales = torch_experts.quantise_rows(x)
    known, known_scales = quantise_rows(x, FORMATS["fp8_row"])
    assert torch.equal(elements.view(torch.uint8), known.view(torch.uint8)) and torch.equal(
        scales, known_scales.view(-1)
    )


@pytest.mark.parametrize(
    ("module", "changes", "why"),
    [
        (dequant, {"weights": "bf16"}, "takes quantised weights, not bf16"),
        (LOOP, {"weights": "fp32"}, "takes quantised weights, not fp32"),
        (dequant, {"packed": "fp8_row"}, "rows need the format of the activations, bf16, not fp8_row"),
        (LOOP, {"packed": "fp16"}, "rows need the format of the activations, bf16, not fp16"),
        (dequant, {"intermediate": 12}, "multiples of 8"),
        (None, {"weights": "mxfp4"}, "dequantises integers and float8, not mxfp4"),
        (None, {"dtype": "fp32", "packed": "fp32"}, "takes bf16 and fp16 rows, not fp32"),
        (None, {"weights": "bf16"}, "takes quantised weights, not bf16"),
        (SCALED, {}, "rows fp8_row and weights e4m3_row to bf16, not bf16, bf16 and int4_row"),
        (SCALED, {"packed": "fp8_row", "weights": "e4m3_row", "hidden": 24}, "multiples of 16"),
        (SCALED, {"packed": "fp8_row", "weights": "e4m3_row", "activation": "swiglu_oai"}, "no biases"),
    ],
)
def test_what_cannot_run_is_said(module, changes, why):
    module = module or pytest.importorskip("moe_routing_kernels.experts.dequant_cute", exc_type=ImportError)
    sizes = {"rows": 8, "hidden": 16, "intermediate": 16, "experts": 2}
    names = {"dtype": "bf16", "packed": "bf16", "weights": "int4_row"}
    assert why in module.unsupported(Experts(**(sizes | names | changes)))
