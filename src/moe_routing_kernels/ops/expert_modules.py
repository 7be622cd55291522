"""What an experts module of the transformers library computes, in our operators' terms: an activation of ours, or a reason why none.

A module says by its flags how its weights lie. What it computes between its GEMMs is tried, not guessed: its own gate function, or
its activation where it has no gate, is run once on a grid of numbers in float64, beyond its limits, and compared with every activation of
ours that its attributes allow: two classes may have the same attributes and other formulas.
"""

import math
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from moe_routing_kernels.activations import ACTIVATIONS, Activation, activation_of, limited_name
from moe_routing_kernels.errors import UserError
from moe_routing_kernels.experts.common import activate

_LIMITS = ("limit", "swiglu_limit")  # attributes that hold one
_ALPHAS = ("alpha", "swiglu_alpha")
_POINTS = (-1e3, -40.0, -12.0, -7.5, -3.0, -1.0, -0.1, 0.0, 0.1, 1.0, 3.0, 7.5, 12.0, 40.0, 1e3)
_seen: WeakKeyDictionary[Any, tuple[tuple, tuple[str, str]]] = WeakKeyDictionary()


def activation(module: Any) -> tuple[str, str]:
    """The name of a module's activation and "", or "" and why it has none of ours; tried again when an attribute changes."""
    if _is_swiglu(module):
        return "swiglu", ""
    name, reason = _tried(module)
    if name and not _has(module, activation_of(name)):
        return "", "its activation has another limit than its attributes say"
    return name, reason


def _has(module: Any, known: Activation) -> bool:
    """Whether a module still has the numbers of its activation: a compiler, which keeps what was tried, guards what is read here."""
    limits = [getattr(module, name, None) for name in _LIMITS] if known.limit is not None else [known.limit]
    alphas = [getattr(module, name, None) for name in _ALPHAS] if known.shift else [known.alpha]
    return any(limit == known.limit for limit in limits) and any(alpha == known.alpha for alpha in alphas)


def _is_swiglu(module: Any) -> bool:
    """Whether the experts are silu(gate) * up without biases, by the functions themselves: most are, and nothing is tried."""
    from transformers.activations import SiLUActivation  # pyright: ignore[reportMissingImports]
    from transformers.integrations import moe  # pyright: ignore[reportMissingImports]

    plain = module.has_gate and module.is_concatenated and not (module.has_bias or module.is_transposed)
    default = type(module)._apply_gate is moe._default_apply_gate and "_apply_gate" not in vars(module)
    normed = getattr(module, "has_post_expert_norm", False)
    return plain and default and not normed and isinstance(module.act_fn, (torch.nn.SiLU, SiLUActivation))


def _tried(module: Any) -> tuple[str, str]:
    """`activation`, without its guards. The key of what is kept is all plain attributes, the functions that
    are tried, and the names of tensors."""
    plain = (bool, int, float, str, type(None))
    state = [(name, value) for name, value in vars(module).items() if isinstance(value, plain)]
    gate = getattr(module, "_apply_gate", None)
    key = (
        *state,
        *module._parameters,
        *module._buffers,
        getattr(gate, "__func__", gate),
        getattr(module, "act_fn", None),
    )
    known = _seen.get(module)
    if known is None or known[0] != key:
        known = _seen[module] = key, _try(module)
    return known[1]


# What torch.compiler.assume_constant_result does, without loading the compiler.
_tried._dynamo_marked_constant = True  # pyright: ignore[reportFunctionMemberAccess]


def _try(module: Any) -> tuple[str, str]:
    if more := _other_tensors(module):
        return "", f"has {more} besides its weights"
    if getattr(module, "has_post_expert_norm", False):
        return "", "normalises what each expert gives"
    names = [name for name in (*ACTIVATIONS, *_limited(module)) if activation_of(name).gated == module.has_gate]
    gates, ups = torch.cartesian_prod(*[_points(module)] * 2).view(-1, 2, 2).unbind(2)
    try:
        with torch.no_grad(), torch.autocast("cpu", enabled=False):
            got = _apply(module, gates, ups)
    except Exception as error:  # whatever a module of others may raise
        return "", f"its activation cannot be tried: {type(error).__name__}"
    matching = [name for name in names if _same(got, activate(name, _side_by_side(name, gates, ups)))]
    fitting = [name for name in matching if activation_of(name).biased == module.has_bias]
    if fitting:
        return fitting[0], ""
    if matching:
        return "", f"its activation is {matching[0]}, {'with' if module.has_bias else 'without'} biases"
    return "", "its activation is none of ours"


def _other_tensors(module: Any) -> str:
    """The first parameter or buffer that is not one of the weights, or the origin of a parametrised one; "" where there is none."""
    up = "gate_up_proj" if module.has_gate else "up_proj"
    weights = {up, "down_proj", *((f"{up}_bias", "down_proj_bias") if module.has_bias else ())}
    tensors = (*module.named_parameters(), *module.named_buffers())
    return next((name for name, _ in tensors if name not in weights and not name.startswith("parametrizations.")), "")


def _limited(module: Any) -> list[str]:
    """The names of clamped activations with the module's limits."""
    names = []
    for name in _LIMITS:
        try:
            names.append(limited_name(getattr(module, name, None)))  # pyright: ignore[reportArgumentType]
        except UserError:
            continue
    return names


def _points(module: Any) -> Tensor:
    """Numbers on all sides of whatever limits there may be."""
    limits = [getattr(module, name, None) for name in _LIMITS]
    sides = [
        sign * part * x
        for x in limits
        if isinstance(x, int | float) and math.isfinite(x)
        for sign in (-1, 1)
        for part in (0.999, 1, 1.001)
    ]
    points = [*_POINTS, *sides]
    return torch.tensor([*points, *points[:1]] if len(points) % 2 else points, dtype=torch.float64, device="cpu")


def _apply(module: Any, gates: Tensor, ups: Tensor) -> Tensor:
    """What the module makes of gates and ups (n, 2), laid out as its flags say."""
    if not module.has_gate:
        return module.act_fn(gates)
    preact = torch.cat([gates, ups], 1) if module.is_concatenated else torch.stack([gates, ups], 2).flatten(1)
    return module._apply_gate(preact)


def _side_by_side(name: str, gates: Tensor, ups: Tensor) -> Tensor:
    return torch.cat([gates, ups], 1) if activation_of(name).gated else gates


def _same(got: Any, want: Tensor) -> bool:
    shaped = isinstance(got, Tensor) and got.shape == want.shape and got.dtype == want.dtype
    return shaped and torch.allclose(got, want, rtol=1e-11, atol=1e-11)
