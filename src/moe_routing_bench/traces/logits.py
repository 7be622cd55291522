"""Expert ids from router logits (T, E): the k highest logits of each token, of equal ones the lowest id."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from moe_routing_bench.traces.checks import MOST_EXPERTS, MOST_VALUES, check_most
from moe_routing_kernels.errors import bad

_AT_ONCE = 2**22


def are(array: NDArray[Any]) -> bool:
    """Whether an array (A, B) holds fractions, as logits do, and is not too large to be looked at."""
    if array.dtype.kind != "f" or array.size > MOST_VALUES:
        return False
    return any(bool((part != np.rint(part)).any()) for part in _parts(array))


def chosen(logits: NDArray[Any], top_k: int, experts: int | None, where: object) -> tuple[NDArray[np.int32], str]:
    """Ids (T, k), highest logit first, and how they were chosen. Raises `UserError` for what is no table of logits."""
    tokens, columns = logits.shape
    if experts not in (None, columns):
        hint = "logits are (tokens, experts): transpose them" if tokens == experts else ""
        raise bad("--experts", experts, f"{columns}, the columns of the logits {logits.shape} in {where}", hint)
    if not 1 <= top_k < columns <= MOST_EXPERTS:
        allowed = "1 to one less than the experts, which are the columns"
        raise bad("--top-k", f"{top_k} with logits of the shape {logits.shape} in {where}", allowed)
    check_most(tokens * top_k, where)
    parts = list(_parts(logits))
    _check(parts, where)
    _check_choice(parts, top_k, where)
    ids = [np.argsort(-part, axis=1, kind="stable")[:, :top_k].astype(np.int32) for part in parts]
    ties = sum(_ties(part, top_k) for part in parts)
    rule = f"the {top_k} highest of {columns} logits of each token, of equal ones the lowest id"
    return np.concatenate(ids), rule + f"; {ties} tokens have equal logits at the limit" * bool(ties)


def _parts(array: NDArray[Any]) -> list[NDArray[Any]]:
    """Slices of rows: few enough values at once for copies of them."""
    rows = max(1, _AT_ONCE // max(1, array.shape[1]))
    return [array[start : start + rows] for start in range(0, len(array), rows)]


def _check(parts: list[NDArray[Any]], where: object) -> None:
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
