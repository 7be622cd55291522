"""How many rows the experts have: capacity, row layouts, and the length of a buffer that holds them whatever the routing."""

import math
from dataclasses import dataclass
from fractions import Fraction

from moe_routing_bench.kernels.permute import Permute

LAYOUTS = ("compact", "padded", "block64", "block128")
MOST_ROWS = 2**31 - 1  # rows are counted in int32


def capacity_of(factor: float, tokens: int, top_k: int, experts: int) -> int:
    """Most rows of an expert for a capacity factor: ceil(factor * tokens * top_k / experts), at most one row per token."""
    exact = Fraction(str(factor))  # 1.1 is 11/10: as a float it would round 11 rows up to 12
    return min(tokens, math.ceil(exact * tokens * top_k / experts))


@dataclass(frozen=True)
class RowLayout:
    """Where the rows of `tokens` * `top_k` assignments to `experts` experts lie.

    ``compact``: experts follow one another; ``padded``: every expert has exactly `capacity` rows; ``blockN``: each expert's
    rows are rounded up to a multiple of N. `capacity` is the most rows that an expert keeps, None: all. Sizes may be symbolic
    integers of torch.
    """

    tokens: int
    top_k: int
    experts: int
    capacity: int | None = None
    layout: str = "compact"

    @property
    def limit(self) -> int:
        """Most assignments that an expert keeps."""
        return self.tokens if self.capacity is None else self.capacity

    @property
    def padded(self) -> bool:
        """Whether every expert has exactly `capacity` rows."""
        return self.layout == "padded"

    @property
    def align(self) -> int:
        """Multiple to which the rows of every expert are rounded up."""
        return int(self.layout.removeprefix("block")) if self.layout.startswith("block") else 1

    @property
    def padding(self) -> bool:
        """Whether rows of the buffer may belong to no assignment."""
        return self.layout != "compact" or self.capacity is not None

    @property
    def rows(self) -> int:
        """Rows that a buffer needs whatever the routing: an upper bound that is known without reading the routing."""
        assignments = self.tokens * self.top_k
        if self.padded:
            assert self.capacity is not None, "padded rows are the capacity"
            return self.experts * self.capacity
        kept = assignments if self.capacity is None else min(assignments, self.experts * self.capacity)
        if self.align == 1:
            return kept
        busy = min(self.experts, kept)
        return ((kept - busy) // self.align + busy) * self.align

    @property
    def problem(self) -> Permute:
        """The problem of permute for this layout."""
        return Permute(self.tokens, self.experts, self.top_k, self.rows, self.capacity, self.padded, self.align)

    def used(self, loads: "list[int]") -> int:
        """Rows in use for these assignments per expert, before the capacity."""
        if self.padded:
            return self.experts * self.limit
        return sum(-(-min(load, self.limit) // self.align) * self.align for load in loads)
