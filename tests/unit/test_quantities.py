"""Times are read without exponents."""

import pytest

from moe_routing_bench.quantities import energy, times, told_apart, us


@pytest.mark.parametrize(
    ("time", "said"),
    [(2.1449, "2.145 µs"), (10.0, "10 µs"), (999.96, "1000 µs"), (11480.4, "11,480 µs"), (8056906.1, "8,056,906 µs")],
)
def test_a_time_has_four_digits_or_is_whole(time: float, said: str) -> None:
    assert us(time) == said


def test_an_interval_stands_behind_its_time() -> None:
    assert us(30.0, 29.04, 1031.2) == "30.00 µs [29.04, 1,031]"
    assert us(277.83, 277.71, 278.01) == "277.8 µs [277.7, 278.0]", "as exact at its end"
    assert us(274.0, exact=True) == "274.0 µs", "in a column, under 397.1 µs"


def test_a_large_ratio_is_whole() -> None:
    """A table had 140x [17.2, 1.09e+03]."""
    assert times(140.2, 17.21, 1092.6) == "140x [17.2, 1093]"
    assert times(999.6, 999.55, 1e5) == "1000x [1000, 100000]"


@pytest.mark.parametrize(
    ("mj", "said"), [(0.1023, "0.10"), (0.0886, "0.089"), (1.26, "1.3"), (47.6, "48"), (1898.6, "1,900")]
)
def test_an_energy_has_two_digits(mj: float, said: str) -> None:
    assert energy(mj) == said


@pytest.mark.parametrize(
    ("values", "told"),
    [
        ((1.5, 1.2, 1.8), ["1.50", "1.20", "1.80"]),
        ((1.002, 1.0004, 1.004), ["1.0020", "1.0004", "1.0040"]),  # an end that would read as 1 is not 1
        ((1.002, 0.9996, 1.004), ["1.002", "0.9996", "1.004"]),
        ((0.998, 0.996, 0.9996), ["0.9980", "0.9960", "0.9996"]),
        ((2.001, 2.0, 2.002), ["2.001", "2.000", "2.002"]),
    ],
)
def test_the_ends_of_an_interval_are_told_apart_and_from_one(values: tuple[float, ...], told: list[str]) -> None:
    assert told_apart(*values) == told
