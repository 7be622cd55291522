"""Comparing an output with its reference, and the bytes and FLOPs that an operation cannot avoid."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from moe_routing_kernels.formats import FORMATS


@dataclass(frozen=True)
class Cost:
    """Compulsory traffic in bytes, each input read once and each output written once, and floating-point operations.

    A product of matrices is the number of rows of its result, of terms of each sum, and of columns; `other_flops` are those of
    what is too much to be named product by product. `rate` is how many times the rate of products of 16-bit numbers, which is
    measured, tensor cores have for some of these: 2 where both factors are floats of 8 bits.
    """

    read_bytes: int
    write_bytes: int
    products: tuple[tuple[int, int, int], ...] = ()
    other_flops: int = 0
    rate: int = 1

    @property
    def flops(self) -> int:
        """All floating-point operations."""
        return sum(2 * rows * terms * columns for rows, terms, columns in self.products) + self.other_flops

    def __add__(self, other: "Cost") -> "Cost":
        read, write = self.read_bytes + other.read_bytes, self.write_bytes + other.write_bytes
        other_flops, rate = self.other_flops + other.other_flops, max(self.rate, other.rate)
        return Cost(read, write, self.products + other.products, other_flops, rate)

    def of_each(self, devices: int) -> "Cost":
        """What each of so many devices does on average, which is a bound from below for the one that does most."""
        products = tuple((rows // devices, terms, columns) for rows, terms, columns in self.products)
        read, write = self.read_bytes // devices, self.write_bytes // devices
        return Cost(read, write, products, self.other_flops // devices, self.rate)


@dataclass(frozen=True)
class Assignment:
    """What the routing statistics of a row describe: expert ids (T, k), weights (T, k) where the operation has them, and the row of
    every assignment (T, k), negative where it was dropped, where it is known."""

    ids: Tensor
    weights: Tensor | None = None
    inverse: Tensor | None = None


@dataclass(frozen=True)
class Check:
    """Outcome of one comparison. `error` says what was wrong, in words, or is None."""

    rel_l2_error: float = 0.0
    max_abs_error: float = 0.0
    tolerance: float = 0.0
    mismatches: int = 0
    ties: int = 0
    error: str | None = None


def tolerance(dtype: str, roundings: int = 1) -> float:
    """Relative L2 error allowed to an implementation whose plain form rounds `roundings` times in a row.

    A value rounded once to nearest has an rms relative error of 0.42 unit roundoffs u; independent roundings add as
    squares. 1.5 sqrt(n) u is 3.6 times that plain error.
    """
    return 1.5 * math.sqrt(roundings) * FORMATS[dtype].roundoff


def exact(got: Tensor, want: Tensor, what: str) -> Check:
    """Every element equal (NaN never is)."""
    wrong = int((got != want).sum())
    return Check(mismatches=wrong, error=f"{what}: {wrong} of {want.numel()} elements differ" if wrong else None)


def close(got: Tensor, want: Tensor, limit: float, what: str, bound: Tensor | None = None) -> Check:
    """Relative L2 error at most `limit`, and every |error| at most `bound`: where it is not given, 6 limit (rms(want) + |want|).
    `want` is fp32 or fp64."""
    difference = (got.to(want.dtype) - want).abs()
    size = want.norm()
    rel_l2, largest = float(difference.norm() / size.clamp_min(1e-30)), float(difference.max()) if len(want) else 0.0
    if bound is None:
        bound = 6 * limit * (size / math.sqrt(want.numel() or 1) + want.abs())
    wrong = int((~(difference <= bound)).sum())  # NaN compares false, so it counts as wrong
    error = None
    if not torch.isfinite(got).all():
        error = f"{what}: {int((~torch.isfinite(got)).sum())} of {want.numel()} elements are not finite"
    elif wrong or not rel_l2 <= limit:
        error = f"{what}: relative L2 error {rel_l2:.2e} (limit {limit:.1e}), {wrong} elements out of bounds"
    return Check(rel_l2, largest, limit, wrong, error=error)


def rounded(want: Tensor, terms: Tensor, dtype: str, roundings: int, term_roundoff: float = 0.0) -> Tensor:
    """The most by which each of the sums `want` may be off that is rounded once, to `dtype`. The sizes of its terms add up to `terms`.

    Before that, every term takes part in at most `roundings` roundings of float32, and is off by `term_roundoff` of its own size. What
    has no terms is exactly zero.
    """
    form = FORMATS[dtype]
    last = torch.where(terms > 0, want.abs().clamp_min(form.least_normal), 0.0) * form.roundoff
    before = terms * (roundings * FORMATS["fp32"].roundoff + term_roundoff)
    return (last + before) * (1 + 2 * form.roundoff)  # what is rounded last is off already


def both(first: Check, second: Check) -> Check:
    """The worse of two outcomes, field by field."""
    return Check(
        max(first.rel_l2_error, second.rel_l2_error),
        max(first.max_abs_error, second.max_abs_error),
        max(first.tolerance, second.tolerance),
        first.mismatches + second.mismatches,
        first.ties + second.ties,
        first.error or second.error,
    )


def nbytes(*tensors: Tensor) -> int:
    """Bytes that the tensors hold."""
    return sum(t.numel() * t.element_size() for t in tensors)
