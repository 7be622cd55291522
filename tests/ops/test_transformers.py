"""Models of the transformers library with our operators around their experts: the logits of the library's own loop."""

import sys

import pytest
import torch

from moe_routing_bench.errors import UserError
from moe_routing_bench.ops import transformers as ours

SMALL = {
    "vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8,
    "num_experts_per_tok": 2, "max_position_embeddings": 64, "pad_token_id": 0, "intermediate_size": 48, "moe_intermediate_size": 24,
}  # fmt: skip
MODELS = {
    "Qwen2Moe": {"num_experts": 6, "shared_expert_intermediate_size": 40},
    "Qwen3Moe": {"num_experts": 6, "norm_topk_prob": True},
    "Olmoe": {"num_experts": 6},
    "Mixtral": {"num_local_experts": 6},
    "DeepseekV2": {
        "n_routed_experts": 6, "n_shared_experts": 1, "first_k_dense_replace": 1, "kv_lora_rank": 16, "q_lora_rank": None, "qk_nope_head_dim": 8,
        "qk_rope_head_dim": 8, "v_head_dim": 8, "num_key_value_heads": 4,
    },
    "GptOss": {"num_local_experts": 6},
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_logits_are_those_of_the_eager_loop(name, monkeypatch):
    """In float32, and the gradient of the embedding with them; our operators run once for every layer that has experts, the
    operator of experts wherever these are SwiGLU without biases."""
    library = pytest.importorskip("transformers")
    torch.manual_seed(17)
    config = getattr(library, f"{name}Config")(**SMALL | MODELS[name])
    model = getattr(library, f"{name}ForCausalLM")._from_config(config, experts_implementation="eager").float().eval()
    calls, operators = [], {"permute": ours.ops.permute, "fused_experts": ours.ops.fused_experts}
    for one in operators:
        monkeypatch.setattr(ours.ops, one, lambda *given, one=one: calls.append(one) or operators[one](*given))
    with torch.no_grad():
        for parameter in model.parameters():  # the library leaves some at zero
            parameter.normal_(0, 0.2)
    tokens = torch.randint(1, 64, (3, 11))
    found = []
    for implementation in ("eager", ours.register()):
        model.set_experts_implementation(implementation)
        model.zero_grad()
        assert not calls
        logits = model(tokens).logits
        logits.square().mean().backward()
        found.append((logits.detach(), model.get_input_embeddings().weight.grad.clone()))
    (logits, gradient), (our_logits, our_gradient) = found
    layers = 1 if name == "DeepseekV2" else 2
    assert logits.std() > 0.01
    assert (calls.count("permute"), calls.count("fused_experts")) == (layers, 0 if name == "GptOss" else layers)
    torch.testing.assert_close(our_logits, logits, rtol=1e-4, atol=1e-4 * float(logits.std()))
    torch.testing.assert_close(our_gradient, gradient, rtol=1e-3, atol=1e-4 * float(gradient.abs().max()))


def test_without_the_library(monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers.integrations.moe", None)
    with pytest.raises(UserError, match="transformers: got 'not installed'"):
        ours.register()
