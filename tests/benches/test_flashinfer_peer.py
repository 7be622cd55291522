"""FlashInfer's layers: what they are given, with its functions in plain torch in the package's place."""

import shutil
import sys
from contextlib import contextmanager
from enum import Enum
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch
from torch import Tensor

from moe_routing_bench.benches.registry import BENCHES
from moe_routing_bench.config.expand import cell_of
from moe_routing_kernels.experts.common import activate
from moe_routing_kernels.implementations import load

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


def cutlass_fused_moe(
    x, ids, weights, w1, w2, dtype, scales, *, output, workspace_buffer, activation_type, tune_max_num_tokens,
    fc1_expert_biases=None, fc2_expert_biases=None, swiglu_alpha=None, swiglu_beta=None, swiglu_limit=None,
) -> Tensor:  # fmt: skip
    """`cutlass_fused_moe` in plain torch: up above gate, parameters of the activation by expert."""
    assert len(workspace_buffer) == 7 and tune_max_num_tokens >= 8192 and dtype == x.dtype and scales == []
    assert ids.dtype == torch.int32 and weights.dtype == torch.float32
    output.zero_()
    for expert in range(len(w2)):
        token, slot = (ids == expert).nonzero(as_tuple=True)
        h = x[token].float() @ w1[expert].float().T
        h = h if fc1_expert_biases is None else h + fc1_expert_biases[expert].float()
        if activation_type is Kind.Relu2:
            h = h.relu().square()
        else:
            up, gate = h.chunk(2, 1)
            alpha, beta, limit = (
                default if given is None else float(given[expert])
                for given, default in ((swiglu_alpha, 1.0), (swiglu_beta, 0.0), (swiglu_limit, torch.inf))
            )
            gate = gate.clamp(max=limit)
            h = gate * torch.sigmoid(alpha * gate) * (up.clamp(-limit, limit) + beta)
        y = h @ w2[expert].float().T
        y = y if fc2_expert_biases is None else y + fc2_expert_biases[expert].float()
        output.index_add_(0, token, (y * weights[token, slot, None]).to(x.dtype))
    return output


@pytest.fixture
def tuned(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """FlashInfer and what it compiles with are there; whether its tuner was on, when it was entered."""
    entered: list[bool] = []

    @contextmanager
    def autotune(on: bool):
        entered.append(on)
        yield

    chosen = {
        ("trtllm::fused_moe::gemm1", "sizes"): ((0, 5), None),
        ("CuteDslFusedMoE::run_moe_sm90::Swiglu", "sizes"): ((128, "tiles"), None),
    }
    tuner = SimpleNamespace(profiling_cache=chosen)
    members = {
        "flashinfer": {},
        "flashinfer.autotuner": {"AutoTuner": SimpleNamespace(get=lambda: tuner), "autotune": autotune},
        "flashinfer.fused_moe": {
            "cute_dsl_fused_moe_bf16": fused_moe,
            "cutlass_fused_moe": cutlass_fused_moe,
            "cutlass_fused_moe_workspace_size": lambda *sizes, **formats: 7,
        },
        "flashinfer.jit": {"env": SimpleNamespace(get_aot_path=lambda name: Path("nowhere") / name)},
        "flashinfer.tllm_enums": {"ActivationType": Kind},
    }
    for name, known in members.items():
        vars(module := ModuleType(name)).update(known)
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(shutil, "which", lambda name: name)
    monkeypatch.setenv("FLASHINFER_CUBIN_DIR", "here")
    return entered


def outcome(name: str = "flashinfer", **axes):
    """The check of a layer's result, or why it cannot run."""
    bench, cell = BENCHES["layer"], cell_of("layer", **SIZES).but(**({"dtype": "bf16"} | axes))
    definition, (_, place) = bench.definition(), map(bench[name].fused, bench[name].parts)
    layer = load(place)
    if reason := layer.unsupported(definition.problem(cell)):
        return reason
    inputs = definition.build(cell, 3, "cpu") | definition.shared(cell, 3, "cpu")
    expected, outputs = definition.reference(cell, inputs), definition.empty_outputs(cell, inputs)
    ids, weights = expected["topk_ids"].to(torch.int32), expected["topk_weights"].float()
    given = {name: inputs[name] for name in ("x", "w13", "w2", "b13", "b2") if name in inputs}
    call = layer.bind(
        definition.problem(cell), topk_ids=ids, topk_weights=weights, combined=outputs["combined"], **given
    )
    outputs["combined"].fill_(torch.nan)
    call()
    (choice,) = call.configuration().split("; ")  # type: ignore[attr-defined]
    assert choice == CHOSEN[name]
    return bench.check("flashinfer", cell, inputs, outputs, expected)


CHOSEN = {
    "flashinfer": "CuteDslFusedMoE::run_moe_sm90::Swiglu: (128, 'tiles')",
    "trtllm_cutlass": "trtllm::fused_moe::gemm1: (0, 5)",
}


@pytest.mark.parametrize("activation", ["swiglu", "geglu", "relu2", "swiglu_oai_unbiased", "swiglu_limit10"])
def test_what_it_is_given(activation: str, tuned: list[bool]) -> None:
    assert outcome(activation=activation).error is None
    assert tuned == [True]


@pytest.mark.parametrize("activation", ["swiglu", "relu2", "swiglu_oai", "swiglu_oai_unbiased", "swiglu_limit10"])
def test_what_tensorrt_is_given(activation: str, tuned: list[bool]) -> None:
    assert outcome("trtllm_cutlass", activation=activation).error is None
    assert tuned == [True]


@pytest.mark.usefixtures("tuned")
@pytest.mark.parametrize(
    ("name", "axes", "reason"),
    [
        ("flashinfer", {"activation": "swiglu_oai"}, "biases"),
        ("flashinfer", {"capacity_factor": 1.0}, "capacity"),
        ("flashinfer", {"weights": "int4_g32"}, "one format"),
        ("flashinfer", {"intermediate": 48}, "turns of 32"),
        ("trtllm_cutlass", {"activation": "geglu"}, "geglu"),
        ("trtllm_cutlass", {"capacity_factor": 1.0}, "capacity"),
        ("trtllm_cutlass", {"intermediate": 44}, "multiples of 8"),
    ],
)
def test_what_cannot_run_says_why(name: str, axes: dict, reason: str) -> None:
    assert reason in str(outcome(name, **axes))


@pytest.mark.usefixtures("tuned")
def test_without_what_they_are_compiled_from(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FLASHINFER_CUBIN_DIR")
    assert "FLASHINFER_CUBIN_DIR" in str(outcome())
    monkeypatch.setattr(shutil, "which", lambda name: None)
    assert "nvcc" in str(outcome()) and "nvcc" in str(outcome("trtllm_cutlass"))
