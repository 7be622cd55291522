"""Whether whole numbers (A, B) prove that each row holds the distinct ids of a token.

The experts of a token differ, though most experts serve many tokens. Columns of any other kind that share values
(counts per expert, positions, ids of several layers) repeat a value within a row now and then. `expected_repeats` is how
often, if columns were independent and each kept its values; without any repeat, chance explains the rows with a
probability of about exp(-expected).
"""

import numpy as np
from numpy.typing import NDArray

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


def proof(ids: NDArray[np.integer]) -> str:
    """Why the rows of ids, none of them below 0, are tokens; empty where the values do not prove it."""
    tokens, top_k = ids.shape
    if not 2 <= top_k <= MOST_COLUMNS or repeats(ids).any() or any(numbers_rows(column) for column in ids.T):
        return ""
    expected = expected_repeats(ids)
    if expected.sum() / 2 < LEAST_EXPECTED or expected.min() < LEAST_OF_A_COLUMN:
        return ""
    return f"no id repeats within any of {tokens} tokens, where chance would repeat {expected.sum() / 2:.0f}"
