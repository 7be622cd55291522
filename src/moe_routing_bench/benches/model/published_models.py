"""What a whole model is made of besides its experts, by the name of its preset: classes of the transformers library, layers, attention.

What is not said here is the library's default. It does not change how long a forward pass takes: bases of rotary positions, say.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from moe_routing_kernels.errors import bad
from moe_routing_kernels.formats.weights import WEIGHTS

CONTEXT = 128  # tokens of each sequence before the one that a decoding step is given


@dataclass(frozen=True)
class Architecture:
    """`family` begins the names of the library's classes. `names` are fields of its config that other families call otherwise;
    `options` are those that the family has besides."""

    family: str
    layers: int
    heads: int
    vocabulary: int
    options: Mapping[str, Any] = field(default_factory=dict)
    names: Mapping[str, str] = field(default_factory=dict)


_QWEN3 = {"norm_topk_prob": True}  # weights of the chosen experts sum to 1
ARCHITECTURES: Mapping[str | None, Architecture] = {
    None: Architecture("Qwen3Moe", 2, 4, 512, _QWEN3 | {"num_key_value_heads": 2, "head_dim": 16}),  # other sizes
    "qwen1.5-moe-a2.7b": Architecture(
        "Qwen2Moe", 24, 16, 151936, {"num_key_value_heads": 16, "shared_expert_intermediate_size": 5632}
    ),
    "deepseek-v2-lite": Architecture(
        "DeepseekV2",
        27,
        16,
        102400,
        {
            "intermediate_size": 10944,
            "first_k_dense_replace": 1,
            "n_shared_experts": 2,
            "q_lora_rank": None,
            "kv_lora_rank": 512,
            "qk_nope_head_dim": 128,
            "qk_rope_head_dim": 64,
            "v_head_dim": 128,
        },
        {"num_experts": "n_routed_experts"},
    ),
    "olmoe-1b-7b": Architecture("Olmoe", 16, 16, 50304, names={"moe_intermediate_size": "intermediate_size"}),
    "qwen3-30b-a3b": Architecture("Qwen3Moe", 48, 32, 151936, _QWEN3 | {"num_key_value_heads": 4, "head_dim": 128}),
}
MOST_LAYERS = max(one.layers for one in ARCHITECTURES.values())


@dataclass(frozen=True)
class Model:
    """A forward pass of a model: over one sequence of `tokens` or, to `decode`, over the next token of as many sequences."""

    architecture: Architecture
    tokens: int
    decode: bool
    hidden: int
    intermediate: int
    experts: int
    top_k: int
    dtype: str  # of activations, and of all weights but quantised ones
    weights: str  # of routed experts

    @property
    def sequences(self) -> int:
        """Sequences of the batch."""
        return self.tokens if self.decode else 1

    @property
    def quantised(self) -> bool:
        """Whether the routed experts' weights are."""
        return self.weights in WEIGHTS

    @property
    def fields(self) -> dict[str, Any]:
        """The fields of the library's config."""
        one = self.architecture
        sizes = {
            "hidden_size": self.hidden,
            "moe_intermediate_size": self.intermediate,
            "num_experts": self.experts,
            "num_experts_per_tok": self.top_k,
            "num_hidden_layers": one.layers,
            "num_attention_heads": one.heads,
            "vocab_size": one.vocabulary,
            "max_position_embeddings": self.tokens + CONTEXT,
        }
        return {one.names.get(name, name): value for name, value in sizes.items()} | dict(one.options)


def architecture(model: str | None) -> Architecture:
    """The architecture of a preset. Raises `UserError` for one of which only the experts are known."""
    if model not in ARCHITECTURES:
        known = ", ".join(name for name in ARCHITECTURES if name)
        raise bad("model of bench model", model, known, "of other presets only the experts are known: use bench layer")
    return ARCHITECTURES[model]
