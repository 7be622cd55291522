"""From the values of a file to ids (T, k): by what the file proves, by what the user says, or by a question in one line."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from moe_routing_bench.traces import evidence, logits
from moe_routing_bench.traces.asked import FIRST, Asked, Recorded, Values
from moe_routing_bench.traces.checks import check_distinct, check_range, checked, whole
from moe_routing_kernels.errors import bad, pick


def settled(values: Values, where: object) -> Recorded:
    """The ids of one layer, checked. Raises `UserError` for what is no routing, and for what cannot be told."""
    array, asked, proof = values.array, values.rest, values.proof
    experts = _experts(values, where)
    if array.ndim == 3 and not proof:
        array, proof = _layer_of_three(array, asked, where)
        asked = asked.without("layer", "first")
    if array.ndim != 2:
        raise bad(
            "shape of the ids", f"{array.shape} in {where}", "(tokens, k), (layers, tokens, k) or (tokens, layers, k)"
        )
    if asked.top_k is not None and logits.are(array):
        _check_unused(asked, array, where)
        ids, rule = logits.chosen(array, asked.top_k, experts, where)
        return Recorded(ids, array.shape[1], "; ".join(filter(None, (values.note, proof, rule))))
    numbers = whole(array, where)
    _check_unsigned(array, experts, where)
    check_range(numbers, experts, where)
    if proof:
        _check_unused(asked, array, where)
    else:
        numbers, proof = _oriented(numbers, asked, array.dtype, where)
    ids = checked(numbers, experts, where)
    _check_top_k(ids, asked, where)
    if not values.from_zero:
        _check_numbering(ids, experts, where)
    return Recorded(ids, experts, "; ".join(filter(None, (values.note, proof))))


def _experts(values: Values, where: object) -> int | None:
    """The number of experts that the file or the user states. Raises `UserError` where the two differ."""
    if None not in (values.experts, values.rest.experts) and values.experts != values.rest.experts:
        raise bad("--experts", values.rest.experts, f"{values.experts}, as {where} says")
    return values.experts if values.rest.experts is None else values.rest.experts


def _layer_of_three(array: NDArray[Any], asked: Asked, where: object) -> tuple[NDArray[Any], str]:
    """One layer of an array (L, T, k) or (T, L, k), as the user says."""
    got = f"{array.dtype} of the shape {array.shape} in {where}"
    if asked.first is None:
        allowed = "layers for (layers, tokens, k), tokens for (tokens, layers, k)"
        raise bad("--first", f"none, with {got}", allowed, "and --layer; counts per expert are no ids")
    axis = ("layers", "tokens").index(pick("--first", asked.first, ("layers", "tokens"), got))
    number = checked_layer(asked.layer, array.shape[axis], where)
    layer = array[number] if axis == 0 else array[:, number]
    return layer, f"layer {number} of {array.shape[axis]}, as --first {asked.first} says"


def checked_layer(layer: int | None, layers: int, where: object) -> int:
    """The number of a layer in a file with several. Raises `UserError`."""
    if not layers:
        raise bad("ids", f"no layer in {where}", "at least one")
    if layer is None and layers == 1:
        return 0
    if layer is None or not 0 <= layer < layers:
        raise bad("--layer", layer, f"0 to {layers - 1}, of {where}")
    return layer


def _check_unused(asked: Asked, array: NDArray[Any], where: object) -> None:
    """Raise `UserError` for options that speak of another layout than the one that is known."""
    if asked.layer is not None:
        raise bad("--layer", asked.layer, f"none: the ids in {where} have the shape {array.shape}, of one layer")
    if asked.first not in (None, "tokens"):
        raise bad("--first", asked.first, f"tokens, or none: the layout of {where} is known")


def _oriented(ids: NDArray[Any], asked: Asked, dtype: Any, where: object) -> tuple[NDArray[Any], str]:
    """Ids (T, k) of a bare array (A, B), and why its dimensions are read so."""
    if asked.first == "layers":
        return _layer_of_two(ids, asked, where)
    if asked.layer is not None:
        raise bad(
            "--layer", asked.layer, f"none: the ids in {where} have the shape {ids.shape}, of one layer", _HINT_LAYER
        )
    if asked.first == "passes":
        raise bad("--first", asked.first, f"{', '.join(sorted({*FIRST} - {'passes'}))}: {where} is no list")
    if asked.first is not None:
        pick("--first", asked.first, FIRST)
        ids = ids if asked.first == "tokens" else ids.T
        check_distinct(ids, where)
        return ids, f"{FIRST[asked.first].split(' or ')[0]}, as --first {asked.first} says"
    rows, columns = evidence.repeats(ids), evidence.repeats(ids.T)
    if rows.any() and columns.any():
        check_distinct(ids, where, _HINT_REPEATS)
    if ids.shape[0] != ids.shape[1] and asked.top_k in ids.shape:
        tokens_first = asked.top_k == ids.shape[1]
        check_distinct(ids if tokens_first else ids.T, where)
        return (ids, "(tokens, k), as --top-k says") if tokens_first else (ids.T, "(k, tokens), as --top-k says")
    if columns.any() and (proof := evidence.proof(ids)):
        return ids, proof
    if rows.any() and (proof := evidence.proof(ids.T)):
        return ids.T, f"the second dimension counts tokens: {proof}"
    got = f"none, with {dtype} {ids.min()} to {ids.max()} of the shape {ids.shape} in {where}"
    allowed = "; ".join(f"{name}: {layout}" for name, layout in _TWO.items())
    raise bad("--first", got, allowed, _HINT_FIRST)


_TWO = {"tokens": "ids (tokens, k)", "k": "ids (k, tokens)", "layers": "ids (layers, tokens), k = 1, with --layer"}
_HINT_FIRST = (
    "the values do not prove that they are ids, nor which dimension counts tokens; counts per expert look the same"
)
_HINT_LAYER = "--first layers for (layers, tokens) with k = 1"
_HINT_REPEATS = "counts or a mask per expert are no ids; --first k for (k, tokens), layers for (layers, tokens) with k = 1; --columns leaves columns of a table out"


def _layer_of_two(ids: NDArray[Any], asked: Asked, where: object) -> tuple[NDArray[Any], str]:
    """One layer of ids (L, T) with k = 1. Raises `UserError` where a layer has as many values as experts: those are counts."""
    number = checked_layer(asked.layer, len(ids), where)
    if asked.experts is None or ids.shape[1] <= asked.experts:
        got = f"{asked.experts or 'none'}, with the shape {ids.shape} in {where}"
        allowed = "the number of experts, below the number of tokens of a layer"
        raise bad("--experts", got, allowed, "a layer with a value per expert holds counts, not ids")
    return ids[number][:, None], f"(layers, tokens), layer {number} of {len(ids)}, k = 1, as --first layers says"


def _check_unsigned(array: NDArray[Any], experts: int | None, where: object) -> None:
    """Raise `UserError` where an unsigned id may be a -1 that wrapped around."""
    if experts is None and array.dtype.kind == "u" and array.max() == np.iinfo(array.dtype).max:
        got = f"none, with ids up to {array.max()}, the highest {array.dtype}, in {where}"
        raise bad("--experts", got, "the number of experts", f"-1 for padding becomes {array.max()} in {array.dtype}")


def _check_top_k(ids: NDArray[Any], asked: Asked, where: object) -> None:
    if asked.top_k not in (None, ids.shape[1]):
        raise bad("--top-k", asked.top_k, f"{ids.shape[1]}, the ids per token in {where}", "logits have fractions")


def _check_numbering(ids: NDArray[Any], experts: int | None, where: object) -> None:
    """Ask for the number of experts where the ids leave it open how they are numbered and what the highest is."""
    low, high, top_k = int(ids.min()), int(ids.max()), ids.shape[1]
    if experts is not None:
        if top_k >= experts:
            hint = "ranks, a mask or one-hot rows are no ids"
            raise bad("k", f"{top_k} for {experts} experts in {where}", "fewer ids per token than experts", hint)
        return
    doubts = {
        "every token has all ids: ranks, a mask or one-hot rows are no ids": top_k > high,
        "no id is 0: ids that count from 1 look the same": low > 0,
        f"{high} is in every token, as a fused shared expert is": bool((ids == high).any(1).all()),
    }
    for hint, doubtful in doubts.items():
        if doubtful:
            raise bad("--experts", f"none, with ids {low} to {high} in {where}", "the number of routed experts", hint)
