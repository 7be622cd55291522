"""The nearest cells that a tree finds are those that comparing all pairs finds, and it looks at few of them."""

import numpy as np
import pytest

from moe_routing_bench.comparison import anomalies

NEAREST = 5


def cells(case: str, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """Parts (n, 3) and needs (n, 4) of cells: `lattice` has many that are equally near, `unknown` needs that only some cells have."""
    count = 300
    parts = np.stack([rng.integers(0, most, count) for most in (count, 4, 1 if case == "one" else 12)], axis=1)
    needs = 2.0 ** rng.integers(0, 7, (count, 4)) if case == "lattice" else rng.lognormal(size=(count, 4))
    needs[:, 1] = np.nan  # of all
    if case == "unknown":
        needs[rng.integers(0, count, 9), 2] = np.nan
    return parts, needs


@pytest.mark.parametrize("many", [3, 1000])  # above the first a tree is asked, below the second all pairs
@pytest.mark.parametrize("case", ["lattice", "scattered", "one", "unknown"])
def test_the_nearest_are_those_of_all_pairs(case: str, many: int, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(7)
    parts, needs = cells(case, rng)
    times = rng.lognormal(size=len(parts))
    monkeypatch.setattr(anomalies, "FEW", 3)
    monkeypatch.setattr(anomalies, "MANY", many)
    for i, near in enumerate(anomalies.neighbours(parts, needs, NEAREST)):
        every = np.flatnonzero((parts != parts[i]).sum(axis=1) == 1)
        assert set(near) <= set(every) and len(near) >= min(NEAREST, len(every))
        allowed, expected = (anomalies._allowed(needs[i], needs[of], times[of]) for of in (near, every))
        assert all(map(np.array_equal, allowed, expected))


@pytest.mark.parametrize("many", [1000, 3000])
def test_of_many_cells_few_are_looked_at(many: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A grid of 3,000 shapes, of which every other is a neighbour."""
    monkeypatch.setattr(anomalies, "MANY", many)
    tokens, experts = (axis.ravel() for axis in np.meshgrid(np.arange(1.0, 751), [8.0, 16.0, 32.0, 64.0]))
    parts = np.stack([np.arange(len(tokens)), np.zeros(len(tokens), int)], axis=1)
    near = anomalies.neighbours(parts, np.stack([tokens * experts, tokens, experts], axis=1), NEAREST)
    assert max(map(len, near)) < 4 * NEAREST and min(map(len, near)) >= NEAREST
