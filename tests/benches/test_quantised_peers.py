"""Peers with quantised weights: what they are given after repacking, and what they return, with operators in plain torch in their place."""

import sys
from dataclasses import dataclass
from types import ModuleType, SimpleNamespace

import pytest
import torch
from test_library_peers import checked, loaded  # noqa: F401 (a fixture)

from moe_routing_bench.peers.deepgemm import blocks_of_rows
from moe_routing_bench.peers.marlin import block_rows
from moe_routing_kernels.pack import torch_pack, triton_pack_fp8

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


def test_blocks_of_marlin_are_less_than_nine_tenths_full() -> None:
    """By an expert's mean share of the rows; the largest takes what is more."""
    assert [block_rows(rows, 10) for rows in (1, 71, 72, 143, 287, 431, 9999)] == [8, 8, 16, 16, 32, 48, 64]


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
        return torch_pack.bind_fp8(problem, **given)

    monkeypatch.setattr(triton_pack_fp8, "bind", bind)


def test_deepgemm_passes_over_rows_of_no_expert() -> None:
    """An expert without rows, and padding behind the last."""
    offsets = torch.tensor([0, 2, 2, 5], dtype=torch.int32)
    number, expert_of = blocks_of_rows(SimpleNamespace(experts=3), torch.empty(7, 1), offsets)
    number()
    assert expert_of.tolist() == [0, 0, 2, 2, 2, -1, -1]


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


@dataclass
class Schema:
    """Humming's `HummingWeightSchema`, as far as it is used."""

    b_dtype: str
    has_zero_point: bool
    weight_scale_group_size: int
    weight_scale_group_size_n: int


def transform(tensors, *, shape_n, shape_k, weight_schema, num_experts, torch_dtype, device):
    """Humming's `prepare_and_transform_humming_tensors`: the shapes that it checks, and weights (E, N, K) by its `dequantize_weight`."""
    bits = int(weight_schema.b_dtype.removeprefix("uint")) if weight_schema.b_dtype.startswith("uint") else 8
    group, block = weight_schema.weight_scale_group_size or shape_k, weight_schema.weight_scale_group_size_n or 1
    words, scales, places = tensors["weight"], tensors["weight_scale"], torch.arange(0, 32, bits)
    assert words.dtype == torch.int32 and words.shape == (num_experts, shape_n, shape_k * bits // 32)
    assert scales.dtype == (torch.float32 if block > 1 else torch_dtype)
    assert scales.shape == (num_experts, shape_n // block, shape_k // group) and device == words.device
    if weight_schema.b_dtype.startswith("uint"):
        numbers = ((words[..., None].long() >> places) & (2**bits - 1)).flatten(2).float()
        zeros = torch.tensor(2.0 ** (bits - 1))
        if weight_schema.has_zero_point:
            assert tensors["zero_point"].shape == (num_experts, shape_n * bits // 32, shape_k // group)
            zeros = (
                ((tensors["zero_point"][:, :, None].long() >> places[:, None]) & (2**bits - 1)).flatten(1, 2).float()
            )
            zeros = zeros.repeat_interleave(group, 2)
        numbers = numbers - zeros
    else:
        kind = {"float8e4m3": torch.float8_e4m3fn, "float8e5m2": torch.float8_e5m2}[weight_schema.b_dtype]
        numbers = words.view(kind).float()
    wide = scales.float().repeat_interleave(group, 2).repeat_interleave(block, 1)
    return "a product", {"weight": numbers * wide, "weight_scale": scales}


def grouped(config, *, inputs, outputs, weight, weight_scale, expert_layout, locks, compute_config) -> None:
    """Humming's `humming_forward` in plain torch."""
    assert config == "a product" and compute_config == {"gemm_type": "grouped_contiguous"} and locks.eq(0).all()
    for one, first, last in zip(weight, expert_layout[:-1], expert_layout[1:], strict=True):
        outputs[first:last] = (inputs[first:last].float() @ one.T).to(outputs.dtype)


@pytest.fixture
def humming(monkeypatch: pytest.MonkeyPatch) -> None:
    """Humming is there, in plain torch."""
    known = {
        "humming": {},
        "humming.forward": {"humming_forward": grouped},
        "humming.schema": {"HummingWeightSchema": Schema},
        "humming.transform": {"prepare_and_transform_humming_tensors": transform},
    }
    for name, members in known.items():
        module = ModuleType(name)
        vars(module).update(members)
        monkeypatch.setitem(sys.modules, name, module)


@pytest.mark.usefixtures("humming")
@pytest.mark.parametrize(
    "weights",
    [
        *(f"int{kind}_{group}" for kind in ("8", "8z", "4", "4z", "2", "2z") for group in ("g64", "row")),
        *(f"{kind}_{where}" for kind in ("e4m3", "e5m2") for where in ("g128", "row", "block128")),
    ],
)
def test_humming(weights: str) -> None:
    assert outcome("humming", weights=weights).error is None


@pytest.mark.usefixtures("humming")
@pytest.mark.parametrize(
    "axes", [{"activation": "relu2"}, {"capacity_factor": 0.5}, {"dtype": "fp16", "packed": "fp16"}]
)
def test_humming_with(axes: dict) -> None:
    assert outcome("humming", **({"weights": "int4z_g128"} | axes)).error is None


@pytest.mark.usefixtures("loaded")
@pytest.mark.parametrize(
    ("way", "axes", "reason"),
    [
        ("marlin", {"weights": "int8z_g128"}, "no kernel for int8z_g128 beside bf16"),
        ("marlin", {"weights": "mxfp4", "dtype": "fp16", "packed": "fp16"}, "mxfp4 beside fp16"),
        ("marlin", {"weights": "bf16"}, "quantised weights"),
        ("marlin", {"weights": "int4_g128", "intermediate": 192}, "whole groups"),
        ("marlin", {"weights": "int4_g32", "intermediate": 96}, "one of 64"),
        ("humming", {"weights": "mxfp4"}, "not mxfp4 beside bf16"),
        ("humming", {"weights": "int4_g128", "hidden": 192}, "multiples of 128"),
        ("humming", {"weights": "e5m2_row", "dtype": "fp16", "packed": "fp16"}, "overflow"),
        ("humming", {"weights": "int4_g128", "activation": "swiglu_oai"}, "biases"),
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
