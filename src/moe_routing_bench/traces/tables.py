"""Expert ids from a table: columns with an id each, a column of lists, or a row per assignment (long form)."""

from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from moe_routing_bench.traces.asked import Asked, Values
from moe_routing_bench.traces.grouping import by_token
from moe_routing_bench.traces.roles import Roles, quoted, roles_of
from moe_routing_bench.traces.writing import COLUMN
from moe_routing_kernels.errors import bad


def values_of(table: pa.Table, asked: Asked, where: object) -> Values:
    """Values of the columns with ids, of one layer. Raises `UserError` where names or values leave their meaning open."""
    columns = table.column_names
    if len({*columns}) < len(columns):
        raise bad("columns", ", ".join(columns), "different names", f"the columns of {where}")
    if columns == [COLUMN] and _is_list(table[COLUMN]) and {asked.key, asked.columns} <= {None, COLUMN}:
        _check_no_layer(asked, where)
        rest = asked.without("layer", "columns", "key")
        return Values(_lists(table[COLUMN], where), rest, f"a list {COLUMN} per row", from_zero=True)
    roles = roles_of(table, asked, where)
    table, note = _one_layer(table, roles, asked, where)
    note = "; ".join(filter(None, (note, _left_out(columns, roles))))
    rest = asked.without("layer", "columns", "key")
    experts = roles["expert"]
    token = _indices(table, roles["token"][0], where) if roles["token"] else None
    if len(experts) > 1 or _is_list(table[experts[0]]):
        return _wide(table, roles, token, asked, rest, note, where)
    slot = _indices(table, roles["slot"][0], where) if roles["slot"] else None
    ids = _numbers(table, experts[0], where)
    if token is not None:
        grouped = by_token(ids, token, slot, asked.top_k, where)
        return Values(grouped, rest, f"{grouped.shape[1]} rows per value of {quoted(roles['token'])}", note=note)
    if slot is not None or asked.top_k is None or len(ids) % asked.top_k:
        got = f"{asked.top_k or 'none'}, with {len(ids)} rows of an id each in {where}{note and f', {note}'}"
        raise bad("--top-k", got, "a divisor of the rows: so many rows after one another are one token", _HINT_TOKENS)
    return Values(ids.reshape(-1, asked.top_k), rest, f"{asked.top_k} rows are a token, as --top-k says", note=note)


_HINT_TOKENS = "or name the column that numbers tokens, --columns token=NAME,expert=NAME"


def _one_layer(table: pa.Table, roles: Roles, asked: Asked, where: object) -> tuple[pa.Table, str]:
    """The rows of one layer, and a note of it."""
    if not roles["layer"]:
        _check_no_layer(asked, where)
        return table, ""
    name = roles["layer"][0]
    column = _indices(table, name, where)
    layers = sorted({*column.tolist()})
    layer = layers[0] if asked.layer is None and len(layers) == 1 else asked.layer
    if layer not in layers:
        shown = ", ".join(f"{number:g}" for number in layers[:9]) + ", …" * (len(layers) > 9)
        raise bad("--layer", asked.layer, f"{shown}, of column {name!r} in {where}")
    return table.filter(pa.array(column == layer)), f"layer {layer:g} of column {name!r}"


def _check_no_layer(asked: Asked, where: object) -> None:
    if asked.layer is not None:
        allowed = f"none: {where} has no column of layers"
        raise bad("--layer", asked.layer, allowed, "--columns layer=NAME,expert=NAME names it")


def _wide(table: pa.Table, roles: Roles, token: Any, asked: Asked, rest: Asked, note: str, where: object) -> Values:
    """A row per token: columns with an id each, or a column of lists."""
    experts = roles["expert"]
    lists = _is_list(table[experts[0]])
    if (lists and len(experts) > 1) or roles["slot"]:
        got = f"{quoted(experts + roles['slot'])} in {where}"
        raise bad("--columns", got, "a column of lists, several of an id each, or a column of ids and a slot=NAME")
    if token is not None and not asked.columns and len(np.unique(token)) < len(token):
        hint = "several layers, or requests? --columns names the columns with ids where each row is a token"
        got = f"{len(token)} with {len(np.unique(token))} values of {quoted(roles['token'])} in {where}"
        raise bad("rows", got, "a row per token", hint)
    array = _lists(table[experts[0]], where) if lists else stacked(table, experts, where)
    stated = asked.columns or experts == [COLUMN]
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
    strange = column[~np.isfinite(column) | (column != np.rint(column))]
    if len(strange):
        raise bad(
            f"column {name!r}", f"{strange[0]:g} in {where}", "whole numbers", f"--columns other={name} leaves it out"
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
