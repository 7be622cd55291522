"""FlashInfer's layer: what it is given, with its function in plain torch in the package's place."""

import shutil
import sys
from contextlib import contextmanager
from enum import Enum
from types import ModuleType, SimpleNamespace

import pytest
import torch
from torch import Tensor

from moe_routing_bench.benches.registry import BENCHES
from moe_routing_bench.config.expand import cell_of
from moe_routing_bench.peers import flashinfer_layer
from moe_routing_kernels.experts.common import activate

SIZES = {"tokens": 9, "hidden": 64, "intermediate": 64, "experts": 8, "top_k": 3}
Kind = Enum("ActivationType", {"Swiglu": 3, "Relu2": 6, "GegluTanh": 8})
WAYS = {"swiglu": Kind.Swiglu, "geglu": Kind.GegluTanh, "relu2": Kind.Relu2}
CLAMPED = {(1.702, 1.0, 7.0): "swiglu_oai_unbiased", (1.0, 0.0, 10.0): "swiglu_limit10"}


def fused_moe(
    x, ids, weights, w1, w2, *, num_experts, top_k, moe_output, activation_type, swiglu_limit=None, **swiglu
) -> Tensor:
    """`cute_dsl_fused_moe_bf16` in plain torch."""
    assert (num_experts, top_k) == (len(w2), ids.shape[1]) and ids.dtype == torch.int32
    way = next(name for name, kind in WAYS.items() if kind.value == activation_type)
    if swiglu_limit:
        way = CLAMPED[swiglu["swiglu_alpha"], swiglu["swiglu_beta"], swiglu_limit]
    elif way == "swiglu":
        assert (swiglu["swiglu_alpha"], swiglu["swiglu_beta"]) == (1.0, 0.0)
    if way != "relu2":
        up, gate = w1.unflatten(1, (-1, 2, 32)).unbind(2)
        w1 = torch.cat([gate.flatten(1, 2), up.flatten(1, 2)], 1)
    moe_output.zero_()
    for expert in range(len(w2)):
        token, slot = (ids == expert).nonzero(as_tuple=True)
        y = activate(way, x[token].float() @ w1[expert].float().T) @ w2[expert].float().T
        moe_output.index_add_(0, token, (y * weights[token, slot, None]).to(x.dtype))
    return moe_output


@pytest.fixture
def tuned(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """FlashInfer and what it compiles with are there; whether its tuner was on, when it was entered."""
    entered: list[bool] = []

    @contextmanager
    def autotune(on: bool):
        entered.append(on)
        yield

    tuner = SimpleNamespace(profiling_cache={"sizes": ((128, "tiles"), None)})
    members = {
        "flashinfer": {},
        "flashinfer.autotuner": {"AutoTuner": SimpleNamespace(get=lambda: tuner), "autotune": autotune},
        "flashinfer.fused_moe": {"cute_dsl_fused_moe_bf16": fused_moe},
        "flashinfer.tllm_enums": {"ActivationType": Kind},
    }
    for name, known in members.items():
        vars(module := ModuleType(name)).update(known)
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(shutil, "which", lambda name: name)
    monkeypatch.setenv("FLASHINFER_CUBIN_DIR", "here")
    return entered


def outcome(**axes):
    """The check of a layer's result, or why it cannot run."""
    bench, cell = BENCHES["layer"], cell_of("layer", **SIZES).but(**({"dtype": "bf16"} | axes))
    definition = bench.definition()
    if reason := flashinfer_layer.unsupported(definition.problem(cell)):
        return reason
    inputs = definition.build(cell, 3, "cpu") | definition.shared(cell, 3, "cpu")
    expected, outputs = definition.reference(cell, inputs), definition.empty_outputs(cell, inputs)
    ids, weights = expected["topk_ids"].to(torch.int32), expected["topk_weights"].float()
    given = {name: inputs[name] for name in ("x", "w13", "w2")}
    call = flashinfer_layer.bind(
        definition.problem(cell), topk_ids=ids, topk_weights=weights, combined=outputs["combined"], **given
    )
    outputs["combined"].fill_(torch.nan)
    call()
    assert call.configuration() == "(128, 'tiles')"  # type: ignore[attr-defined]
    return bench.check("flashinfer", cell, inputs, outputs, expected)


@pytest.mark.parametrize("activation", ["swiglu", "geglu", "relu2", "swiglu_oai_unbiased", "swiglu_limit10"])
def test_what_it_is_given(activation: str, tuned: list[bool]) -> None:
    assert outcome(activation=activation).error is None
    assert tuned == [True]


@pytest.mark.usefixtures("tuned")
@pytest.mark.parametrize(
    ("axes", "reason"),
    [
        ({"activation": "swiglu_oai"}, "biases"),
        ({"capacity_factor": 1.0}, "capacity"),
        ({"weights": "int4_g32"}, "one format"),
        ({"intermediate": 48}, "turns of 32"),
    ],
)
def test_what_cannot_run_says_why(axes: dict, reason: str) -> None:
    assert reason in str(outcome(**axes))


@pytest.mark.usefixtures("tuned")
def test_without_what_its_sort_is_compiled_from(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FLASHINFER_CUBIN_DIR")
    assert "FLASHINFER_CUBIN_DIR" in str(outcome())
    monkeypatch.setattr(shutil, "which", lambda name: None)
    assert "nvcc" in str(outcome())
