"""permute, pack, experts and combine as the transformers library does them: an experts module of it with one of its forms.

`eager` loops over the experts that have tokens and adds their rows in the tokens' format; `batched_mm` copies the weights of every
assignment's expert, which is meant for few tokens; `grouped_mm` sorts the assignments. The module is that of Qwen3-MoE, with the
weights of the cell. The library's routers hand over ids of 64 bits; ours are converted in every call, which is part of this
peer's time (T k elements).

In training, each expert of `eager`, which it looks up on the host, adds a gradient as large as x. Both forms add the gradient of x up
in its format.
"""

from collections.abc import Callable
from types import SimpleNamespace

import torch
from torch import Tensor, nn
from torch.func import functional_call

from moe_routing_bench.peers import common as peers
from moe_routing_kernels.experts.common import unaligned
from moe_routing_kernels.layer import Layer

_ACTIVATIONS = {"swiglu": "silu", "geglu": "gelu_pytorch_tanh"}  # of the gate, by the library's names


def unsupported(problem: Layer, form: str) -> str | None:
    """Why it cannot run, or None."""
    if reason := peers.layer_unsupported(
        problem, "transformers' Qwen3-MoE module", _ACTIVATIONS, ("bf16", "fp16", "fp32")
    ):
        return reason
    return unaligned(problem) if form == "grouped_mm" else None


def bind(
    problem: Layer,
    *,
    form: str,
    x: Tensor,
    topk_ids: Tensor,
    topk_weights: Tensor,
    w13: Tensor,
    w2: Tensor,
    combined: Tensor,
    residual: Tensor | None = None,
) -> Callable[[], dict[str, Tensor]]:
    """Bind x (T, H), topk_ids (T, k), topk_weights (T, k) float32, w13 (E, 2 I, H), w2 (E, H, I); the call returns combined (T, H).

    The library allocates its result, so a bound `combined` is not written. A `residual` (T, H) is added by torch.
    """
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

    sizes = {"num_experts": len(w2), "hidden_size": problem.hidden, "moe_intermediate_size": problem.intermediate}
    with torch.device("meta"):
        module = Qwen3MoeExperts(
            SimpleNamespace(**sizes, hidden_act=_ACTIVATIONS[problem.activation], _experts_implementation=form)
        )
    module.gate_up_proj, module.down_proj = (nn.Parameter(w, requires_grad=False) for w in (w13, w2))

    def run() -> dict[str, Tensor]:
        with torch.no_grad():
            total = module(x, topk_ids.long(), topk_weights)
            return peers.returned(total, residual)

    return run


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
