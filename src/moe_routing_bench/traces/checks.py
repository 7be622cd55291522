"""What expert ids have to be before they are written as a trace."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from moe_routing_bench.errors import bad

FIRST = ("layers", "tokens")  # what the first dimension of an array of several layers counts
MOST_EXPERTS = 2**16
MOST_IDS = 2**24  # the digest of a trace's rows is made of Python integers: about 1.5 µs and 90 bytes per id


def one_layer(array: Any, layer: int | None, first: str | None, path: Path) -> Any:
    """One layer, ids (T, k), of an array or tensor (T, k), (L, T, k) or (T, L, k); `first` says which of the last two.

    `layer` counts from 0. Raises `UserError` where layer or order are missing, out of range, or asked of a single layer.
    """
    shape = tuple(array.shape)
    if len(shape) == 2:
        if layer is not None:
            raise bad("--layer", layer, f"none: the ids in {path} have the shape {shape}, of one layer")
        return array
    if len(shape) != 3:
        raise bad("shape of the ids", f"{shape} in {path}", "(tokens, k), (layers, tokens, k) or (tokens, layers, k)")
    if first is None:
        raise bad("--first", f"none, with ids of the shape {shape} in {path}", " or ".join(FIRST), _HINT_FIRST)
    axis = 0 if first == "layers" else 1
    number = checked_layer(layer, shape[axis], path)
    return array[number] if axis == 0 else array[:, number]


_HINT_FIRST = "what the first dimension counts: (layers, tokens, k) or (tokens, layers, k)"


def checked_layer(layer: int | None, layers: int, path: Path) -> int:
    """The number of a layer in a file with several. Raises `UserError`."""
    if not layers:
        raise bad("ids", f"no layer in {path}", "at least one")
    if layer is None or not 0 <= layer < layers:
        raise bad("--layer", layer, f"0 to {layers - 1}, of {path}")
    return layer


def checked(ids: NDArray[Any], experts: int | None, where: object) -> NDArray[np.int32]:
    """Expert ids (T, k) int32 of any array that holds such ids, whole floating-point numbers included.

    `experts` is the number of experts, None: not known. `where` names the array's origin in messages. Raises `UserError`.
    """
    if experts is not None and not 1 <= experts <= MOST_EXPERTS:
        raise bad("--experts", experts, f"1 to {MOST_EXPERTS}")
    if ids.ndim != 2:
        raise bad("shape of the ids", f"{ids.shape} in {where}", "(tokens, k)")
    if not ids.size:
        raise bad("ids", f"none, of the shape {ids.shape}, in {where}", "at least one token, and one id per token")
    _check_most(ids.size, where)
    _check_whole(ids, where)
    low, high = ids.min(), ids.max()
    most = MOST_EXPERTS if experts is None else experts
    if low < 0 or high >= most:
        raise bad("ids", f"{low:.15g} to {high:.15g} in {where}", f"0 to {most - 1}", "" if experts else _HINT_EXPERTS)
    found = np.ascontiguousarray(ids, np.int32)
    ordered = np.sort(found, axis=1)
    if (twice := (ordered[:, 1:] == ordered[:, :-1]).any(1)).any():
        token = int(twice.argmax())
        raise bad("ids", f"{found[token].tolist()} of token {token} in {where}", "distinct experts for each token")
    return found


_HINT_EXPERTS = f"no more than {MOST_EXPERTS} experts can be measured"


def joined(parts: Sequence[NDArray[np.int32]]) -> NDArray[np.int32]:
    """The ids (T, k) of several files after one another. Raises `UserError` where they differ in k or are too many."""
    sizes = sorted({one.shape[1] for one in parts})
    if len(sizes) > 1:
        raise bad(
            "k", f"{' and '.join(map(str, sizes))} in different inputs", "the same number of ids per token in all"
        )
    _check_most(sum(one.size for one in parts), "all inputs")
    return np.concatenate(parts)


def _check_most(count: int, where: object) -> None:
    if count > MOST_IDS:
        raise bad("ids", f"{count} in {where}", f"at most {MOST_IDS} in one trace", "record fewer tokens")


def _check_whole(ids: NDArray[Any], where: object) -> None:
    """Raise `UserError` for values that are not whole numbers."""
    if ids.dtype.kind == "b":
        hint = "a mask (tokens, experts) says which experts, not in which order: `ids = scores.topk(k).indices` does"
        raise bad("ids", f"{ids.dtype} in {where}", "whole numbers", hint)
    if ids.dtype.kind not in "iuf":
        raise bad("ids", f"{ids.dtype} in {where}", "whole numbers")
    if ids.dtype.kind == "f":
        strange = ~np.isfinite(ids) | (ids != np.rint(ids))
        if strange.any():
            token, place = np.argwhere(strange)[0]
            raise bad("ids", f"{ids[token, place]} of token {token} in {where}", "whole numbers")
