"""Long form, a row per assignment: the rows of each token brought together."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from moe_routing_kernels.errors import bad


def by_token(
    ids: NDArray[Any], token: NDArray[Any], slot: NDArray[Any] | None, top_k: int | None, where: object
) -> NDArray[Any]:
    """Ids (T, k) of rows that name their token and perhaps their slot.

    With slots rows may lie in any order, and tokens come in the order of their numbers. Without, the rows of a token lie
    next to each other, or all first choices precede all second ones, which looks like several requests or layers with
    k = 1: then `top_k` has to say it. Raises `UserError` for any other order, and where tokens have unequal numbers of rows.
    """
    if slot is not None:
        order = np.lexsort((slot, token))
        ids, token, slot = ids[order], token[order], slot[order]
    starts = np.flatnonzero(np.concatenate([[True], token[1:] != token[:-1]])) if len(token) else np.zeros(0, int)
    tokens = token[starts]
    if len(np.unique(tokens)) < len(tokens):
        return _by_choice(ids, token, top_k, where)
    sizes = np.diff(np.append(starts, len(token)))
    if len({*sizes.tolist()}) > 1:
        got = f"{sizes.min()} to {sizes.max()} for a token, such as {sizes[0]} for {tokens[0]}, in {where}"
        raise bad("rows", got, "k rows for each token", _HINT)
    array = ids.reshape(len(tokens), -1)
    if slot is not None and (slot.reshape(array.shape) != slot[: array.shape[1]]).any():
        raise bad("slots", f"different ones for different tokens in {where}", "the same slots for each token")
    return array


_HINT = (
    "several layers, requests or equal words? --columns layer=NAME names a column of layers, other=NAME leaves one out"
)


def _by_choice(ids: NDArray[Any], token: NDArray[Any], top_k: int | None, where: object) -> NDArray[Any]:
    """Rows of all first choices, then of all second ones, as `pandas.melt` writes them."""
    count = len(np.unique(token))
    if len(token) % count or (token.reshape(-1, count) != token[:count]).any():
        raise bad("rows", f"those of a token apart in {where}", "the rows of a token next to each other", _HINT)
    if top_k != len(token) // count:
        got = f"{top_k or 'none'}, with tokens numbered from {token[0]} to {token[count - 1]} {len(token) // count} times in {where}"
        raise bad("--top-k", got, f"{len(token) // count}, where these are the choices of the same tokens", _HINT)
    return np.ascontiguousarray(ids.reshape(-1, count).T)
