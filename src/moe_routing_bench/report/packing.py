"""Columns of values in few bytes: what a column's values share is written once. `templates/unpack.js` and `templates/rows.js` read what this writes."""

import base64
import gzip
import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd

_LONG = 10_000_000  # bytes of a text that more effort makes 2 % smaller in three times as long
_EXACT = 2**53  # from here on JavaScript's numbers skip integers
DIGITS = 5  # of a number
_EXACT_POWER = 22  # up to which powers of ten are floats


def compressed(value: object) -> str:
    """JSON, compressed by gzip, in base64; equal values give equal text."""
    text = json.dumps(value, separators=(",", ":"), ensure_ascii=False, allow_nan=False).encode()
    return base64.b64encode(gzip.compress(text, 9 if len(text) < _LONG else 6, mtime=0)).decode()


def packed(values: Sequence[Any]) -> dict[str, Any]:
    """A column in few bytes: one value of `all` rows, one of `each`, or `of` the distinct values one `at` each row."""
    return _in_few_bytes(*_distinct(values))


def _distinct(values: Sequence[Any]) -> tuple[list[str], list[Any], np.ndarray]:
    """The texts of distinct values and these values, in the order of their rows, and the place of each row's among them (n,)."""
    texts = [repr(value) for value in values]  # 1, True and 1.0 are three
    known = dict(zip(texts, values, strict=True))
    order = {text: place for place, text in enumerate(known)}
    return list(known), list(known.values()), np.array([order[text] for text in texts], int)


def _in_few_bytes(texts: list[str], distinct: list[Any], places: np.ndarray) -> dict[str, Any]:
    """`packed` of what `_distinct` makes."""
    if len(distinct) == 1:
        return {"all": distinct[0]}
    sizes = np.array([len(text) for text in texts], int)
    digits = np.array([len(str(place)) for place in range(len(sizes))], int)
    if sizes[places].sum() <= sizes.sum() + digits[places].sum():
        return {"each": [distinct[place] for place in places.tolist()]}
    return {"of": distinct, "at": places.tolist()}


class Column:
    """A column of a table as its distinct values, fit for JSON and in the order of their rows, and the place of each row's among them."""

    def __init__(self, column: pd.Series) -> None:
        """The values of lists, which are few, are made one by one."""
        if column.dtype.kind == "f":
            self.places, distinct = pd.factorize(_rounded(column.to_numpy(float)), use_na_sentinel=False)
            self.distinct = [
                None if value != value else int(value) if value.is_integer() else value for value in distinct.tolist()
            ]
            self._texts = [repr(value) for value in self.distinct]
            return
        if column.dtype == object and column.map(pd.api.types.is_list_like).any():
            places, values = np.arange(len(column)), [plain(value) for value in column]
        else:
            places, distinct = pd.factorize(column, use_na_sentinel=False)
            values = [None if pd.isna(value) else plain(value) for value in distinct]
        self._texts, self.distinct, at = _distinct(values)
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
        return _in_few_bytes(self._texts, self.distinct, self.places)


def _rounded(values: np.ndarray) -> np.ndarray:
    """Numbers (n,) to five digits, whole ones as they are; NaN where they are infinite."""
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        values = np.where(np.isfinite(values), values, np.nan)
        last = DIGITS - 1 - np.floor(np.log10(np.abs(values)))
        exact = np.abs(last) <= _EXACT_POWER
        scale = 10.0 ** np.where(exact, np.abs(last), 0)
        rounded = np.where(last < 0, np.rint(values / scale) * scale, np.rint(values * scale) / scale)
    for i in np.flatnonzero(~exact & np.isfinite(values)):  # zero, and numbers whose powers of ten are not exact
        rounded[i] = float(f"{values[i]:.{DIGITS}g}")
    return np.where(np.isnan(values) | (values == np.rint(values)), values, rounded)


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
    powers = {exponent: 10.0**exponent for exponent in range(exponents.min() - 1, exponents.max() + 3)}
    exponents += np.abs(others) >= np.array(
        [powers[one + 1] for one in exponents.tolist()]
    )  # a logarithm that was rounded
    exponents -= (np.abs(others) < np.array([powers[one] for one in exponents.tolist()])) & (others != 0)
    scales = np.array([10.0 ** (DIGITS - 1 - one) for one in exponents.tolist()])
    by = np.rint(values * scales) - np.rint(others * scales)
    return {"near": name, "by": [None if one != one else int(one) for one in by.tolist()]}


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
