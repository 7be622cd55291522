"""permute: expert ids (T, k) to counts, offsets, order and inverse, the results that sorting tokens by expert needs.

`RowLayout` says how many rows the experts have: capacity, row layouts, and the length of a buffer that holds them for any routing.
"""

from dataclasses import dataclass
from fractions import Fraction

from moe_routing_kernels.errors import bad, positive
from moe_routing_kernels.implementations import Candidate


@dataclass(frozen=True)
class Permute:
    """Tensors: topk_ids (T, k) of `ids`; counts (E,), offsets (E + 1,), order (rows,), inverse (T, k), all int32."""

    tokens: int
    experts: int
    top_k: int
    rows: int  # length of `order`: the row limit of the layout
    limit: int | None = None  # most assignments that an expert keeps; None: all
    padded: bool = False  # every expert has exactly `limit` rows
    align: int = 1  # not padded: each expert's rows are rounded up to a multiple of this
    ids: str = "int32"  # or int64, as torch.topk has them
    outside: bool = False  # whether ids may be of no expert here, which take no row; kernels take such ids in any case


IMPLEMENTATIONS = (
    Candidate("torch", "torch_permute"),
    Candidate("torch_compile", "torch_permute", requires=("compiler",), options={"compiled": True}),
    Candidate("triton", "triton_permute", requires=("gpu", "triton"), rank=2),
    Candidate("cute", "cute_permute", requires=("nvidia", "cutlass"), rank=1),
)


LAYOUTS = ("compact", "padded", "block64", "block128")
# The limit of rows, tokens and assignments: kernels count them in int32, and a loop's last step ends up to 2^24 beyond the last.
MOST_ROWS = 2**31 - 2**24


def capacity_of(factor: float, tokens: int, top_k: int, experts: int) -> int:
    """Most rows of an expert for a capacity factor: ceil(factor * tokens * top_k / experts), at most one row per token.

    `tokens` may be a symbolic integer of torch, so that compiled code takes any number. Raises `UserError` for a factor that is no
    number above 0.
    """
    if not positive(factor):
        raise bad("capacity factor", factor, "a number above 0")
    numerator, denominator = decimal_ratio(*factor.as_integer_ratio())
    return least(tokens, -(-numerator * tokens * top_k // (denominator * experts)))


def decimal_ratio(numerator: int, denominator: int) -> tuple[int, int]:
    """The ratio of a float's decimals: 1.1 is 11/10. Its exact ratio is a little more, and would round 11 rows up to 12.

    Compiled code calls this once, for a constant: a graph has its factor as a constant, from whose exact ratio dynamo derives the call.
    """
    return Fraction(str(numerator / denominator)).as_integer_ratio()


decimal_ratio._dynamo_marked_constant = True  # torch.compiler.assume_constant_result, without torch  # pyright: ignore[reportFunctionMemberAccess]


def least(size: int, other: int) -> int:
    """The smaller of two sizes, which may be symbolic: `min` would compare these, and so bind a compiled graph to the outcome."""
    if isinstance(size, int) and isinstance(other, int):
        return min(size, other)
    import torch

    return torch.sym_min(size, other)  # pyright: ignore[reportReturnType]


@dataclass(frozen=True)
class RowLayout:
    """Where the rows of `tokens` * `top_k` assignments to `experts` experts lie.

    ``compact``: experts follow one another; ``padded``: every expert has exactly `capacity` rows; ``blockN``: each expert's
    rows are rounded up to a multiple of N. `capacity` is the most rows that an expert keeps, None: all. `ranks`: the experts are those of
    one of so many expert-parallel ranks; assignments to experts of others take no row. Sizes may be symbolic integers of torch.
    """

    tokens: int
    top_k: int
    experts: int
    capacity: int | None = None
    layout: str = "compact"
    ranks: int = 1

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
        return self.layout != "compact" or self.dropping

    @property
    def dropping(self) -> bool:
        """Whether assignments may have no row."""
        return self.capacity is not None or self.ranks > 1

    @property
    def rows(self) -> int:
        """Rows that a buffer needs for any routing: an upper bound that is known without reading the routing."""
        assignments = self.tokens * self.top_k
        if self.padded:
            assert self.capacity is not None, "padded rows are the capacity"
            return self.experts * self.capacity
        kept = assignments if self.capacity is None else least(assignments, self.experts * self.capacity)
        if self.align == 1:
            return kept
        busy = least(self.experts, kept)
        return ((kept - busy) // self.align + busy) * self.align

    @property
    def problem(self) -> Permute:
        """The problem of permute for this layout."""
        sizes, way = (self.tokens, self.experts, self.top_k, self.rows), (self.capacity, self.padded, self.align)
        return Permute(*sizes, *way, outside=self.ranks > 1)

    def used(self, loads: "list[int]") -> int:
        """Rows in use for these assignments per expert, before the capacity."""
        if self.padded:
            return self.experts * self.limit
        return sum(-(-min(load, self.limit) // self.align) * self.align for load in loads)
