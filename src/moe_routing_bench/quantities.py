"""Quantities as people read them, and which ratio is large enough to be read without a noise floor."""

import math
from collections import Counter
from collections.abc import Iterable

ANY_FLOOR = 0.1  # of |ln ratio|: nearly three times the largest noise floor of the published runs, 0.035
FLOOR_SAID = f"{math.expm1(ANY_FLOOR):.0%}".replace("%", " %")


def beyond_any_floor(low: float | None, high: float | None) -> bool:
    """Whether the interval of a time ratio on a GPU lies so far from 1 that a run without twins shows a difference."""
    return low is not None and high is not None and (low > math.exp(ANY_FLOOR) or high < math.exp(-ANY_FLOOR))


def us(time: float, *interval: float, exact: bool = False) -> str:
    """A time in µs with its unit, and the ends of its interval in brackets: four digits, whole numbers above 1000, never an exponent.

    It keeps the zeros at the end with an interval, whose ends are as `exact`, and in a column, where other numbers stand under it.
    """
    said, *ends = (digits(one, exact or bool(interval)) for one in (time, *interval))
    return f"{said} µs" + (f" [{', '.join(ends)}]" if ends else "")


def times(ratio: float, low: float, high: float) -> str:
    """A ratio with its interval, where that is known."""
    if math.isnan(low) or math.isnan(high):
        return f"{significant(ratio, 3)}x"
    one, least, most = told_apart(ratio, low, high)
    return f"{one}x [{least}, {most}]"


def told_apart(value: float, low: float, high: float) -> list[str]:
    """A value and its interval in three digits, or in as many as it takes to tell the ends from each other, and from a 1 that is not between them, five at most."""
    apart = {low, high} if low <= 1 <= high else {low, high, 1.0}
    most = next((n for n in (3, 4) if len({f"{one:.{n}g}" for one in apart}) == len(apart)), 5)
    return [significant(one, most) for one in (value, low, high)]


def count(n: int, noun: str) -> str:
    """A number with its noun in the right form."""
    return f"{n} {noun}{'' if n == 1 else 's'}"


def counts(names: Iterable[str]) -> str:
    """How often each name occurs, the most frequent first."""
    return ", ".join(f"{n} {name}" for name, n in Counter(names).most_common()) or "none"


def digits(number: float, exact: bool = False) -> str:
    """Four digits, or all of a large whole part; `exact`: with the zeros at the end."""
    if abs(number) >= 1000:
        return f"{number:,.0f}"
    return significant(number, 4) if exact else f"{number:.4g}"


def significant(number: float, most: int) -> str:
    """So many digits, the zeros at the end among them: 0.140; all of a larger whole part, never an exponent for it."""
    if float(f"{abs(number):.{most}g}") >= 10.0**most:
        return f"{number:.0f}"
    return f"{number:#.{most}g}".removesuffix(".")


def energy(mj: float) -> str:
    """An energy in two digits, a dash for NaN: two runs of the same code differ by up to 10 % (95th percentile, H200)."""
    if mj != mj:
        return "–"
    return f"{float(f'{mj:.2g}'):,g}" if mj >= 100 else significant(mj, 2)
