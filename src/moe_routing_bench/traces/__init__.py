"""Routing that other programs recorded: read, checked, summarised, and written as a trace for the sampler `trace`.

Here are the options of the command `trace`, and what readers return: arrays, and how the file proves what they mean.
"""

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from moe_routing_bench.traces.writing import MOST_VALUES, check_exact, check_most
from moe_routing_kernels.errors import bad

FIRST = {  # what the first dimension of an array counts, and the layouts that this stands for
    "tokens": "(tokens, k) or (tokens, layers, k)",
    "layers": "(layers, tokens, k), or (layers, tokens) with k = 1",
    "k": "(k, tokens)",
    "passes": "a list of forward passes, each (tokens, k)",
}


@dataclass(frozen=True)
class Options:
    """Options of `trace`. None: the user does not say, and the file has to."""

    key: str | None = None
    layer: int | None = None
    first: str | None = None
    experts: int | None = None
    top_k: int | None = None
    columns: str | None = None
    header: bool | None = None

    def without(self, *names: str) -> "Options":
        """The options that remain after a reader has used some."""
        return replace(self, **dict.fromkeys(names))


@dataclass(frozen=True)
class Values:
    """Numbers of a file. `proof` says why they are ids (tokens, k) of one layer; it is empty for a bare array.

    `experts` is their number where the file states it. `from_zero`: the format numbers experts from 0. `rest` holds the
    options that the reader has not used, `note` what it did with the others.
    """

    array: NDArray[Any]
    rest: Options
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


def array(value: Any, where: object) -> NDArray[Any]:
    """A tensor or an array of numbers as an array: floating point as float64, for numpy has no bfloat16."""
    import torch

    if isinstance(value, np.ndarray):
        if value.dtype.kind != "f":
            return value
        value = torch.from_numpy(value)

    if value.layout is not torch.strided or value.is_complex() or value.is_quantized:
        raise bad("ids", f"{value.layout} of {value.dtype} in {where}", "a dense tensor of whole numbers")
    value = value.detach()
    if not value.is_floating_point():
        return value.numpy()
    check_most(value.numel(), where, MOST_VALUES)  # a tensor may repeat few bytes, which are now copied
    wide = value.double().numpy()
    if wide.size and np.isfinite(wide).all() and (wide == np.rint(wide)).all():
        check_exact(float(np.abs(wide).max()), 2 / torch.finfo(value.dtype).eps, value.dtype, where)
    return wide


def is_array(value: Any) -> bool:
    """Whether a value is a tensor or an array."""
    import torch

    return isinstance(value, (torch.Tensor, np.ndarray))
