"""A cell, one frozen point of the grid for one bench; how to measure; and a job, the measurement of one cell. They know no bench and no axis.

The text of a job's spec has a hash, which stored rows and file names hold: another text is another measurement. `Settings` are the numbers of
the protocol that a config may change; docs/method.md gives the evidence for each. The types of numbers that a user may set have their bounds
in the annotation; what they mean in words is in `fields`.
"""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from functools import cached_property
from operator import itemgetter
from pathlib import Path
from typing import Annotated, Any

from annotated_types import Ge, Gt, Le, Lt

from moe_routing_kernels import guarded
from moe_routing_kernels.errors import bad

Count = Annotated[int, Ge(1)]
Whole = Annotated[int, Ge(0)]
Seed = Annotated[int, Ge(0), Le(2**31 - 1)]
Amount = Annotated[float, Gt(0)]
Share = Annotated[float, Gt(0), Lt(1)]


@dataclass(frozen=True)
class Settings:
    """Times are seconds unless the name says otherwise; a value here is part of every cell's spec and hash."""

    check_seeds: Annotated[Count, "input sets that an implementation must get right before and after it is timed"] = 3
    warmup_ms: Annotated[Amount, "length of the warm-up"] = 100.0
    settle_blocks: Annotated[Count, "most blocks of warm-up that are timed until two in a row agree within 1 %"] = 5
    interval_us: Annotated[
        Amount, "least device time between two events, so that what begins and ends a sample, 3 us, is below 0.1 %"
    ] = 4000.0
    samples_per_block: Annotated[Count, "samples of a block"] = 3
    min_blocks: Annotated[Count, "least blocks of samples"] = 20
    max_blocks: Annotated[Count, "most blocks of samples"] = 40
    target_half_width: Annotated[Amount, "95 % half-width over the median at which sampling stops"] = 0.005
    max_seconds: Annotated[Amount, "sampling time of all implementations of a cell together"] = 3.0
    turn_seconds: Annotated[
        Amount,
        "where the power limit sets the clock, three times the untimed work before each of six turns",
    ] = 1.0
    wall_calls: Annotated[Count, "calls that are timed by the wall clock"] = 10
    cpu_threads: Annotated[
        Count, "threads that torch computes with on a CPU, whatever the machine has and OMP_NUM_THREADS says"
    ] = 1
    timeout: Annotated[Amount, "silence of the worker after which the implementation at work has hung"] = 120.0
    set_limit: Annotated[Count, "most input and output sets that are rotated to keep the L2 cache cold"] = 256
    set_bytes: Annotated[Amount, "most memory that the rotated sets may take together"] = 8e9

    def __post_init__(self) -> None:
        """Raise `UserError` for fewer blocks at most than at least. Whole numbers of seconds and bytes become floats."""
        for field in fields(self):
            if isinstance(field.default, float):
                object.__setattr__(self, field.name, float(getattr(self, field.name)))
        if self.max_blocks < self.min_blocks:
            raise bad("measure.max_blocks", self.max_blocks, f"at least min_blocks={self.min_blocks}")


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


ISOLATE = ("plugins", "all")  # implementations that run in processes of their own


def canonical(parts: Mapping[str, Any]) -> str:
    """One JSON text for the same parts, whatever their order."""
    return json.dumps(parts, sort_keys=True, separators=(",", ":"))


def spec_hash(spec: str) -> str:
    """First 16 hex digits of the SHA-256 of a spec text."""
    return hashlib.sha256(spec.encode()).hexdigest()[:16]


@dataclass(frozen=True)
class Job:
    """`twins` are those of the `implementations` that take part twice: how far they are apart is noise (A/A). `plugins` are references
    of those that are of other packages, alone or as parts. `isolate` is one of `ISOLATE`: which have a process of their own."""

    cell: Cell
    implementations: tuple[str, ...]
    settings: Settings
    twins: tuple[str, ...] = ()
    plugins: tuple[str, ...] = ()
    isolate: str = ISOLATE[0]

    @cached_property
    def spec(self) -> str:
        """Everything the measurement depends on besides code, as one canonical JSON text; of a trace it holds the hash."""
        parts = {
            "cell": self.cell.asdict(),
            "implementations": self.implementations,
            "settings": vars(self.settings),
        }
        if self.twins:
            parts["twins"] = self.twins
        if self.plugins:
            parts["plugins"] = self.plugins
        if self.isolate != ISOLATE[0]:
            parts["isolate"] = self.isolate
        if "trace" in self.cell:
            parts["trace_sha256"] = file_sha256(Path(self.cell.trace))
        return canonical(parts)

    @cached_property
    def hash(self) -> str:
        """First 16 hex digits of the SHA-256 of the spec."""
        return spec_hash(self.spec)

    @cached_property
    def name(self) -> str:
        """File name of the job: the cell for people, then 8 digits of the hash."""
        return f"{self.cell.key}-{self.hash[:8]}"

    @staticmethod
    def from_spec(spec: str) -> "Job":
        """The inverse of `spec`."""
        parts = json.loads(spec)
        return Job(
            Cell.from_dict(parts["cell"]),
            tuple(parts["implementations"]),
            Settings(**parts["settings"]),
            tuple(parts.get("twins", ())),
            tuple(parts.get("plugins", ())),
            parts.get("isolate", ISOLATE[0]),
        )


def file_sha256(path: Path) -> str:
    """SHA-256 of a file's content; `UserError` when it is missing."""
    try:
        return hashlib.sha256(guarded.content(path, guarded.MOST_TABLE)).hexdigest()
    except OSError as error:
        missing = isinstance(error, FileNotFoundError | NotADirectoryError)
        hint = "no such file" if missing else error.strerror or str(error)
        raise bad("trace", str(path), "a file of recorded routing", hint) from error
