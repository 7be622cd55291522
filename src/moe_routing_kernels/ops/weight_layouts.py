"""Weights of experts that lie otherwise than our operators take them: rearranged, once where they are frozen.

Models in the form of gpt-oss keep (E, H, 2 I) with gates and ups in turns, where kernels take (E, 2 I, H), gates above ups. A copy lives
as long as its module. It is used only for the same parameter, with the same memory, dtype, shape and count of writes (`Tensor._version`),
so assignment, in-place updates, ``to``, ``half`` and ``load_state_dict`` are seen. Writes that torch does not count, through ``.data`` or
by others that share the memory, are not: `forget` drops the copies, and none are kept unless `register(copies=True)` asks for them.
"""

import warnings
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef


class _Copy(NamedTuple):
    """A weight as operators take it, and of what it was made. Parameters are held, not weakly: torch swaps none that has weak references."""

    of: torch.nn.Parameter
    stamp: tuple
    way: tuple[torch.dtype, bool, bool]
    tensor: Tensor


_copies: WeakKeyDictionary[Any, dict[str, _Copy]] = WeakKeyDictionary()  # of a module, by the names of its weights


def arranged(weight: Tensor, transposed: bool, interleaved: bool) -> Tensor:
    """(E, N, K), or (E, K, N) where it is transposed -> (E, N, K) contiguous, and where rows 2 i and 2 i + 1 are a gate and its up, all
    gates above all ups. A bias (E, N) likewise, never transposed. Differentiable."""
    rows = weight.transpose(1, 2) if transposed else weight
    if interleaved:
        rows = rows.unflatten(1, (-1, 2)).transpose(1, 2).flatten(1, 2)
    return rows.contiguous()


def keeps(weight: Any) -> bool:
    """Whether a copy of these weights can be kept: they are a plain parameter, and torch counts what is written to it."""
    return type(weight) is torch.nn.Parameter and not weight.is_inference()


def kept(module: Any, name: str, dtype: torch.dtype, transposed: bool, interleaved: bool) -> Tensor:
    """`arranged` weights of `dtype`, a copy that is made again when the parameter has changed."""
    weight, way = getattr(module, name), (dtype, transposed, interleaved)
    stamp, of_module = _stamp(weight), _copies.setdefault(module, {})
    known = of_module.get(name)
    if known is None or known.of is not weight or (known.stamp, known.way) != (stamp, way):
        known = of_module.pop(name, None) and None  # the memory of an old copy is free before there is a new one
        # What is made in inference mode takes part in no graph later.
        with torch.inference_mode(False), torch.no_grad():
            copy = arranged(weight.to(dtype), transposed, interleaved)
        if weight.is_cuda and torch.cuda.is_current_stream_capturing():
            return copy  # of the graph alone: it holds nothing before a replay
        known = of_module[name] = _Copy(weight, stamp, way, copy)
    return known.tensor


def drop(module: Any, name: str) -> None:
    """Free the copy of a weight."""
    if not torch.compiler.is_compiling():
        _copies.get(module, {}).pop(name, None)


def forget(model: torch.nn.Module) -> None:
    """Free all copies of a model's weights; those that are needed are made again. For writes that torch does not count."""
    for module in model.modules():
        _copies.pop(module, None)


def warn(module: Any, weights: list[Tensor]) -> None:
    """Say once for each class and size that copies are kept, and how large they are."""
    text = f"{_of_layout(module)}: {_mebibytes(weights):,.1f} MiB more per layer hold copies"
    hint = "call ops.transformers.forget(model) after writes that torch does not count, such as those to .data"
    warnings.warn(f"{text}; {hint}; register(copies=False) runs torch's grouped GEMMs instead", stacklevel=4)


def warn_without(module: Any, weights: list[Tensor]) -> None:
    """Say once for each class and size that torch's grouped GEMMs run, and what our kernels would cost."""
    more = f"copies of them, {_mebibytes(weights):,.1f} MiB more per layer, which are wrong after writes to .data until forget(model) is called"
    text = f"{_of_layout(module)}, so torch's grouped GEMMs run; register(copies=True) keeps {more}"
    warnings.warn(f"{text}; register(copies=False) is silent", stacklevel=3)


def _of_layout(module: Any) -> str:
    return f"{type(module).__name__} keeps its weights in another layout than our kernels take"


def _mebibytes(weights: list[Tensor]) -> float:
    return sum(weight.numel() * weight.element_size() for weight in weights) / 2**20


def _stamp(weight: Tensor) -> tuple:
    """What changes when a parameter's values do. A weak reference to the memory keeps its number from being given to another."""
    memory = StorageWeakRef(weight.untyped_storage())
    return memory, weight._version, weight.storage_offset(), weight.dtype, weight.device, weight.shape, weight.stride()
