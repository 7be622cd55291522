"""Our operators around the experts of the transformers library: `register`, then
``model.set_experts_implementation("moe_routing_bench")``.

SwiGLU experts without biases run as `ops.fused_experts`. Of all others token rows are grouped by `ops.permute` and `ops.pack` and
summed by `ops.combine`, the two products are `torch.nn.functional.grouped_mm`, and what a model computes between these stays
its own. Read from transformers 5.17 to 5.23, ``integrations/moe.py``.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from moe_routing_bench import ops
from moe_routing_bench.errors import bad
from moe_routing_bench.ops.reference import wide

NAME = "moe_routing_bench"


def register() -> str:
    """Make the library know `experts` as an experts implementation; returns its name. Raises `UserError` without the library."""
    try:
        from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        raise bad("transformers", "not installed", "transformers 5.17 or later", "pip install -e '.[peers]'") from error
    ALL_EXPERTS_FUNCTIONS.register(NAME, experts)
    return NAME


def experts(module: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """The experts of `module` on hidden_states (T, H), top_k_index (T, k) and top_k_weights (T, k) -> (T, H).

    `module` is what the library's ``use_experts_implementation`` decorates. Ids outside its experts take no part.
    """
    narrow = top_k_weights.dtype == hidden_states.dtype  # which `combine` reads as they are
    weights = top_k_weights if narrow else top_k_weights.to(wide(hidden_states.dtype))
    normed = getattr(module, "has_post_expert_norm", False)
    if _is_swiglu(module) and not normed:
        return ops.fused_experts(hidden_states, top_k_index, weights, module.gate_up_proj, module.down_proj)
    _, offsets, order, inverse = ops.permute(top_k_index, module.num_experts)
    rows = ops.pack(hidden_states, order, inverse)
    expert = top_k_index.flatten()[order.clamp_min(0)].clamp(0, module.num_experts - 1) if module.has_bias else None
    # Products leave undefined numbers in rows of no expert, and so do their gradients. What a model computes between them may have
    # parameters, as biases are: masks keep these rows out of its inputs and out of the gradients that reach it.
    nowhere = (order < 0).unsqueeze(1)
    inner = _product(module, "gate_up_proj" if module.has_gate else "up_proj", rows, offsets, expert, nowhere)
    inner = module._apply_gate(inner) if module.has_gate else module.act_fn(inner)
    y = _product(module, "down_proj", inner.masked_fill(nowhere, 0), offsets, expert, nowhere)
    return ops.combine(module.post_expert_norm(y) if normed else y, inverse, weights)


def _is_swiglu(module: Any) -> bool:
    """Whether the experts are silu(gate) * up without biases, their weights (E, 2 I, H), gates above ups, and (E, H, I)."""
    from transformers.activations import SiLUActivation  # pyright: ignore[reportMissingImports]
    from transformers.integrations import moe  # pyright: ignore[reportMissingImports]

    plain = module.has_gate and module.is_concatenated and not (module.has_bias or module.is_transposed)
    default = type(module)._apply_gate is moe._default_apply_gate
    return plain and default and isinstance(module.act_fn, (torch.nn.SiLU, SiLUActivation))


def _product(module: Any, name: str, rows: Tensor, offsets: Tensor, expert: Tensor | None, nowhere: Tensor) -> Tensor:
    """rows (R, K) times the weights of each row's expert (R,), and its bias where `expert` is given; zero `nowhere` (R, 1)."""
    weight = getattr(module, name)
    out = F.grouped_mm(rows, weight if module.is_transposed else weight.transpose(1, 2), offs=offsets[1:])
    out = out if expert is None else out + getattr(module, f"{name}_bias")[expert]
    return out.masked_fill(nowhere, 0)
