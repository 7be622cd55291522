"""Models of the transformers library with our operators around their experts: the logits of the library's own loop."""

import functools
import sys
from pathlib import Path
from typing import Any, cast

import pytest
import torch

import rank_processes
from moe_routing_kernels.errors import UserError
from moe_routing_kernels.ops import transformers as ours

SMALL = {
    "vocab_size": 64,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "num_experts_per_tok": 2,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "intermediate_size": 48,
    "moe_intermediate_size": 24,
}
MODELS = {
    "Qwen2Moe": {"num_experts": 6, "shared_expert_intermediate_size": 40},
    "Qwen3Moe": {"num_experts": 6, "norm_topk_prob": True},
    "Olmoe": {"num_experts": 6},
    "Mixtral": {"num_local_experts": 6},
    "DeepseekV2": {
        "n_routed_experts": 6,
        "n_shared_experts": 1,
        "first_k_dense_replace": 1,
        "kv_lora_rank": 16,
        "q_lora_rank": None,
        "qk_nope_head_dim": 8,
        "qk_rope_head_dim": 8,
        "v_head_dim": 8,
        "num_key_value_heads": 4,
    },
    "GptOss": {"num_local_experts": 6},
}
CAST = ("Qwen3Moe", "Mixtral", "Olmoe", "GptOss")
TOKENS = torch.randint(1, 64, (3, 11), generator=torch.Generator().manual_seed(17))
pytestmark = pytest.mark.filterwarnings("ignore:.*keeps its weights in another layout")


def model_of(name, deviation=0.2):
    """A tiny model in float32, drawn anew."""
    library = pytest.importorskip("transformers")
    torch.manual_seed(17)
    config = getattr(library, f"{name}Config")(**SMALL | MODELS[name])
    model = getattr(library, f"{name}ForCausalLM")._from_config(config, experts_implementation="eager").float().eval()
    with torch.no_grad():
        for parameter in model.parameters():  # the library leaves some at zero
            parameter.normal_(0, deviation)
    return model


def each_way(model, function):
    """What a function of the model gives with the library's loop, and with our operators."""
    found = []
    for implementation in ("eager", ours.register(copies=True)):
        model.set_experts_implementation(implementation)
        model.zero_grad()
        found.append(function(model))
    return found


@pytest.fixture
def calls(monkeypatch):
    """The operators that are called."""
    names, operators = [], {"permute": ours.ops.permute, "fused_experts": ours.ops.fused_experts}
    for name in operators:
        monkeypatch.setattr(ours.ops, name, lambda *given, name=name: names.append(name) or operators[name](*given))
    return names


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_logits_and_gradients_are_those_of_the_eager_loop(name, calls):
    """In float32, the gradients of all parameters; our operators run once for every layer that has experts."""
    model = model_of(name)

    def step(model):
        logits = model(TOKENS).logits
        logits.square().mean().backward()
        return logits.detach(), {n: one.grad.clone() for n, one in model.named_parameters() if one.grad is not None}

    (logits, gradients), (our_logits, our_gradients) = each_way(model, step)
    layers = 1 if name == "DeepseekV2" else 2
    assert logits.std() > 0.01
    assert (calls.count("permute"), calls.count("fused_experts")) == (layers, layers)
    torch.testing.assert_close(our_logits, logits, rtol=1e-4, atol=1e-4 * float(logits.std()))
    assert gradients.keys() == our_gradients.keys()
    for key, gradient in gradients.items():
        atol = 1e-4 * float(gradient.abs().max())
        torch.testing.assert_close(
            our_gradients[key], gradient, rtol=1e-3, atol=atol, msg=lambda text, key=key: f"{key}: {text}"
        )


@pytest.mark.slow
@pytest.mark.parametrize("frozen", ["experts", "all_but_biases", "inference"])
@pytest.mark.parametrize("name", ["GptOss", "Mixtral"])
def test_frozen_experts(name, frozen, calls):
    """As adapters leave them: the embedding learns through experts that do not. Their biases may learn alone. In inference nothing does."""
    model = model_of(name)
    for key, parameter in model.named_parameters():
        parameter.requires_grad_(".experts." not in key or (frozen == "all_but_biases" and key.endswith("bias")))

    def step(model):
        if frozen == "inference":
            with torch.inference_mode():
                return [model(TOKENS).logits.clone()]
        logits = model(TOKENS).logits
        learned = [one for one in model.parameters() if one.requires_grad]
        return [logits.detach(), *torch.autograd.grad(logits.square().mean(), learned, allow_unused=True)]

    found, our = each_way(model, step)
    assert calls.count("fused_experts") == 2
    for got, want in zip(our, found, strict=True):
        assert (got is None) == (want is None)
        if want is not None:
            torch.testing.assert_close(got, want, rtol=1e-3, atol=2e-4 * float(want.abs().max()))


@pytest.mark.slow
@pytest.mark.parametrize("grad", [False, True], ids=["inference", "training"])
@pytest.mark.parametrize("weights", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("cast", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", CAST)
def test_under_autocast_models_run_as_they_do_with_the_eager_loop(name, cast, weights, grad):
    """Its dtypes, and its numbers within roundings; gradients reach the parameters, in their dtype."""
    model = model_of(name, 0.1).to(weights)

    def step(model):
        with torch.autocast("cpu", dtype=cast), torch.set_grad_enabled(grad):
            logits = model(TOKENS).logits
        gradients = (
            torch.autograd.grad(logits.float().square().sum(), list(model.parameters()), allow_unused=True)
            if grad
            else ()
        )
        return [logits.detach(), *gradients]

    found, our = each_way(model, step)
    for got, want in zip(our, found, strict=True):
        assert (got is None) == (want is None)
        if want is not None:
            assert got.dtype == want.dtype and got.isfinite().all()
            assert float((got.double() - want.double()).norm()) < 0.05 * float(want.double().norm()) + 1e-12


def test_without_the_library(monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers.integrations.moe", None)
    with pytest.raises(UserError, match="transformers: got 'not installed'"):
        ours.register()


def parallel(rank, name, tokens, among):
    """Result and gradients of a rank's tokens and experts by the library's exchange and by ours, around both implementations of experts."""
    from torch.distributed.device_mesh import init_device_mesh
    from transformers.distributed.expert_parallel import apply_expert_parallelism

    meshes, found = init_device_mesh("cpu", (2, 1), mesh_dim_names=("ep", "tp")), []
    plan = {"gate_up_proj": "grouped_gemm", "down_proj": "grouped_gemm", "": "ep_dispatch_experts"}
    for implementation, way in (("eager", "all_to_all"), ("eager", ours.register_ep()), (ours.register(), ours.NAME)):
        model = model_of(name)
        model.set_experts_implementation(implementation)
        module = model.model.layers[1].mlp.experts
        apply_expert_parallelism(module, meshes["ep"], meshes["tp"], plan, way)
        torch.manual_seed(rank)
        x, weights = torch.randn(tokens[rank], 32, requires_grad=True), torch.rand(tokens[rank], 2, requires_grad=True)
        out = module(x, torch.rand(tokens[rank], among).topk(2).indices, weights)
        out.square().sum().backward()
        gradients = [one.grad for one in (x, weights, module.gate_up_proj, module.down_proj)]
        found.append([out.detach(), *gradients[:2], *(cast(Any, one).to_local() for one in gradients[2:])])
    return found


@pytest.mark.parametrize(("tokens", "among"), [((5, 8), 6), ((0, 3), 6), ((2, 3), 3)])
def test_expert_parallel_models_have_the_results_of_the_librarys_exchange(tokens, among, tmp_path: Path) -> None:
    """The second rank gets no row where tokens choose among the first 3 experts."""
    pytest.importorskip("transformers.distributed.expert_parallel")
    found = rank_processes.called(
        2, tmp_path, functools.partial(parallel, name="Qwen3Moe", tokens=tokens, among=among), 60
    )
    assert all(isinstance(each, list) for each in found), found
    for theirs, *others in found:
        for way in others:
            torch.testing.assert_close(way, theirs, rtol=1e-4, atol=1e-4)
