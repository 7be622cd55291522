"""Quantised weights on a GPU: parts and numbers are those of a CPU, Triton writes the same bits, and every way to run experts is right."""

import pytest
import torch

from moe_routing_bench.benches.registry import BENCHES
from moe_routing_bench.config.expand import cell_of
from moe_routing_bench.measure import accuracy
from moe_routing_bench.store.platforms import missing
from moe_routing_kernels.formats import FORMATS
from moe_routing_kernels.formats.quantisation import dequantise, quantise
from moe_routing_kernels.formats.weights import WEIGHTS

SAID = ("implementation", "status", "reason", "kernel_error", "tolerance")
pytestmark = pytest.mark.gpu
if not torch.cuda.is_available():
    pytest.skip("needs an NVIDIA GPU", allow_module_level=True)


def dequantised(parts, form, dtype):
    out = torch.empty(2, 130, 300, dtype=dtype, device=parts["elements"].device)
    dequantise(parts, form, out)
    return out


@pytest.mark.parametrize("dtype", ["bf16", "fp16", "fp32"])
@pytest.mark.parametrize("form", WEIGHTS.values(), ids=list(WEIGHTS))
def test_parts_stand_for_the_same_numbers_as_on_a_cpu(form, dtype):
    """Bit by bit, whether parts come from a CPU or are made there."""
    w, torch_dtype = torch.randn(2, 130, 300) * 300**-0.5, FORMATS[dtype].torch_dtype
    here = quantise(w, form, dtype)
    there = {name: part.cuda() for name, part in here.items()}
    want = dequantised(here, form, torch_dtype)
    assert torch.equal(dequantised(there, form, torch_dtype).cpu(), want)
    own = dequantised(quantise(w.cuda(), form, dtype), form, torch_dtype).cpu()
    assert torch.equal(own, want)


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@pytest.mark.parametrize("form", WEIGHTS.values(), ids=list(WEIGHTS))
@pytest.mark.parametrize(("rows", "columns"), [(130, 300), (8, 128), (3, 20), (512, 2048)])
def test_triton_writes_the_same_bits(rows, columns, form, dtype):
    triton_dequantise = pytest.importorskip("moe_routing_kernels.experts.triton_dequantise", exc_type=ImportError)
    if form.codec not in triton_dequantise.CODECS:
        pytest.skip("not a format of the kernel")
    parts = quantise(torch.randn(2, rows, columns, device="cuda") * columns**-0.5, form, dtype)
    want = torch.empty(2, rows, columns, dtype=FORMATS[dtype].torch_dtype, device="cuda")
    dequantise(parts, form, want)
    got = torch.full_like(want, torch.nan)
    triton_dequantise.launcher(parts, form, got)()
    assert torch.equal(got, want)


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@pytest.mark.parametrize("weights", WEIGHTS)
def test_every_way_to_run_experts_is_right(weights, dtype):
    """On odd loads, one expert without a row at times; those with capacities and blocks have other layouts and are left out."""
    names = [one.name for one in BENCHES["experts"].implementations if not missing(one.requires, "cuda", one.peer)]
    for tokens in (3, 300):
        cell = cell_of(
            "experts",
            tokens=tokens,
            hidden=256,
            intermediate=128,
            experts=8,
            top_k=2,
            skew=0.7,
            sampler="plackett_luce" if tokens > 9 else "exact",
            weights=weights,
            dtype=dtype,
        )
        rows = accuracy.rows(cell, "outliers", names, "cuda")
        assert {"dequant", "dequant_uncached", "dequant_loop"} <= {row["implementation"] for row in rows}
        wrong = [row for row in rows if row["status"] != "ok"]
        assert not wrong, "; ".join(str({key: row.get(key) for key in SAID}) for row in wrong)


@pytest.mark.parametrize("tokens", [1, 777])
def test_scaled_grouped_products(tokens):
    cell = cell_of(
        "experts", tokens=tokens, hidden=256, intermediate=128, experts=8, top_k=2, weights="e4m3_row", packed="fp8_row"
    )
    assert BENCHES["experts"].supports("scaled_grouped_mm", cell) is None
    (row,) = accuracy.rows(cell, "normal", ["scaled_grouped_mm"], "cuda")
    assert row["status"] == "ok" and row["kernel_error"] < 2.0**-4
