"""Weights in the order of one kernel, made once for all calls that are bound with them, and never timed: models do it when they load."""

from collections.abc import Callable, Hashable
from typing import TypeVar

from torch.utils.weak import WeakIdKeyDictionary

from moe_routing_kernels.experts.dequant import Parts

T = TypeVar("T")
_KEPT = WeakIdKeyDictionary()  # of elements: what was made of them last


def once(weights: Parts, purpose: Hashable, make: Callable[[], T]) -> T:
    """What `make` makes of `weights` for a purpose. All that are bound in turn for one purpose share it, and it lives as long as the elements.

    It is made anew for another purpose, or where a part was written to since.
    """
    known: dict[Hashable, T] = _KEPT.setdefault(weights["elements"], {})  # type: ignore[assignment]
    key = (purpose, tuple((part.data_ptr(), part._version) for part in weights.values()))
    if key not in known:
        known.clear()
        known[key] = make()
    return known[key]
