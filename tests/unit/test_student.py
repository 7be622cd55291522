"""Student's t distribution: as scipy has it, which is off by 3e-9 for values below 1e-6."""

import math

import numpy as np
import pytest
from scipy import special

from moe_routing_bench import student

FREEDOMS = [1.0, 1.0001, 1.5, 2.0, 3.0, 7.3, 30.0, 99.5, 1e3, 1e4]


@pytest.mark.parametrize("freedom", FREEDOMS)
def test_as_scipy_has_it(freedom: float) -> None:
    for confidence in (0.9, 0.95, 0.99, 0.999):
        known = special.stdtrit(freedom, (1 + confidence) / 2)
        assert student.half_width(freedom, confidence) == pytest.approx(known, rel=1e-9)
    for t in (*np.logspace(-4, 6, 61), 0.0):
        known = 2 * special.stdtr(freedom, -t)
        if known > 1e-290:
            assert student.two_sided(t, freedom) == student.two_sided(-t, freedom) == pytest.approx(known, rel=1e-9)


def test_the_ends_of_the_distribution() -> None:
    assert student.two_sided(math.inf, 3) == 0 and student.two_sided(1e200, 3) == 0
    assert math.isnan(student.two_sided(math.nan, 3))
    assert student.two_sided(1.96, math.inf) == pytest.approx(special.ndtr(-1.96) * 2)


def test_many_at_once_are_as_each() -> None:
    generator = np.random.default_rng(3)
    freedom = np.array([*FREEDOMS, *1 + generator.exponential(9, size=300)])
    t = generator.normal(size=len(freedom)) * 10.0 ** generator.integers(-6, 4, len(freedom))
    t[:2] = 0.0, 1e200
    assert student.two_sided_each(t, freedom).tolist() == [
        student.two_sided(*each) for each in zip(t.tolist(), freedom.tolist(), strict=True)
    ]
    assert student.half_width_each(freedom, 0.95).tolist() == [
        student.half_width(one, 0.95) for one in freedom.tolist()
    ]
    assert (
        len(student.half_width_each(np.array([]), 0.95)) == len(student.two_sided_each(np.array([]), np.array([]))) == 0
    )
