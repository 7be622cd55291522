"""Weights repacked for a kernel: once for all calls that are bound with them, and never timed, as models repack when they load."""

from collections.abc import Callable, Hashable
from typing import TypeVar

from torch.utils.weak import WeakIdKeyDictionary

from moe_routing_kernels.experts.dequant import Parts

T = TypeVar("T")
_KEPT = WeakIdKeyDictionary()  # elements -> the last result of `make`


def once(weights: Parts, purpose: Hashable, make: Callable[[], T]) -> T:
    """The result of `make` for `weights` and a purpose. Consecutive calls for one purpose share it; it lives as long as the elements.

    It is made again for another purpose, and where a part was written to since.
    """
    known: dict[Hashable, T] = _KEPT.setdefault(weights["elements"], {})  # type: ignore[assignment]
    key = (purpose, tuple((part.data_ptr(), part._version) for part in weights.values()))
    if key not in known:
        known.clear()
        known[key] = make()
    return known[key]
