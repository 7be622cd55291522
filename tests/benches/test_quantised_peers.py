"""Peers with quantised weights: what they are given after repacking, and what they return, with operators in plain torch in their place."""

import sys
from types import ModuleType

import pytest
import torch
from test_library_peers import checked, loaded  # noqa: F401 (a fixture)

from moe_routing_bench.kernels.pack import torch_pack_fp8, triton_pack_fp8

SIZES = {"tokens": 19, "hidden": 256, "intermediate": 128, "experts": 4, "top_k": 2}
MARLIN = (
    *(f"int{kind}_{group}" for kind in ("4", "4z", "8") for group in ("g32", "g64", "g128", "row")),
    *("e4m3_g128", "e4m3_row", "e4m3_block128", "mxfp4"),
)


def outcome(way: str, **axes):
    """As `checked`, with what peers take unless it is told."""
    return checked("experts", way, **(SIZES | {"dtype": "bf16", "packed": "bf16"} | axes))


@pytest.mark.usefixtures("loaded")
@pytest.mark.parametrize("weights", MARLIN)
def test_marlin(weights: str) -> None:
    assert outcome("marlin", weights=weights).error is None


@pytest.mark.usefixtures("loaded")
@pytest.mark.parametrize(
    "axes",
    [
        {"activation": "swiglu_oai"},
        {"activation": "relu2"},
        {"dtype": "fp16", "packed": "fp16", "weights": "e4m3_g128"},
        {"capacity_factor": 0.5},
        {"layout": "block64"},
    ],
)
def test_marlin_with(axes: dict) -> None:
    """Biases, another activation, exponents of fp16, rows of no expert, and padding."""
    assert outcome("marlin", **({"weights": "int4z_row"} | axes)).error is None


def grouped_fp8(rows, weights, out, expert_of) -> None:
    """DeepGEMM's `m_grouped_fp8_gemm_nt_contiguous` in plain torch."""
    (x, scales), (w, w_scales) = rows, weights
    assert (x.dtype, w.dtype, scales.dtype, w_scales.dtype) == (torch.float8_e4m3fn,) * 2 + (torch.float32,) * 2
    assert scales.shape == (len(x), x.shape[1] // 128) and expert_of.shape == (len(x),) and out.dtype == torch.bfloat16
    assert w_scales.shape == (len(w), w.shape[1] // 128, w.shape[2] // 128) and expert_of.dtype == torch.int32
    assert expert_of.unflatten(0, (-1, 128)).eq(expert_of[::128, None]).all(), "blocks of one expert"
    wide, plain = (one.repeat_interleave(128, -1) for one in (w_scales, scales))
    dense = w.float() * wide.repeat_interleave(128, 1)
    for expert in range(len(w)):
        own = expert_of == expert
        out[own] = (x[own].float() * plain[own] @ dense[expert].T).bfloat16()


@pytest.fixture
def deepgemm(monkeypatch: pytest.MonkeyPatch) -> None:
    """DeepGEMM is there."""
    module = ModuleType("deep_gemm")
    vars(module).update(m_grouped_fp8_gemm_nt_contiguous=grouped_fp8)
    monkeypatch.setitem(sys.modules, "deep_gemm", module)


@pytest.fixture
def plain_pack(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows are quantised in plain torch."""

    def bind(problem, *, inverse, checked_rows, **given):
        assert checked_rows == 0 and torch.equal(inverse[:, 0], given["order"])
        return torch_pack_fp8.bind(problem, **given)

    monkeypatch.setattr(triton_pack_fp8, "bind", bind)


BLOCKS = {"packed": "fp8_block128", "weights": "e4m3_block128", "layout": "block128"}


@pytest.mark.usefixtures("deepgemm", "plain_pack")
@pytest.mark.parametrize("axes", [{}, {"activation": "relu2"}, {"capacity_factor": 0.5}])
def test_deepgemm(axes: dict) -> None:
    assert outcome("deepgemm_fp8", **(BLOCKS | axes)).error is None


@pytest.mark.usefixtures("loaded")
@pytest.mark.parametrize("activation", ["swiglu", "relu2"])
def test_mslk_int4(activation: str) -> None:
    assert outcome("mslk_int4", weights="int4_g128", activation=activation).error is None


@pytest.mark.usefixtures("loaded", "plain_pack")
@pytest.mark.parametrize("activation", ["swiglu", "geglu"])
def test_mslk_fp8(activation: str) -> None:
    assert outcome("mslk_fp8", packed="fp8_row", weights="e4m3_row", activation=activation).error is None


@pytest.mark.usefixtures("loaded")
@pytest.mark.parametrize(
    ("way", "axes", "reason"),
    [
        ("marlin", {"weights": "int8z_g128"}, "no kernel for int8z_g128 beside bf16"),
        ("marlin", {"weights": "mxfp4", "dtype": "fp16", "packed": "fp16"}, "mxfp4 beside fp16"),
        ("marlin", {"weights": "bf16"}, "quantised weights"),
        ("marlin", {"weights": "int4_g128", "intermediate": 192}, "whole groups"),
        ("marlin", {"weights": "int4_g32", "intermediate": 96}, "one of 64"),
        ("mslk_int4", {"weights": "int4z_g128"}, "weights int4_g128, not bf16 and int4z_g128"),
        ("mslk_int4", {"weights": "int4_g128", "activation": "swiglu_oai"}, "biases"),
        ("mslk_int4", {"weights": "int4_g128", "intermediate": 192}, "multiples of 128"),
        ("mslk_fp8", BLOCKS, "not bf16, fp8_block128, e4m3_block128"),
        ("deepgemm_fp8", BLOCKS | {"layout": "compact"}, "layout block128"),
        ("deepgemm_fp8", BLOCKS | {"weights": "e4m3_g128"}, "not bf16, fp8_block128, e4m3_g128"),
        ("deepgemm_fp8", BLOCKS | {"intermediate": 192}, "no group of a scale is shorter"),
        ("deepgemm_fp8", BLOCKS | {"activation": "swiglu_oai"}, "biases"),
    ],
)
def test_what_cannot_run_says_why(way: str, axes: dict, reason: str) -> None:
    assert reason in outcome(way, **axes)
