"""From the values of a file to ids (T, k): by what the file proves, by options, or by a question in one line.

Of router logits (T, E) the k highest of each token are its ids, of equal ones the lowest id.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from moe_routing_bench.traces import FIRST, Options, Recorded, Values, writing
from moe_routing_bench.traces.writing import MOST_EXPERTS, MOST_VALUES, check_distinct, check_range, checked, whole
from moe_routing_kernels.errors import bad, pick


def settled(values: Values, where: object) -> Recorded:
    """The ids of one layer, checked. Raises `UserError` for what is no routing, and for what cannot be told."""
    array, options, proof = values.array, values.rest, values.proof
    experts = _experts(values, where)
    if array.ndim == 3 and not proof:
        array, proof = _layer_of_three(array, options, where)
        options = options.without("layer", "first")
    if array.ndim != 2:
        raise bad(
            "shape of the ids", f"{array.shape} in {where}", "(tokens, k), (layers, tokens, k) or (tokens, layers, k)"
        )
    if options.top_k is not None and are_logits(array):
        _check_unused(options, array, where)
        ids, rule = chosen_by_logits(array, options.top_k, experts, where)
        return Recorded(ids, array.shape[1], "; ".join(filter(None, (values.note, proof, rule))))
    numbers = whole(array, where)
    _check_unsigned(array, experts, where)
    check_range(numbers, experts, where)
    if proof:
        _check_unused(options, array, where)
    else:
        numbers, proof = _oriented(numbers, options, array.dtype, where)
    ids = checked(numbers, experts, where)
    _check_top_k(ids, options, where)
    if not values.from_zero:
        _check_numbering(ids, experts, where)
    return Recorded(ids, experts, "; ".join(filter(None, (values.note, proof))))


def _experts(values: Values, where: object) -> int | None:
    """The number of experts that the file or the user states. Raises `UserError` where the two differ."""
    if None not in (values.experts, values.rest.experts) and values.experts != values.rest.experts:
        raise bad("--experts", values.rest.experts, f"{values.experts}, as {where} says")
    return values.experts if values.rest.experts is None else values.rest.experts


def _layer_of_three(array: NDArray[Any], options: Options, where: object) -> tuple[NDArray[Any], str]:
    """One layer of an array (L, T, k) or (T, L, k), as the user says."""
    got = f"{array.dtype} of the shape {array.shape} in {where}"
    if options.first is None:
        allowed = "layers for (layers, tokens, k), tokens for (tokens, layers, k)"
        raise bad("--first", f"none, with {got}", allowed, "and --layer; counts per expert are no ids")
    axis = ("layers", "tokens").index(pick("--first", options.first, ("layers", "tokens"), got))
    number = checked_layer(options.layer, array.shape[axis], where)
    layer = array[number] if axis == 0 else array[:, number]
    return layer, f"layer {number} of {array.shape[axis]}, as --first {options.first} says"


def checked_layer(layer: int | None, layers: int, where: object) -> int:
    """The number of a layer in a file with several. Raises `UserError`."""
    if not layers:
        raise bad("ids", f"no layer in {where}", "at least one")
    if layer is None and layers == 1:
        return 0
    if layer is None or not 0 <= layer < layers:
        raise bad("--layer", layer, f"0 to {layers - 1}, of {where}")
    return layer


def _check_unused(options: Options, array: NDArray[Any], where: object) -> None:
    """Raise `UserError` for options that speak of another layout than the one that is known."""
    if options.layer is not None:
        raise bad("--layer", options.layer, f"none: the ids in {where} have the shape {array.shape}, of one layer")
    if options.first not in (None, "tokens"):
        raise bad("--first", options.first, f"tokens, or none: the layout of {where} is known")


def _oriented(ids: NDArray[Any], options: Options, dtype: Any, where: object) -> tuple[NDArray[Any], str]:
    """Ids (T, k) of a bare array (A, B), and why its dimensions are read so."""
    if options.first == "layers":
        return _layer_of_two(ids, options, where)
    if options.layer is not None:
        raise bad(
            "--layer", options.layer, f"none: the ids in {where} have the shape {ids.shape}, of one layer", _HINT_LAYER
        )
    if options.first == "passes":
        raise bad("--first", options.first, f"{', '.join(sorted({*FIRST} - {'passes'}))}: {where} is no list")
    if options.first is not None:
        pick("--first", options.first, FIRST)
        ids = ids if options.first == "tokens" else ids.T
        check_distinct(ids, where)
        return ids, f"{FIRST[options.first].split(' or ')[0]}, as --first {options.first} says"
    rows, columns = writing.repeats(ids), writing.repeats(ids.T)
    if rows.any() and columns.any():
        check_distinct(ids, where, _HINT_REPEATS)
    if ids.shape[0] != ids.shape[1] and options.top_k in ids.shape:
        tokens_first = options.top_k == ids.shape[1]
        check_distinct(ids if tokens_first else ids.T, where)
        return (ids, "(tokens, k), as --top-k says") if tokens_first else (ids.T, "(k, tokens), as --top-k says")
    if columns.any() and (proof := writing.proof_of(ids)):
        return ids, proof
    if rows.any() and (proof := writing.proof_of(ids.T)):
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


def _layer_of_two(ids: NDArray[Any], options: Options, where: object) -> tuple[NDArray[Any], str]:
    """One layer of ids (L, T) with k = 1. Raises `UserError` where a layer has as many values as experts: those are counts."""
    number = checked_layer(options.layer, len(ids), where)
    if options.experts is None or ids.shape[1] <= options.experts:
        got = f"{options.experts or 'none'}, with the shape {ids.shape} in {where}"
        allowed = "the number of experts, below the number of tokens of a layer"
        raise bad("--experts", got, allowed, "a layer with a value per expert holds counts, not ids")
    return ids[number][:, None], f"(layers, tokens), layer {number} of {len(ids)}, k = 1, as --first layers says"


def _check_unsigned(array: NDArray[Any], experts: int | None, where: object) -> None:
    """Raise `UserError` where an unsigned id may be a -1 that wrapped around."""
    if experts is None and array.dtype.kind == "u" and array.max() == np.iinfo(array.dtype).max:
        got = f"none, with ids up to {array.max()}, the highest {array.dtype}, in {where}"
        raise bad("--experts", got, "the number of experts", f"-1 for padding becomes {array.max()} in {array.dtype}")


def _check_top_k(ids: NDArray[Any], options: Options, where: object) -> None:
    if options.top_k not in (None, ids.shape[1]):
        raise bad("--top-k", options.top_k, f"{ids.shape[1]}, the ids per token in {where}", "logits have fractions")


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


_AT_ONCE = 2**22


def are_logits(array: NDArray[Any]) -> bool:
    """Whether an array (A, B) holds fractions, as logits do, and is not too large to be looked at."""
    if array.dtype.kind != "f" or array.size > MOST_VALUES:
        return False
    return any(bool((part != np.rint(part)).any()) for part in _chunks(array))


def chosen_by_logits(
    logits: NDArray[Any], top_k: int, experts: int | None, where: object
) -> tuple[NDArray[np.int32], str]:
    """Ids (T, k), highest logit first, and how they were chosen. Raises `UserError` for what is no table of logits."""
    tokens, columns = logits.shape
    if experts not in (None, columns):
        hint = "logits are (tokens, experts): transpose them" if tokens == experts else ""
        raise bad("--experts", experts, f"{columns}, the columns of the logits {logits.shape} in {where}", hint)
    if not 1 <= top_k < columns <= MOST_EXPERTS:
        allowed = "1 to one less than the experts, which are the columns"
        raise bad("--top-k", f"{top_k} with logits of the shape {logits.shape} in {where}", allowed)
    writing.check_most(tokens * top_k, where)
    parts = list(_chunks(logits))
    _check_logits(parts, where)
    _check_choice(parts, top_k, where)
    ids = [np.argsort(-part, axis=1, kind="stable")[:, :top_k].astype(np.int32) for part in parts]
    ties = sum(_ties(part, top_k) for part in parts)
    rule = f"the {top_k} highest of {columns} logits of each token, of equal ones the lowest id"
    return np.concatenate(ids), rule + f"; {ties} tokens have equal logits at the limit" * bool(ties)


def _chunks(array: NDArray[Any]) -> list[NDArray[Any]]:
    """Slices of rows: few enough values at once for copies of them."""
    rows = max(1, _AT_ONCE // max(1, array.shape[1]))
    return [array[start : start + rows] for start in range(0, len(array), rows)]


def _check_logits(parts: list[NDArray[Any]], where: object) -> None:
    if any(bool((np.isnan(part) | np.isposinf(part)).any()) for part in parts):
        raise bad("logits", f"nan or inf in {where}", "finite numbers, or -inf for an expert that cannot be chosen")
    if sum(map(len, parts)) > 1 and all(bool((part[:, :-1] >= part[:, 1:]).all()) for part in parts):
        hint = "sorted rows are the weights of chosen experts: read the ids that were saved with them"
        raise bad(
            "logits", f"values that fall in every row of {where}", "one logit per expert, in the order of ids", hint
        )


def _check_choice(parts: list[NDArray[Any]], top_k: int, where: object) -> None:
    """Raise `UserError` where fewer than k experts can be chosen: the others are masked out, or are not in a table of weights."""
    last = np.concatenate(
        [-np.partition(-part, (top_k - 1, top_k), axis=1)[:, top_k - 1 : top_k + 1] for part in parts]
    )
    if masked := int(np.isneginf(last[:, 0]).sum()):
        got = f"{top_k}, with fewer logits above -inf in {masked} of {len(last)} tokens of {where}"
        raise bad("--top-k", got, "at most the experts that can be chosen for every token")
    if (empty := int((last == 0).all(1).sum())) > len(last) / 2:
        got = f"{top_k}, with a 0 for the last expert that is chosen and the first that is not in {empty} of {len(last)} tokens of {where}"
        raise bad("--top-k", got, "the number of weights per token", "a 0 is that of an expert that was not chosen")


def _ties(logits: NDArray[Any], top_k: int) -> int:
    """The number of tokens with a logit left out that equals the last logit chosen."""
    ordered = -np.sort(-logits, axis=1)
    return int((ordered[:, top_k - 1] == ordered[:, top_k]).sum())
