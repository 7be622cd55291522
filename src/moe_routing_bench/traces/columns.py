"""Which columns of a table hold ids, and which number layers, tokens and slots: by --columns, by their names, or by a question.

A name with any unknown word has no meaning.
"""

import re

import numpy as np
import pyarrow as pa

from moe_routing_bench.traces import Options
from moe_routing_kernels.errors import bad, one_line, pick

_FILLERS = {"id", "ids", "idx", "index", "indices", "no", "number", "moe"}
_ROLES = {  # the words of each role; a name may add fillers
    "layer": {"layer"},
    "token": {"token", "tok", "position", "pos", "row"},
    "slot": {"slot", "choice", "k"},
    "expert": {"expert", "experts", "topk", "top", "selected", "routed", "chosen"},
}
_NO_IDS = {
    "weights": {
        "weight",
        "weights",
        "prob",
        "probs",
        "probability",
        "probabilities",
        "score",
        "scores",
        "logit",
        "logits",
    },
    "counts": {
        "count",
        "counts",
        "load",
        "loads",
        "freq",
        "frequency",
        "tokens",
        "hits",
        "histogram",
        "mask",
        "map",
        "total",
    },
}
HINT_COUNTS = "counts per expert do not say the experts of a token"
ROLES = (*_ROLES, "other")


def words_of(name: str) -> set[str]:
    """The words of a name in lower case, without its numbers."""
    parted = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", " ", name)
    return set(re.findall(r"[^\W\d_]+", parted.lower()))


def role_of(name: str) -> str:
    """The role of a column: layer, token, slot, expert, weights, counts, index or numbered; empty: the name does not say."""
    known = words_of(name)
    for no_ids, marks in _NO_IDS.items():
        if known & marks:
            return no_ids
    if name in ("", "Unnamed: 0", "__index_level_0__"):
        return "index"
    if number_of(name) is not None and not known:
        return "numbered"
    if known and known <= {"ids", "indices"}:
        return "expert"
    roles = [what for what, marks in _ROLES.items() if known & marks and known <= marks | _FILLERS]
    return roles[0] if len(roles) == 1 else ""


def number_of(name: str) -> int | None:
    """The number at the end of a name."""
    match = re.search(r"(\d{1,9})\D?$", name)
    return int(match[1]) if match else None


def stem_of(name: str) -> str:
    """A name without the number at its end."""
    return re.sub(r"\d+\D?$", "", name)


Roles = dict[str, list[str]]  # role -> columns, in the order of their ids


def roles_of(table: pa.Table, options: Options, where: object) -> Roles:
    """The columns of each role, among them at least one with ids. Raises `UserError` where it is open."""
    if None not in (options.key, options.columns):
        raise bad("--key", options.key, "none with --columns, which names all columns")
    return _stated(table.column_names, options, where) if options.columns else _named(table, options, where)


def _stated(columns: list[str], options: Options, where: object) -> Roles:
    """Roles as --columns says; columns that it does not name keep a role other than expert, or are left out."""
    roles: Roles = {role: [] for role in ROLES}
    for item in (options.columns or "").split(","):
        role, _, name = item.rpartition("=") if item not in columns else ("expert", "", item)
        roles[pick("--columns", role or "expert", ROLES)].append(
            pick("--columns", name, columns, f"the columns of {where}")
        )
    stated = {name for group in roles.values() for name in group}
    for name in columns:
        role = role_of(name)
        if name in stated:
            continue
        if role == "counts":
            raise _counts(name, where)
        if role in ("layer", "token", "slot") and not roles[role]:
            roles[role].append(name)
    _check_roles(roles, options, where)
    return roles


def _named(table: pa.Table, options: Options, where: object) -> Roles:
    """Roles by the names of columns. Raises `UserError` where a name says nothing, or counts."""
    roles: Roles = {role: [] for role in (*ROLES, "weights", "index", "numbered", "")}
    for name in table.column_names:
        role = "expert" if name == options.key else role_of(name)
        if role == "counts":
            raise _counts(name, where)
        if role == "index" and not _numbers_rows(table[name]):
            role = ""
        roles[role if role or number_of(name) is None else "numbered"].append(name)
    if options.key is not None:
        pick("--key", options.key, table.column_names, f"the columns of {where}")
        roles["expert"] = [options.key]
    candidates = next((roles[role] for role in ("expert", "numbered", "weights") if roles[role]), [])
    if candidates is roles["numbered"] and len(candidates) < 2:
        raise _question(table, where)
    unknown = roles[""] + [name for name in roles["numbered"] if name not in candidates]
    if unknown or not candidates or (candidates is roles["weights"] and options.top_k is None):
        raise _question(table, where)
    roles["expert"] = _in_order(candidates, table, where)
    _check_roles(roles, options, where)
    return roles


def _check_roles(roles: Roles, options: Options, where: object) -> None:
    if not roles["expert"]:
        raise bad("--columns", options.columns, "at least one column with ids", f"expert=NAME, of {where}")
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
    return bad("column", f"{name!r} in {where}", "expert ids of each token", HINT_COUNTS)


def _range(column: pa.ChunkedArray) -> str:
    if not (pa.types.is_integer(column.type) or pa.types.is_floating(column.type)) or column.null_count == len(column):
        return str(column.type)
    numbers = column.drop_null().to_numpy()
    return f"{column.type} {numbers.min():.6g} to {numbers.max():.6g}"


def _in_order(columns: list[str], table: pa.Table, where: object) -> list[str]:
    """Columns by the numbers in their names. Raises `UserError` for several whose names do not number them from 0 or 1."""
    if len(columns) == 1:
        return columns
    numbered = {number_of(name): name for name in columns}
    if len({stem_of(name) for name in columns}) > 1 or None in numbered or len(numbered) < len(columns):
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
