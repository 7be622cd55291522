"""Expert ids, checked and written as a Parquet file that the sampler `trace` replays, and a summary of their loads and drops.

Whole numbers (A, B) may not be the ids of A tokens. The experts of a token differ, though most experts serve many tokens. Columns of
any other kind that share values (counts per expert, positions, ids of several layers) repeat a value within a row now and then.
`expected_repeats` is how often, if columns were independent and each kept its values; without any repeat, chance explains the rows with
a probability of about exp(-expected).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from moe_routing_bench.statistics import load_statistics
from moe_routing_bench.store.parquet import write_table
from moe_routing_bench.workload.row_map import row_map
from moe_routing_kernels.errors import bad, writing
from moe_routing_kernels.permute import RowLayout, capacity_of

MOST_EXPERTS = 2**16
MOST_IDS = 2**24  # the digest of a trace's rows is made of Python integers: about 1.5 µs and 90 bytes per id
MOST_VALUES = 2**26  # of a layer, or of what is turned into floats as a whole: logits have a value per expert


def checked(ids: NDArray[Any], experts: int | None, where: object) -> NDArray[np.int32]:
    """Expert ids (T, k) int32 of any array that holds such ids, whole floating-point numbers included.

    `experts` is the number of experts, None: not known. `where` names the array's origin in messages. Raises `UserError`.
    """
    numbers = whole(ids, where)
    check_range(numbers, experts, where)
    check_distinct(numbers, where)
    return np.ascontiguousarray(numbers, np.int32)


def whole(ids: NDArray[Any], where: object) -> NDArray[Any]:
    """An array (A, B) of at least one number as integers. Raises `UserError` for other shapes, too many, and fractions."""
    if ids.ndim != 2:
        raise bad("shape of the ids", f"{ids.shape} in {where}", "(tokens, k)")
    if not ids.size:
        raise bad("ids", f"none, of the shape {ids.shape}, in {where}", "at least one token, and one id per token")
    check_most(ids.size, where)
    if ids.dtype.kind == "b":
        hint = "a mask (tokens, experts) says which experts, not in which order: `ids = scores.topk(k).indices` does"
        raise bad("ids", f"{ids.dtype} in {where}", "whole numbers", hint)
    if ids.dtype.kind not in "iuf":
        raise bad("ids", f"{ids.dtype} in {where}", "whole numbers")
    if ids.dtype.kind != "f":
        return ids
    wide = ids.astype(np.float64)
    broken = ~np.isfinite(wide) | (wide != np.rint(wide))
    if broken.any():
        token, place = np.argwhere(broken)[0]
        raise bad("ids", f"{wide[token, place]} of token {token} in {where}", "whole numbers", _HINT_FRACTIONS)
    check_exact(float(np.abs(wide).max()), 2 / float(np.finfo(ids.dtype).eps), ids.dtype, where)
    if (np.abs(wide) >= 2**53).any():
        raise bad("ids", f"{wide.min():.15g} to {wide.max():.15g} in {where}", f"0 to {MOST_EXPERTS - 1}")
    return wide.astype(np.int64)


_HINT_FRACTIONS = "weights are no ids; router logits (tokens, experts) are read with --top-k"


def check_exact(highest: float, limit: float, dtype: object, where: object) -> None:
    """Raise `UserError` for floating-point ids so high that the format would have rounded their neighbours."""
    if highest >= limit:
        allowed = f"ids below {limit:.0f}: {dtype} rounds higher ones"
        raise bad("ids", f"{dtype} up to {highest:.15g} in {where}", allowed, "save the ids as integers")


def check_range(ids: NDArray[Any], experts: int | None, where: object) -> None:
    """Raise `UserError` for ids outside the experts, with what such values usually are."""
    if experts is not None and not 1 <= experts <= MOST_EXPERTS:
        raise bad("--experts", experts, f"1 to {MOST_EXPERTS}")
    low, high = int(ids.min()), int(ids.max())
    most = MOST_EXPERTS if experts is None else experts
    if low < 0:
        rows = f"-1 in {int((ids < 0).any(1).sum())} of {len(ids)} rows"
        hint = f"{rows} marks padding: leave such tokens out, `ids = ids[(ids >= 0).all(1)]`" if low == -1 else ""
        raise bad("ids", f"{low} to {high} in {where}", f"0 to {most - 1}", hint)
    if high >= most:
        raise bad("ids", f"{low} to {high} in {where}", f"0 to {most - 1}", _hint_high(ids, low, high, experts))


def _hint_high(ids: NDArray[Any], low: int, high: int, experts: int | None) -> str:
    """What ids at or above the number of experts probably are."""
    if experts is None:
        return f"no more than {MOST_EXPERTS} experts can be measured; counts per expert are no ids"
    if low >= 1 and high == experts:
        return "ids that count from 1: subtract 1"
    beyond = (ids >= experts).sum(1)
    if ids.shape[1] > beyond.max() == beyond.min():
        return f"every token has an id from {experts} up: a fused shared expert is not routed, leave it out"
    if experts in ids.shape:
        return "a dimension as long as the experts: counts per expert, which do not say the experts of a token"
    return ""


def check_distinct(ids: NDArray[Any], where: object, hint: str = "") -> None:
    """Raise `UserError` where a token has an expert twice, with the number of such tokens."""
    if (twice := repeats(ids)).any():
        token = int(twice.argmax())
        got = f"{ids[token].tolist()} of token {token} in {where}, and {int(twice.sum())} of {len(ids)} tokens like it"
        raise bad("ids", got, "distinct experts for each token", hint)


def joined(parts: Sequence[NDArray[np.int32]]) -> NDArray[np.int32]:
    """The ids (T, k) of several files after one another. Raises `UserError` where they differ in k or are too many."""
    sizes = sorted({part.shape[1] for part in parts})
    if len(sizes) > 1:
        raise bad(
            "k", f"{' and '.join(map(str, sizes))} in different inputs", "the same number of ids per token in all"
        )
    check_most(sum(part.size for part in parts), "all inputs")
    return np.concatenate(parts)


def agreed(experts: set[int | None]) -> int | None:
    """The number of experts of several files; None where no file says. Raises `UserError` where they differ."""
    known = sorted(number for number in experts if number is not None)
    if len(known) > 1:
        raise bad("experts", f"{' and '.join(map(str, known))} in different inputs", "the same number in all")
    return known[0] if known else None


def check_most(count: int, where: object, most: int | None = None) -> None:
    """Raise `UserError` for more ids than a trace can have, or more values than `most`."""
    most = MOST_IDS if most is None else most
    if count > most:
        raise bad(
            "ids", f"{count} in {where}", f"at most {most} in one trace", "record fewer tokens, or save a single layer"
        )


LEAST_EXPECTED = 14.0  # exp(-14): below one in a million
LEAST_OF_A_COLUMN = 3.0
MOST_STEPS = 0.75  # of the differences between neighbours that are 0 or 1: above it a column numbers rows or repeats
MOST_COLUMNS = 1024  # no model has as many experts per token


def repeats(ids: NDArray[np.integer]) -> NDArray[np.bool_]:
    """The rows that hold a value twice."""
    ordered = np.sort(ids, axis=1)
    return (ordered[:, 1:] == ordered[:, :-1]).any(1)


def expected_repeats(ids: NDArray[np.integer]) -> NDArray[np.float64]:
    """For each column, the pairs of equal values with other columns that independent columns would have. No value is below 0."""
    size = int(ids.max()) + 1
    every = np.bincount(ids.ravel(), minlength=size).astype(float)
    columns = (np.bincount(column, minlength=size).astype(float) for column in ids.T)
    return np.array([column @ (every - column) for column in columns]) / len(ids)


def numbers_rows(column: NDArray[np.integer]) -> bool:
    """Whether a column looks like a number of tokens, layers or requests: sorted, or mostly in steps of 0 or 1."""
    steps = np.diff(column)
    return bool((steps >= 0).all() or (steps <= 0).all() or np.isin(steps, (0, 1)).mean() >= MOST_STEPS)


def proof_of(ids: NDArray[np.integer]) -> str:
    """Why the rows of ids, none of them below 0, are tokens; empty where the values do not prove it."""
    tokens, top_k = ids.shape
    if not 2 <= top_k <= MOST_COLUMNS or repeats(ids).any() or any(numbers_rows(column) for column in ids.T):
        return ""
    expected = expected_repeats(ids)
    if expected.sum() / 2 < LEAST_EXPECTED or expected.min() < LEAST_OF_A_COLUMN:
        return ""
    return f"no id repeats within any of {tokens} tokens, where chance would repeat {expected.sum() / 2:.0f}"


COLUMN = "expert_ids"


def write(path: Path, ids: Any, experts: int | None = None) -> None:
    """Write expert ids (T, k), of anything that numpy takes for an array of whole numbers, as a trace, or nothing at all.

    `experts` is their number, for a check of the ids. Raises `UserError` for ids that are no routing, and where the file
    cannot be written.
    """
    rows = checked(np.asarray(ids), experts, "the array")
    starts = np.arange(0, rows.size + 1, rows.shape[1], dtype=np.int32)
    table = pa.table({COLUMN: pa.ListArray.from_arrays(pa.array(starts), pa.array(rows.ravel()))})
    with writing(path):
        write_table(path, table, dictionaries=True)


CAPACITY_FACTORS = (1.0, 1.25, 1.5)


@dataclass(frozen=True)
class Summary:
    """Sizes, tokens per expert, and the share of assignments that is dropped at each of `CAPACITY_FACTORS`."""

    tokens: int
    top_k: int
    experts: int
    seen: int  # experts with at least one token
    dead: int
    load_cv: float
    load_max_over_mean: float
    drops: tuple[float, ...]


def summary(ids: NDArray[np.int32], experts: int) -> Summary:
    """The summary of ids (T, k), all T tokens in one batch."""
    (tokens, top_k), loads = ids.shape, np.bincount(ids.ravel(), minlength=experts)
    statistics = load_statistics(loads.tolist())
    layouts = (
        RowLayout(tokens, top_k, experts, capacity_of(factor, tokens, top_k, experts)) for factor in CAPACITY_FACTORS
    )
    drops = tuple(1 - int(row_map(layout, ids).counts.sum()) / ids.size for layout in layouts)
    names = ("active_experts", "dead_experts", "load_cv", "load_max_over_mean")
    seen, dead, cv, most = (statistics[name] for name in names)
    return Summary(tokens, top_k, experts, int(seen), int(dead), float(cv), float(most), drops)  # type: ignore
