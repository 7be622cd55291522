"""Rows in few bytes, as the page's scripts read them: a column knows what its values share, and all of it is compressed.

`templates/unpack.js` and `templates/rows.js` read what this writes.
"""

import base64
import gzip
import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd

_EXACT = 2**53  # from here on JavaScript's numbers skip integers
DIGITS = 5  # of a number


def compressed(value: object) -> str:
    """JSON, compressed by gzip, in base64; equal values give equal text."""
    text = json.dumps(value, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
    return base64.b64encode(gzip.compress(text.encode(), mtime=0)).decode()


def packed(values: Sequence[Any]) -> dict[str, Any]:
    """A column in few bytes: one value of `all` rows, one of `each`, or `of` the distinct values one `at` each row."""
    texts = [repr(value) for value in values]  # 1, True and 1.0 are three
    distinct = dict(zip(texts, values, strict=True))
    if len(distinct) == 1:
        return {"all": values[0]}
    places = {text: place for place, text in enumerate(distinct)}
    at = [places[text] for text in texts]
    if sum(map(len, texts)) <= sum(map(len, distinct)) + sum(len(str(place)) for place in at):
        return {"each": list(values)}
    return {"of": list(distinct.values()), "at": at}


def differences(values: Sequence[float | None], name: str, base: Sequence[float | None]) -> dict[str, Any]:
    """A column of numbers `near` another, called `name`, whose values are `base`: `by` how many units of the other's last digit they differ.

    None where either is missing. A number below a tenth of the other has fewer digits than five.
    """
    return {"near": name, "by": [_units(one, other) for one, other in zip(values, base, strict=True)]}


def _units(value: float | None, base: float | None) -> int | None:
    """How many units of the last digit of `base`, which has five, lie between both."""
    if value is None or base is None:
        return None
    last = int(f"{base:e}".partition("e")[2]) + 1 - DIGITS
    return round(value * 10.0**-last) - round(base * 10.0**-last)


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
