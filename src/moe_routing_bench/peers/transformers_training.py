"""permute, pack, experts and combine by the transformers library: its module of Qwen3-MoE's experts, in one of its forms, under autograd.

`eager` loops over the experts that have tokens, which it looks up on the host; each adds a gradient as large as x. `grouped_mm`
sorts the assignments. Both add the gradient of x up in its format.
"""

from collections.abc import Callable
from types import SimpleNamespace

import torch
from torch import Tensor
from torch.func import functional_call

from moe_routing_bench.peers import whole_layers as peers
from moe_routing_kernels.experts.common import unaligned
from moe_routing_kernels.layer import Layer

_ACTIVATIONS = {"swiglu": "silu", "geglu": "gelu_pytorch_tanh"}  # of the gate, by the library's names


def unsupported(problem: Layer, form: str) -> str | None:
    """Why it cannot run, or None."""
    if reason := peers.unsupported(problem, "transformers' Qwen3-MoE module", _ACTIVATIONS, ("bf16", "fp16", "fp32")):
        return reason
    return unaligned(problem) if form == "grouped_mm" else None


def layer(problem: Layer, form: str) -> Callable[..., Tensor]:
    """The layer as a differentiable function of x, topk_ids, topk_weights, w13 and w2; `form` is a name of the library's."""
    from transformers.models.qwen3_moe.modeling_qwen3_moe import (  # pyright: ignore[reportMissingImports]
        Qwen3MoeExperts,
    )

    sizes = {"hidden_size": problem.hidden, "moe_intermediate_size": problem.intermediate}
    named = {"hidden_act": _ACTIVATIONS[problem.activation], "_experts_implementation": form}
    with torch.device("meta"):
        module = Qwen3MoeExperts(SimpleNamespace(num_experts=problem.layout.experts, **sizes, **named))

    def run(x: Tensor, topk_ids: Tensor, topk_weights: Tensor, w13: Tensor, w2: Tensor) -> Tensor:
        parameters = {"gate_up_proj": w13, "down_proj": w2}
        return functional_call(module, parameters, (x, topk_ids.long(), topk_weights))

    return run
