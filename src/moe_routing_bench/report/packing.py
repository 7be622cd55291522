"""Columns of values in few bytes: what a column's values share is written once. `templates/unpack.js` and `templates/rows.js` read what this writes."""

import base64
import json
import math
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd

_LONG = 4_000_000  # letters of a text that more effort makes 2 % smaller in three times as long
_GZIP = 31  # the largest window, and a header of gzip
_EXACT = 2**53  # from here on JavaScript's numbers skip integers
DIGITS = 5  # of a number
_EXACT_POWER = 22  # up to which powers of ten are floats
_POWERS = 10 ** np.arange(1, 18)
_EXACT_POWERS = np.array([10.0**power for power in range(_EXACT_POWER + 1)])


@dataclass(frozen=True)
class Written:
    """A part of a document that is JSON already: as Python's objects, a hundred thousand rows take ten times the memory."""

    text: str

    @property
    def value(self) -> Any:
        """What the text says."""
        return json.loads(self.text)


def written(value: Any, default: Callable[[Any], Any] | None = None) -> Written:
    """A value as strict JSON; `default` gives what JSON has for other objects. Raises ValueError for a number that JSON lacks."""
    text = json.dumps(value, default=default, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
    return Written(text)


def pieces(value: Any, default: Callable[[Any], Any] | None = None) -> Iterator[str]:
    """The text of `written` in pieces, of which objects may have parts that are `Written`."""
    if isinstance(value, Written):
        yield value.text
    elif isinstance(value, dict) and any(isinstance(part, dict | Written) for part in value.values()):
        mark = "{"
        for name, part in value.items():
            yield f"{mark}{json.dumps(str(name), ensure_ascii=False)}:"
            yield from pieces(part, default)
            mark = ","
        yield "}"
    else:
        yield written(value, default).text


def compressed(value: Mapping[str, Any]) -> str:
    """JSON, compressed by gzip, in base64; equal values give equal text."""
    texts = list(pieces(value))
    packer = zlib.compressobj(9 if sum(map(len, texts)) < _LONG else 6, wbits=_GZIP)
    parts = [packer.compress(text.encode()) for text in texts]
    return base64.b64encode(b"".join([*parts, packer.flush()])).decode()


def packed(values: Sequence[Any]) -> dict[str, Any]:
    """A column in few bytes: one value of `all` rows, one of `each`, or `of` the distinct values one `at` each row."""
    return _in_few_bytes(*_distinct(values))


def _distinct(values: Sequence[Any]) -> tuple[list[Any], np.ndarray]:
    """The distinct values in the order of their rows, and the place of each row's among them (n,)."""
    texts = [repr(value) for value in values]  # 1, True and 1.0 are three
    known = dict(zip(texts, values, strict=True))
    order = {text: place for place, text in enumerate(known)}
    return list(known.values()), np.array([order[text] for text in texts], int)


def _in_few_bytes(distinct: list[Any], places: np.ndarray) -> dict[str, Any]:
    """`packed` of what `_distinct` makes."""
    if len(distinct) == 1:
        return {"all": distinct[0]}
    if len(distinct) == len(places):
        return {"each": distinct}
    often = np.bincount(places, minlength=len(distinct))
    digits = 1 + np.searchsorted(_POWERS, np.arange(len(distinct)), "right")
    again = sum((often[place] - 1) * len(repr(distinct[place])) for place in np.flatnonzero(often > 1).tolist())
    if again <= often @ digits:
        return {"each": [distinct[place] for place in places.tolist()]}
    return {"of": distinct, "at": places.tolist()}


class Column:
    """A column of a table as its distinct values, fit for JSON and in the order of their rows, and the place of each row's among them."""

    def __init__(self, column: pd.Series) -> None:
        """The values of lists, which are few, are made one by one."""
        if column.dtype.kind == "f":
            self.places, distinct = pd.factorize(_rounded(column.to_numpy(float)), use_na_sentinel=False)
            self.distinct: list[Any] = distinct.tolist()
            for place in np.flatnonzero((distinct == np.rint(distinct)) | np.isnan(distinct)).tolist():
                value = self.distinct[place]
                self.distinct[place] = None if value != value else int(value)
            return
        places, values = _of_lists(column) if _has_lists(column) else _of_values(column)
        self.distinct, at = _distinct(values)
        self.places = at[places]

    @property
    def missing(self) -> np.ndarray:
        """Whether each row has no value."""
        return np.array([value is None for value in self.distinct], bool)[self.places]

    @property
    def numbers(self) -> np.ndarray:
        """The value of each row, which is a number or missing, as a float."""
        return np.array([np.nan if value is None else value for value in self.distinct], float)[self.places]

    def packed(self) -> dict[str, Any]:
        """The column in few bytes: one value of `all` rows, one of `each`, or `of` the distinct values one `at` each row."""
        return _in_few_bytes(self.distinct, self.places)


def _has_lists(column: pd.Series) -> bool:
    """Whether a column has lists, arrays or maps."""
    kinds = set(map(type, column.tolist())) if column.dtype == object else set()
    return any(issubclass(kind, Iterable) and not issubclass(kind, str | bytes) for kind in kinds)


def _of_lists(column: pd.Series) -> tuple[np.ndarray, list[Any]]:
    """The place of each row's value among the values (n,), and these."""
    return np.arange(len(column)), [None if value is None else plain(value) for value in column.tolist()]


def _of_values(column: pd.Series) -> tuple[np.ndarray, list[Any]]:
    """The place of each row's value among the distinct values (n,), and these."""
    places, distinct = pd.factorize(column, use_na_sentinel=False)
    return places, [
        value if type(value) is str else None if pd.isna(value) else plain(value) for value in distinct.tolist()
    ]


def _rounded(values: np.ndarray) -> np.ndarray:
    """Numbers (n,) to five digits, whole ones as they are; NaN where they are infinite."""
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        values = np.where(np.isfinite(values), values, np.nan)
        last = DIGITS - 1 - np.floor(np.log10(np.abs(values)))
        exact = np.abs(last) <= _EXACT_POWER
        scale = _EXACT_POWERS[np.where(exact, np.abs(last), 0).astype(int)]
        rounded = np.where(last < 0, np.rint(values / scale) * scale, np.rint(values * scale) / scale)
    whole = np.isnan(values) | (values == np.rint(values))
    for i in np.flatnonzero(~exact & ~whole):  # numbers whose powers of ten are not exact
        rounded[i] = float(f"{values[i]:.{DIGITS}g}")
    return np.where(whole, values, rounded)


def differences(column: Column, name: str, base: Column) -> dict[str, Any]:
    """A column of numbers `near` another, called `name`: `by` how many units of the last digit of the other, which has five, they differ.

    None where either is missing. A number below a tenth of the other has fewer digits than five.
    """
    values, others = column.numbers, base.numbers
    if not len(values):
        return {"near": name, "by": []}
    with np.errstate(divide="ignore", invalid="ignore"):
        exponents = np.where(others == 0, 0, np.floor(np.log10(np.abs(others))))
    exponents = np.nan_to_num(exponents).astype(int)
    least = exponents.min() - 1
    powers = np.array([10.0**power for power in range(least, exponents.max() + 3)])
    exponents += np.abs(others) >= powers[exponents + 1 - least]  # a logarithm that was rounded
    exponents -= (np.abs(others) < powers[exponents - least]) & (others != 0)
    least = exponents.min()
    scales = np.array([10.0 ** (DIGITS - 1 - power) for power in range(least, exponents.max() + 1)])[exponents - least]
    by = np.rint(values * scales) - np.rint(others * scales)
    texts = by.astype(object)
    known = ~np.isnan(by)
    texts[known] = by[known].astype(int)
    texts[~known] = None
    return {"near": name, "by": texts.tolist()}


def unpacked(name: str, columns: Mapping[str, Mapping[str, Any]], rows: int) -> list[Any]:
    """The values of a packed column, one for each of so many rows."""
    held = columns[name]
    if "all" in held:
        return [held["all"]] * rows
    if "each" in held:
        return list(held["each"])
    if "of" in held:
        return [held["of"][place] for place in held["at"]]
    return [_apart(by, base) for by, base in zip(held["by"], unpacked(held["near"], columns, rows), strict=True)]


def _apart(by: int | None, base: float | None) -> float | None:
    """The number that differs from `base` by so many units of its last digit."""
    if by is None or base is None:
        return None
    last = int(f"{base:e}".partition("e")[2]) + 1 - DIGITS
    return float(f"{(round(base * 10.0**-last) + by) * 10.0**last:.{DIGITS}g}")


def plain(value: Any) -> Any:
    """A JSON value; missing or infinite is null, numbers have five digits, a map of stages is an object."""
    if isinstance(value, list | np.ndarray):
        return {name: plain(one) for name, one in value}
    if value is None or value is pd.NA:
        return None
    item = value.item() if hasattr(value, "item") else value
    if isinstance(item, float):
        return None if not math.isfinite(item) else int(item) if item.is_integer() else float(f"{item:.{DIGITS}g}")
    return str(item) if isinstance(item, int) and abs(item) >= _EXACT else item
