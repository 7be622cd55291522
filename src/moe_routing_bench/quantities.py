"""Quantities as people read them."""


def us(time: float, *interval: float) -> str:
    """A time in µs with its unit, and the ends of its interval in brackets: four digits, whole numbers above 1000, never an exponent."""
    ends = f" [{', '.join(map(_digits, interval))}]" if interval else ""
    return f"{_digits(time)} µs{ends}"


def count(n: int, noun: str) -> str:
    """A number with its noun in the right form."""
    return f"{n} {noun}{'' if n == 1 else 's'}"


def _digits(number: float) -> str:
    return f"{number:,.0f}" if abs(number) >= 1000 else f"{number:.4g}"
