"""Expert ids from a table: columns with an id each, a column of lists, or a row per assignment (long form)."""

from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from moe_routing_bench.traces import Options, Values
from moe_routing_bench.traces.columns import Roles, quoted, roles_of
from moe_routing_bench.traces.writing import COLUMN
from moe_routing_kernels.errors import bad


def values_of(table: pa.Table, options: Options, where: object) -> Values:
    """Values of the columns with ids, of one layer. Raises `UserError` where names or values leave their meaning open."""
    columns = table.column_names
    if len({*columns}) < len(columns):
        raise bad("columns", ", ".join(columns), "different names", f"the columns of {where}")
    if columns == [COLUMN] and _is_list(table[COLUMN]) and {options.key, options.columns} <= {None, COLUMN}:
        _check_no_layer(options, where)
        rest = options.without("layer", "columns", "key")
        return Values(_lists(table[COLUMN], where), rest, f"a list {COLUMN} per row", from_zero=True)
    roles = roles_of(table, options, where)
    table, note = _one_layer(table, roles, options, where)
    note = "; ".join(filter(None, (note, _left_out(columns, roles))))
    rest = options.without("layer", "columns", "key")
    experts = roles["expert"]
    token = _indices(table, roles["token"][0], where) if roles["token"] else None
    if len(experts) > 1 or _is_list(table[experts[0]]):
        return _wide(table, roles, token, options, rest, note, where)
    slot = _indices(table, roles["slot"][0], where) if roles["slot"] else None
    ids = _numbers(table, experts[0], where)
    if token is not None:
        grouped = by_token(ids, token, slot, options.top_k, where)
        return Values(grouped, rest, f"{grouped.shape[1]} rows per value of {quoted(roles['token'])}", note=note)
    if slot is not None or options.top_k is None or len(ids) % options.top_k:
        got = f"{options.top_k or 'none'}, with {len(ids)} rows of an id each in {where}{note and f', {note}'}"
        raise bad("--top-k", got, "a divisor of the rows: so many rows after one another are one token", _HINT_TOKENS)
    return Values(ids.reshape(-1, options.top_k), rest, f"{options.top_k} rows are a token, as --top-k says", note=note)


_HINT_TOKENS = "or name the column that numbers tokens, --columns token=NAME,expert=NAME"


def _one_layer(table: pa.Table, roles: Roles, options: Options, where: object) -> tuple[pa.Table, str]:
    """The rows of one layer, and a note of it."""
    if not roles["layer"]:
        _check_no_layer(options, where)
        return table, ""
    name = roles["layer"][0]
    column = _indices(table, name, where)
    layers = sorted({*column.tolist()})
    layer = layers[0] if options.layer is None and len(layers) == 1 else options.layer
    if layer not in layers:
        shown = ", ".join(f"{number:g}" for number in layers[:9]) + ", …" * (len(layers) > 9)
        raise bad("--layer", options.layer, f"{shown}, of column {name!r} in {where}")
    return table.filter(pa.array(column == layer)), f"layer {layer:g} of column {name!r}"


def _check_no_layer(options: Options, where: object) -> None:
    if options.layer is not None:
        allowed = f"none: {where} has no column of layers"
        raise bad("--layer", options.layer, allowed, "--columns layer=NAME,expert=NAME names it")


def _wide(
    table: pa.Table, roles: Roles, token: Any, options: Options, rest: Options, note: str, where: object
) -> Values:
    """A row per token: columns with an id each, or a column of lists."""
    experts = roles["expert"]
    lists = _is_list(table[experts[0]])
    if (lists and len(experts) > 1) or roles["slot"]:
        got = f"{quoted(experts + roles['slot'])} in {where}"
        raise bad("--columns", got, "a column of lists, several of an id each, or a column of ids and a slot=NAME")
    if token is not None and not options.columns and len(np.unique(token)) < len(token):
        hint = "several layers, or requests? --columns names the columns with ids where each row is a token"
        got = f"{len(token)} with {len(np.unique(token))} values of {quoted(roles['token'])} in {where}"
        raise bad("rows", got, "a row per token", hint)
    array = _lists(table[experts[0]], where) if lists else stacked(table, experts, where)
    stated = options.columns or experts == [COLUMN]
    return Values(array, rest, f"a row per token, ids in {_some(experts)}" if stated else "", note=note)


def _left_out(columns: list[str], roles: Roles) -> str:
    used = {name for role in ("layer", "token", "slot", "expert") for name in roles[role]}
    return f"without {_some(rest)}" if (rest := [name for name in columns if name not in used]) else ""


def _some(columns: list[str]) -> str:
    return repr(columns[0]) + (f" and {len(columns) - 1} more" if len(columns) > 1 else "")


def stacked(table: pa.Table, columns: list[str], where: object) -> NDArray[Any]:
    """Columns of numbers as an array (rows, columns). Raises `UserError` for columns of anything else."""
    return np.stack([_numbers(table, name, where) for name in columns], axis=1)


def _numbers(table: pa.Table, name: str, where: object) -> NDArray[Any]:
    """A column of numbers, none of them missing."""
    column = table[name]
    if column.null_count or not (pa.types.is_integer(column.type) or pa.types.is_floating(column.type)):
        allowed = "whole numbers, with commas between columns"
        raise bad("ids", f"{column.type} with {column.null_count} empty in column {name!r} of {where}", allowed)
    return column.to_numpy()


def _indices(table: pa.Table, name: str, where: object) -> NDArray[Any]:
    """A column of whole numbers of layers, tokens or slots. Raises `UserError` for fractions."""
    column = _numbers(table, name, where)
    broken = column[~np.isfinite(column) | (column != np.rint(column))]
    if len(broken):
        raise bad(
            f"column {name!r}", f"{broken[0]:g} in {where}", "whole numbers", f"--columns other={name} leaves it out"
        )
    return column


def _is_list(column: pa.ChunkedArray) -> bool:
    kind = column.type
    return pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind)


def _lists(column: pa.ChunkedArray, where: object) -> NDArray[Any]:
    """Lists of k numbers as an array (rows, k)."""
    rows = column.combine_chunks()
    lengths, ids = set(rows.value_lengths().to_pylist()), rows.flatten()
    if len(lengths) > 1 or rows.null_count or ids.null_count:
        raise bad("ids", f"rows of other lengths or without a value in {where}", "k whole numbers in every row")
    if not (pa.types.is_integer(ids.type) or pa.types.is_floating(ids.type)):
        raise bad("column", f"{column.type} in {where}", "lists of whole numbers")
    return ids.to_numpy(zero_copy_only=False).reshape(len(rows), next(iter(lengths), 0))


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
        raise bad("rows", got, "k rows for each token", _HINT_ORDER)
    array = ids.reshape(len(tokens), -1)
    if slot is not None and (slot.reshape(array.shape) != slot[: array.shape[1]]).any():
        raise bad("slots", f"different ones for different tokens in {where}", "the same slots for each token")
    return array


_HINT_ORDER = (
    "several layers, requests or equal words? --columns layer=NAME names a column of layers, other=NAME leaves one out"
)


def _by_choice(ids: NDArray[Any], token: NDArray[Any], top_k: int | None, where: object) -> NDArray[Any]:
    """Rows of all first choices, then of all second ones, as `pandas.melt` writes them."""
    count = len(np.unique(token))
    if len(token) % count or (token.reshape(-1, count) != token[:count]).any():
        raise bad("rows", f"those of a token apart in {where}", "the rows of a token next to each other", _HINT_ORDER)
    if top_k != len(token) // count:
        got = f"{top_k or 'none'}, with tokens numbered from {token[0]} to {token[count - 1]} {len(token) // count} times in {where}"
        raise bad("--top-k", got, f"{len(token) // count}, where these are the choices of the same tokens", _HINT_ORDER)
    return np.ascontiguousarray(ids.reshape(-1, count).T)
