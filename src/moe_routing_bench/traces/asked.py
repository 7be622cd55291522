"""What a user says of the inputs of `trace`, and what a reader hands on: values, and what their file proves of them."""

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

FIRST = {  # what the first dimension of an array counts, and the layouts that this stands for
    "tokens": "(tokens, k) or (tokens, layers, k)",
    "layers": "(layers, tokens, k), or (layers, tokens) with k = 1",
    "k": "(k, tokens)",
    "passes": "a list of forward passes, each (tokens, k)",
}


@dataclass(frozen=True)
class Asked:
    """Options of `trace`. None: the user does not say, and the file has to."""

    key: str | None = None
    layer: int | None = None
    first: str | None = None
    experts: int | None = None
    top_k: int | None = None
    columns: str | None = None
    header: bool | None = None

    def without(self, *names: str) -> "Asked":
        """The options that remain after a reader has used some."""
        return replace(self, **dict.fromkeys(names))


@dataclass(frozen=True)
class Values:
    """Numbers of a file. `proof` says why they are ids (tokens, k) of one layer; it is empty for a bare array.

    `experts` is their number where the file states it. `from_zero`: the format numbers experts from 0. `rest` holds the
    options that the reader has not used, `note` what it did with the others.
    """

    array: NDArray[Any]
    rest: Asked
    proof: str = ""
    experts: int | None = None
    from_zero: bool = False
    note: str = ""


@dataclass(frozen=True)
class Recorded:
    """Checked ids (T, k) of one layer, the number of experts where it is known, and why the ids were read so."""

    ids: NDArray[np.int32]
    experts: int | None
    evidence: str
