"""Our operators around the experts of the transformers library: `register`, then
``model.set_experts_implementation("moe_routing_kernels")``.

Experts whose activation is one of ours (`expert_modules`) run as `ops.fused_experts`. Where their weights lie otherwise, as those of
gpt-oss do, they are rearranged in the graph while they are trained; while they are frozen only with ``register(copies=True)``, which keeps
them a second time (`weight_layouts`): torch does not count writes through ``.data``, such as those of a merged adapter or of weights that
another process sends, after which a copy would be wrong in silence until `forget` drops it. For
all others (`unsupported` says why) token rows are grouped by `ops.permute` and `ops.pack` and summed by `ops.combine`, the two GEMMs
are `torch.nn.functional.grouped_mm`, and what a model computes between these stays its own.

Dtypes are the library's: GEMMs are of autocast's dtype where it is on, else of the weights', and the result has that of the tokens.
Read from transformers 5.17 to 5.23, ``integrations/moe.py``.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from moe_routing_kernels import ops
from moe_routing_kernels.errors import bad
from moe_routing_kernels.ops import expert_modules, weight_layouts
from moe_routing_kernels.ops.library import compute_dtype
from moe_routing_kernels.ops.reference import wide
from moe_routing_kernels.ops.weight_layouts import forget

__all__ = ["NAME", "experts", "forget", "register", "register_ep", "unsupported"]

NAME = "moe_routing_kernels"
_NOT_KEPT = "its weights lie otherwise, and no copies are kept"
_options: dict[str, bool | None] = {"copies": None}


def register(copies: bool | None = None) -> str:
    """Make the library know `experts` as an experts implementation; returns its name. Raises `UserError` without the library.

    `copies`: whether frozen weights in another layout than our kernels take are kept a second time. Call `forget` after every write to them
    that torch does not count. Without, those experts run torch's grouped GEMMs, which read the weights themselves; None is without, and says
    so once.
    """
    try:
        from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        raise bad("transformers", "not installed", "5.17 or later", "pip install 'transformers>=5.17'") from error
    _options["copies"] = copies
    ALL_EXPERTS_FUNCTIONS.register(NAME, experts)
    return NAME


def register_ep() -> str:
    """Make the library know `ops.ep` as a way to bring tokens to the ranks of their experts; returns its name.

    ``DistributedConfig(ep_implementation=...)`` takes it, for any experts implementation. A row per (token, rank) travels, where the library's
    ``all_to_all`` sends one per (token, expert). Ranks must have batches of their own: tensor parallelism is refused. Raises `UserError`
    without the library.
    """
    try:
        from transformers.distributed import expert_parallel as library  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        raise bad("transformers", "no EPImplementation", "5.23 or later", "pip install 'transformers>=5.23'") from error

    from moe_routing_kernels.ops import ep  # loads the compiler, for 2 s that others need not wait

    class Deduplicated(library.EPImplementation):
        """`ep.apply` around the experts of a module."""

        def __init__(self, experts: Any, ep_mesh: Any, tp_mesh: Any) -> None:
            if tp_mesh.size() > 1:
                raise bad("tp_size", tp_mesh.size(), 1, "ep_implementation='all_to_all' runs with tensor parallelism")
            super().__init__(experts, ep_mesh, tp_mesh)
            self._local: int = experts.num_experts  # of this rank: its weights are cut before

        def __call__(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
            scores, group = _scores(top_k_weights, hidden_states.dtype), self.ep_mesh.get_group()
            return ep.apply(self._run, hidden_states, top_k_index, scores, self._local, None, group)

        def _run(self, rows: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
            # One row of an expert stands for no rows: the library's loop would not be part of the graph, and other ranks would wait for the
            # gradients that this one does not send.
            more = (0, 0, 0, not len(rows))
            some, ids, weights = F.pad(rows, more), F.pad(ids, more), F.pad(weights, more)
            outside = (ids < 0) | (ids >= self._local)
            given = ids.masked_fill(outside, self._local).long(), weights.masked_fill(outside, 0)
            return self.experts_forward(some, *given)[: len(rows)].to(rows.dtype)

    library.EPImplementationInterface.register(NAME, Deduplicated)
    return NAME


def experts(module: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """The experts of `module` on hidden_states (T, H), top_k_index (T, k) and top_k_weights (T, k) -> (T, H).

    `module` is what the library's ``use_experts_implementation`` decorates. Ids outside its experts take no part.
    """
    x = hidden_states.to(compute_dtype(hidden_states, module.down_proj))
    name, reason = expert_modules.activation(module)
    reason = reason or _in_place(module)
    if reason == _NOT_KEPT and _options["copies"] is None:
        weight_layouts.warn_without(module, [getattr(module, weight) for weight in _names(module)])
    if reason:
        return _in_turn(module, x, top_k_index, top_k_weights).to(hidden_states.dtype)
    w13, w2, b13, b2 = _weights(module, x.dtype)
    scores = _scores(top_k_weights, x.dtype)
    return ops.fused_experts(x, top_k_index, scores, w13, w2, None, name, b13, b2).to(hidden_states.dtype)


def unsupported(module: Any) -> str | None:
    """Why an experts module runs torch's grouped GEMMs between our operators, or None where it runs as `ops.fused_experts`."""
    return expert_modules.activation(module)[1] or _in_place(module) or None


def _in_place(module: Any) -> str:
    """Why a module's weights cannot be rearranged for our kernels; "" where they can be or need not be."""
    if not _rearranged(module) or _trained(module):
        return ""
    if torch.compiler.is_compiling():
        return "its weights lie otherwise, and a compiled graph would rearrange them in every call"
    if not _options["copies"]:
        return _NOT_KEPT
    if not all(_keeps(getattr(module, name)) for name in _names(module)):
        return "its weights lie otherwise, and are no plain parameters, whose copies could be kept"
    return ""


def _names(module: Any) -> tuple[str, str]:
    return "gate_up_proj" if module.has_gate else "up_proj", "down_proj"


def _rearranged(module: Any) -> bool:
    return module.is_transposed or (module.has_gate and not module.is_concatenated)


def _trained(module: Any) -> bool:
    """Whether a gradient of the experts' own weights is wanted."""
    return torch.is_grad_enabled() and any(getattr(module, name).requires_grad for name in _names(module))


def _weights(module: Any, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """w13, w2, b13 and b2 of `dtype` as operators take them."""
    interleaved = module.has_gate and not module.is_concatenated
    arranged: list[Tensor | None] = []
    for name, turns in zip(_names(module), (interleaved, False), strict=True):
        weight, way = getattr(module, name), (module.is_transposed, turns)
        if not any(way):
            arranged.append(weight.to(dtype))
        elif (torch.is_grad_enabled() and weight.requires_grad) or not _keeps(weight):
            weight_layouts.drop(module, name)
            arranged.append(weight_layouts.arranged(weight.to(dtype), *way))
        else:
            arranged.append(weight_layouts.kept(module, name, dtype, *way))
    for name, turns in zip(_names(module), (interleaved, False), strict=True):
        bias = getattr(module, f"{name}_bias") if module.has_bias else None
        arranged.append(None if bias is None else weight_layouts.arranged(bias.to(dtype), False, turns))
    w13, w2, b13, b2 = arranged
    assert w13 is not None and w2 is not None, "experts have weights"
    if _rearranged(module) and not _trained(module):
        weight_layouts.warn(module, [w13, w2])
    return w13, w2, b13, b2


def _keeps(weight: Any) -> bool:
    """Whether a copy of a frozen weight is kept, also where others of its module are trained."""
    return bool(_options["copies"]) and not torch.compiler.is_compiling() and weight_layouts.keeps(weight)


def _scores(top_k_weights: Tensor, dtype: torch.dtype) -> Tensor:
    """The weights of tokens as `combine` takes them with rows of `dtype`."""
    return top_k_weights if top_k_weights.dtype == dtype else top_k_weights.to(wide(dtype))


def _in_turn(module: Any, x: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """`experts` by torch's grouped GEMMs, with the module's own activation between them."""
    _, offsets, order, inverse = ops.permute(top_k_index, module.num_experts)
    rows = ops.pack(x, order, inverse)
    expert = (
        top_k_index.flatten()[order.clamp_min(0)].clamp(0, module.num_experts - 1).long() if module.has_bias else None
    )
    # Grouped GEMMs leave undefined numbers in rows of no expert, and so do their gradients. What a model computes between them may have
    # parameters, as biases are: masks keep these rows out of its inputs and out of the gradients that reach it.
    nowhere = (order < 0).unsqueeze(1)
    up, down = _names(module)
    inner = _grouped_gemm(module, up, rows, offsets, expert, nowhere)
    inner = module._apply_gate(inner) if module.has_gate else module.act_fn(inner)
    y = _grouped_gemm(module, down, inner.to(x.dtype).masked_fill(nowhere, 0), offsets, expert, nowhere)
    if getattr(module, "has_post_expert_norm", False):
        y = module.post_expert_norm(y)
    return ops.combine(y, inverse, _scores(top_k_weights, y.dtype))


def _grouped_gemm(
    module: Any, name: str, rows: Tensor, offsets: Tensor, expert: Tensor | None, nowhere: Tensor
) -> Tensor:
    """rows (R, K) times the weights of each row's expert (R,), and its bias where `expert` is given; zero `nowhere` (R, 1)."""
    weight = getattr(module, name).to(rows.dtype)
    out = F.grouped_mm(rows, weight if module.is_transposed else weight.transpose(1, 2), offs=offsets[1:])
    out = out if expert is None else out + getattr(module, f"{name}_bias")[expert]
    return out.masked_fill(nowhere, 0)
