"""Which cells are next to each other, in grids of ten thousand as well. Pure functions; no torch.

Two cells are neighbours where they differ in one of several parts. How far they are apart is the logarithm of the room that the times
of both leave each other: of what they need, the largest ratio over the smallest, 1 among them. With logarithms x and y that is
max(0, x - y) - min(0, x - y), a norm, and the largest coordinate in a space whose axes are the needs and the differences between any two. In
that space a k-d tree finds the nearest, where comparing all pairs of 10,000 cells takes minutes.
"""

import itertools

import numpy as np

FEW = 300  # neighbours that are not worth a tree
_MARGIN = 1e-9  # of a distance: what rounding may change
_FIRST = 16  # of the nearest, asked for at once


def near(parts: np.ndarray, needs: np.ndarray, nearest: int) -> list[np.ndarray]:
    """For each of n cells the places of its neighbours, ascending: of many at least the `nearest`, with all that are as near.

    `parts` (n, p) has equal numbers where cells are equal in a part, `needs` (n, m) what they need.
    """
    found: list[list[np.ndarray]] = [[] for _ in parts]
    for part in range(parts.shape[1]):
        for members in _groups(np.delete(parts, part, axis=1)):
            values = parts[members, part]
            for place, others in zip(members, _of_group(values, needs[members], nearest), strict=True):
                found[place].append(members[others])
    return [np.sort(np.concatenate(each)) for each in found]


def _groups(keys: np.ndarray) -> list[np.ndarray]:
    """The places of equal rows, ascending in each group."""
    _, numbers = np.unique(keys, axis=0, return_inverse=True)
    numbers = numbers.ravel()
    order = np.argsort(numbers, kind="stable")
    return np.split(order, np.flatnonzero(np.diff(numbers[order])) + 1)


def _of_group(values: np.ndarray, needs: np.ndarray, nearest: int) -> list[np.ndarray]:
    """For each cell of a group the places of those with another value: all, or the nearest."""
    points = None if len(values) <= FEW else _points(needs)
    if points is None:
        return [np.flatnonzero(values != value) for value in values]
    from scipy.spatial import cKDTree  # takes a fifth of a second to import

    tree, found, left, count = cKDTree(points), [np.empty(0, int)] * len(values), np.arange(len(values)), _FIRST
    while len(left):
        count = min(count, len(values))
        distances, places = tree.query(points[left], k=count, p=np.inf)
        other = values[places] != values[left, None]
        enough = np.cumsum(other, axis=1) >= nearest
        limit = np.where(enough[:, -1], distances[np.arange(len(left)), enough.argmax(axis=1)], np.inf)
        limit = limit * (1 + _MARGIN) + _MARGIN
        done = (distances[:, -1] > limit) | (count == len(values))
        for i in np.flatnonzero(done):
            found[left[i]] = places[i][other[i] & (distances[i] <= limit[i])]
        left, count = left[~done], 4 * count
    return found


def _points(needs: np.ndarray) -> np.ndarray | None:
    """Coordinates in which the largest difference is the distance; None where some needs are not known, which leaves their ratios at 1."""
    with np.errstate(invalid="ignore"):
        known = np.isfinite(needs) & (needs > 0)
    if (known.any(axis=0) != known.all(axis=0)).any():
        return None
    logs = np.log(needs[:, known.all(axis=0)])
    pairs = [logs[:, i] - logs[:, j] for i, j in itertools.combinations(range(logs.shape[1]), 2)]
    return np.column_stack([logs, *pairs]) if logs.shape[1] else None
