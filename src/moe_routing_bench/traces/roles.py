"""Which columns of a table hold ids, and which number layers, tokens and slots: by --columns, by their names, or by a question."""

import numpy as np
import pyarrow as pa

from moe_routing_bench.traces import names
from moe_routing_bench.traces.asked import Asked
from moe_routing_kernels.errors import bad, one_line, pick

Roles = dict[str, list[str]]  # role -> columns, in the order of their ids


def roles_of(table: pa.Table, asked: Asked, where: object) -> Roles:
    """The columns of each role, among them at least one with ids. Raises `UserError` where it is open."""
    if None not in (asked.key, asked.columns):
        raise bad("--key", asked.key, "none with --columns, which names all columns")
    return _stated(table.column_names, asked, where) if asked.columns else _named(table, asked, where)


def _stated(columns: list[str], asked: Asked, where: object) -> Roles:
    """Roles as --columns says; columns that it does not name keep a role other than expert, or are left out."""
    roles: Roles = {role: [] for role in names.ROLES}
    for item in (asked.columns or "").split(","):
        role, _, name = item.rpartition("=") if item not in columns else ("expert", "", item)
        roles[pick("--columns", role or "expert", names.ROLES)].append(
            pick("--columns", name, columns, f"the columns of {where}")
        )
    stated = {name for group in roles.values() for name in group}
    for name in columns:
        role = names.role(name)
        if name in stated:
            continue
        if role == "counts":
            raise _counts(name, where)
        if role in ("layer", "token", "slot") and not roles[role]:
            roles[role].append(name)
    _check_roles(roles, asked, where)
    return roles


def _named(table: pa.Table, asked: Asked, where: object) -> Roles:
    """Roles by the names of columns. Raises `UserError` where a name says nothing, or counts."""
    roles: Roles = {role: [] for role in (*names.ROLES, "weights", "index", "numbered", "")}
    for name in table.column_names:
        role = "expert" if name == asked.key else names.role(name)
        if role == "counts":
            raise _counts(name, where)
        if role == "index" and not _numbers_rows(table[name]):
            role = ""
        roles[role if role or names.number(name) is None else "numbered"].append(name)
    if asked.key is not None:
        pick("--key", asked.key, table.column_names, f"the columns of {where}")
        roles["expert"] = [asked.key]
    candidates = next((roles[role] for role in ("expert", "numbered", "weights") if roles[role]), [])
    if candidates is roles["numbered"] and len(candidates) < 2:
        raise _question(table, where)
    unknown = roles[""] + [name for name in roles["numbered"] if name not in candidates]
    if unknown or not candidates or (candidates is roles["weights"] and asked.top_k is None):
        raise _question(table, where)
    roles["expert"] = _in_order(candidates, table, where)
    _check_roles(roles, asked, where)
    return roles


def _check_roles(roles: Roles, asked: Asked, where: object) -> None:
    if not roles["expert"]:
        raise bad("--columns", asked.columns, "at least one column with ids", f"expert=NAME, of {where}")
    for role in ("layer", "token", "slot"):
        if len(roles[role]) > 1:
            hint = f"--columns {role}=NAME,expert=NAME says which, other=NAME which to leave out"
            raise bad("columns", f"{quoted(roles[role])} in {where}", f"a single column of the {role}", hint)


def _question(table: pa.Table, where: object) -> Exception:
    kinds = ", ".join(f"{name!r} {_range(table[name])}" for name in table.column_names[:8])
    more = f" and {table.num_columns - 8} more" if table.num_columns > 8 else ""
    allowed = "the columns with ids, as NAME,NAME; others as layer=NAME, token=NAME, slot=NAME, other=NAME"
    return bad("--columns", f"none, with {table.num_rows} rows of {one_line(kinds, 200)}{more} in {where}", allowed)


def _counts(name: str, where: object) -> Exception:
    return bad("column", f"{name!r} in {where}", "expert ids of each token", names.HINT_COUNTS)


def _range(column: pa.ChunkedArray) -> str:
    if not (pa.types.is_integer(column.type) or pa.types.is_floating(column.type)) or column.null_count == len(column):
        return str(column.type)
    numbers = column.drop_null().to_numpy()
    return f"{column.type} {numbers.min():.6g} to {numbers.max():.6g}"


def _in_order(columns: list[str], table: pa.Table, where: object) -> list[str]:
    """Columns by the numbers in their names. Raises `UserError` for several whose names do not number them from 0 or 1."""
    if len(columns) == 1:
        return columns
    numbered = {names.number(name): name for name in columns}
    if len({names.stem(name) for name in columns}) > 1 or None in numbered or len(numbered) < len(columns):
        raise _question(table, where)
    numbers = sorted(numbered)  # type: ignore
    if numbers[0] not in (0, 1) or numbers != list(range(numbers[0], numbers[0] + len(numbers))):
        raise _question(table, where)
    return [numbered[number] for number in numbers]


def quoted(columns: list[str]) -> str:
    """Names as messages show them."""
    return " and ".join(repr(name) for name in columns)


def _numbers_rows(column: pa.ChunkedArray) -> bool:
    """Whether a column without a name is the row number that pandas writes."""
    return pa.types.is_integer(column.type) and not column.null_count and bool((np.diff(column.to_numpy()) > 0).all())
