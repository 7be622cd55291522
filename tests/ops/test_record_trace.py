"""examples/record_trace.py on small models of the transformers library: the ids that the router chose, as a cell replays them."""

import importlib.util
from pathlib import Path

import pytest
import torch

from moe_routing_bench.config.expand import cell_of
from moe_routing_bench.workload.draw import draw_ids, generator

EXAMPLE = Path(__file__).parents[2] / "examples/record_trace.py"
TOKENS, EXPERTS, TOP_K, LAYER = 33, 6, 2, 1
SMALL = {
    "vocab_size": 64,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "num_experts_per_tok": TOP_K,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "intermediate_size": 48,
    "moe_intermediate_size": 24,
}


@pytest.fixture(scope="module")
def recording():
    spec = importlib.util.spec_from_file_location("record_trace", EXAMPLE)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.recording


@pytest.mark.slow
@pytest.mark.parametrize(("name", "count"), [("Qwen3Moe", "num_experts"), ("Mixtral", "num_local_experts")])
def test_a_recorded_layer_is_replayed(recording, name, count, tmp_path):
    """In two forward passes, as a generation has; the hook is gone afterwards."""
    library = pytest.importorskip("transformers")
    torch.manual_seed(17)
    model = getattr(library, f"{name}ForCausalLM")(getattr(library, f"{name}Config")(**SMALL, **{count: EXPERTS}))
    block, chosen, path = model.model.layers[LAYER].mlp, [], tmp_path / "trace.parquet"
    torch.nn.init.normal_(block.gate.weight)  # the library leaves it at zero
    router = block.gate.register_forward_hook(lambda _, inputs, outputs: chosen.append(outputs[2]))
    with torch.no_grad(), recording(block.experts, path):
        for tokens in (TOKENS - 1, 1):
            model(torch.randint(1, 64, (1, tokens)))
    router.remove()
    assert not block.experts._forward_pre_hooks
    workload = {"tokens": TOKENS, "experts": EXPERTS, "top_k": TOP_K, "sampler": "trace", "trace": str(path)}
    ids = draw_ids(cell_of("permute", **workload), generator(0, "cpu"))
    assert torch.equal(ids, torch.cat(chosen).int()) and len(ids.unique()) > TOP_K


def test_nothing_is_written_where_the_model_fails(recording, tmp_path):
    path = tmp_path / "trace.parquet"
    with pytest.raises(RuntimeError, match="broken"), recording(torch.nn.Identity(), path):
        raise RuntimeError("broken")
    assert not path.exists()
