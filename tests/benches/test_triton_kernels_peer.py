"""OpenAI's triton_kernels: what they are given, with modules of plain torch in the package's place."""

import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch
from test_library_peers import checked
from torch import Tensor

from moe_routing_kernels.experts.common import activate
from moe_routing_kernels.formats.quantisation import dequantise
from moe_routing_kernels.formats.weights import WEIGHTS

SIZES = {"tokens": 19, "hidden": 160, "intermediate": 96, "experts": 4, "top_k": 2, "dtype": "bf16", "packed": "bf16"}


def multiply(x, weights, bias, tiles, *, y, precision_config, fused_activation=None) -> None:
    """`matmul_ogs` in plain torch: terms by columns, float32 biases, and gate and up in turns for its activation."""
    assert (tiles.experts, tiles.active, tiles.rows) == (4, 1, (tiles.sizes, len(x)))
    if precision_config:
        elements, scales = weights.mT, precision_config.weight_scale.mT
        assert scales.shape[2] % 4 == 0, "loaded by tiles of 128 columns"
        dense = torch.empty(*elements.shape[:2], x.shape[1])
        given = {"elements": elements, "scales": scales[..., : x.shape[1] // 32].view(torch.float8_e8m0fnu)}
        dequantise(given, WEIGHTS["mxfp4"], dense)
        weights = dense.mT
    assert bias is None or bias.dtype == torch.float32
    for expert, (part, out) in enumerate(zip(*(one.split(tiles.sizes.tolist()) for one in (x, y)), strict=True)):
        sums = part.float() @ weights[expert].float() + (0 if bias is None else bias[expert])
        if fused_activation:
            assert fused_activation.fn_args == (1.702, 7.0) and fused_activation.specs.reduction_n == 2
            sums = activate("swiglu_oai_unbiased", torch.cat([sums[:, ::2], sums[:, 1::2]], 1))
        out.copy_(sums)


def turned(tensor: Tensor, kind: str, **how) -> Tensor:
    """`convert_layout`, which keeps the order here."""
    assert tensor.dtype == torch.uint8 and how.pop("mx_axis") == 1 and how in ({}, {"num_warps": 8}), kind
    return tensor


@pytest.fixture(autouse=True)
def triton_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """The package is there."""

    def routing(weights, sizes, experts, active, rows) -> SimpleNamespace:
        return SimpleNamespace(sizes=sizes, experts=experts, active=active, rows=rows)

    def by_name(*names: str):
        return lambda *values, **more: SimpleNamespace(**dict(zip(names, values, strict=False)), **more)

    known = {
        "triton_kernels": {},
        "triton_kernels.matmul_ogs": {
            "RoutingData": routing,
            "matmul_ogs": multiply,
            "FlexCtx": by_name(),
            "PrecisionConfig": by_name(),
            "FusedActivation": by_name("specs", "fn_args"),
        },
        "triton_kernels.numerics": {"InFlexData": by_name()},
        "triton_kernels.specialize": {"FnSpecs": by_name("name", "fn", "fn_arg_names")},
        "triton_kernels.swiglu": {"swiglu_fn": None},
        "triton_kernels.tensor": {
            "FP4": "fp4",
            "convert_layout": turned,
            "wrap_torch_tensor": lambda tensor, dtype=None: tensor,
        },
        "triton_kernels.tensor_details": {},
        "triton_kernels.tensor_details.layout": {
            "make_default_matmul_mxfp4_w_layout": lambda mx_axis: ("values", {"mx_axis": mx_axis}),
            "make_default_matmul_mxfp4_w_scale_layout": lambda mx_axis, num_warps: (
                "scales",
                {"mx_axis": mx_axis, "num_warps": num_warps},
            ),
        },
        "triton_kernels.tensor_details.ragged_tensor": {
            "make_ragged_tensor_metadata": lambda sizes, rows: (sizes, rows)
        },
    }
    for name, members in known.items():
        module = ModuleType(name)
        vars(module).update(members)
        monkeypatch.setitem(sys.modules, name, module)
        parent, _, last = name.rpartition(".")
        if parent:
            monkeypatch.setattr(sys.modules[parent], last, module, raising=False)


@pytest.mark.parametrize("weights", ["bf16", "mxfp4"])
@pytest.mark.parametrize("activation", ["swiglu", "relu2", "swiglu_oai", "swiglu_oai_unbiased", "swiglu_limit10"])
def test_what_they_are_given(weights: str, activation: str) -> None:
    assert (
        checked("experts", "triton_kernels", **(SIZES | {"weights": weights, "activation": activation})).error is None
    )


@pytest.mark.parametrize(
    ("axes", "reason"),
    [
        ({"weights": "int4_g32"}, "mxfp4 with bf16, not int4_g32"),
        ({"weights": "mxfp4", "dtype": "fp16", "packed": "fp16"}, "not mxfp4 with fp16"),
        ({"weights": "mxfp4", "intermediate": 112}, "multiples of 32"),
        ({"weights": "bf16", "packed": "fp8_row"}, "not fp8_row"),
    ],
)
def test_what_cannot_run_says_why(axes: dict, reason: str) -> None:
    assert reason in checked("experts", "triton_kernels", **(SIZES | axes))
