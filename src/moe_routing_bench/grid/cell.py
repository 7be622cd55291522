"""A cell: one frozen point of the grid for one bench. It holds the axes that its bench reads, and knows no bench and no axis."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from operator import itemgetter
from typing import Any

Value = int | float | str | None


@dataclass(frozen=True)
class Cell:
    """`key` is readable and unique among the cells of its bench; it is looked up, never parsed.

    Cells of one `family` are compared with each other, so they are measured on one card. The value of an axis is an
    attribute, as in ``cell.tokens``; an axis that the bench does not read raises `AttributeError`.
    """

    bench: str
    key: str
    values: tuple[tuple[str, Value], ...]
    family: str = ""

    def __post_init__(self) -> None:
        """Sort the values by name: cells of the same values are equal, in whatever order they were given."""
        object.__setattr__(self, "values", tuple(sorted(self.values, key=itemgetter(0))))

    def __getattr__(self, axis: str) -> Any:
        """The value of an axis."""
        if axis.startswith("__"):  # what pickle and copy ask for, also before there are values
            raise AttributeError(axis)
        for name, value in self.values:
            if name == axis:
                return value
        raise AttributeError(f"a cell of {self.bench} has no axis {axis}")

    def __contains__(self, axis: str) -> bool:
        """Whether the cell has a value of an axis."""
        return any(name == axis and value is not None for name, value in self.values)

    def get(self, axis: str, default: Any = None) -> Any:
        """The value of an axis, or `default` where the bench does not read it."""
        return dict(self.values).get(axis, default)

    def but(self, bench: str | None = None, **values: Value) -> "Cell":
        """This cell with other values, and as one of another bench where `bench` is given; its key stays."""
        return replace(self, bench=bench or self.bench, values=tuple((dict(self.values) | values).items()))

    def asdict(self) -> dict[str, Any]:
        """Bench, key, axes and family as one mapping that `from_dict` takes."""
        return {"bench": self.bench, "key": self.key, "axes": dict(self.values), "family": self.family}

    @staticmethod
    def from_dict(parts: Mapping[str, Any]) -> "Cell":
        """The inverse of `asdict`."""
        return Cell(parts["bench"], parts["key"], tuple(parts["axes"].items()), parts["family"])
