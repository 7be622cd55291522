"""Seeds 001 and 002: each command of the predecessor as ours, with this run's times, and what its figures and metrics are called here."""

import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pandas as pd

from moe_routing_bench.config.axes import AXES, spelled
from moe_routing_bench.config.load import read_mapping
from moe_routing_bench.report.parts import ABSENT, Group, Table
from moe_routing_bench.report.seeds import folder, number

KINDS = ("figure", "column", "router", "axis", "file")  # of what stands for something that is no benchmark
_DIVIDED = ("hidden", "intermediate")  # on a CPU


@dataclass(frozen=True)
class Command:
    """A line of the map: their command, ours, their times in µs by implementation, and in what both differ."""

    theirs: str
    ours: str
    published: Mapping[str, float]
    differs: str

    @property
    def bench(self) -> str:
        """The bench that our command measures."""
        return shlex.split(self.ours)[2]

    @property
    def options(self) -> dict[str, str]:
        """The options of our command, without their dashes."""
        words = shlex.split(self.ours)[3:]
        return {
            name.removeprefix("--").replace("-", "_"): text for name, text in zip(words[::2], words[1::2], strict=True)
        }

    @property
    def axes(self) -> dict[str, list[Any]]:
        """The values of each axis that our command names."""
        found = {name: text.split(",") for name, text in self.options.items() if name in AXES}
        return {name: [spelled(AXES[name], _read(name, one)) for one in values] for name, values in found.items()}


def _read(axis: str, text: str) -> Any:
    return text if text == "none" else AXES[axis].kind(text)


def commands(seed: str) -> list[Command]:
    """The commands of a seed document, in its order."""
    found = read_mapping(folder() / "predecessor.yaml")[seed]["commands"]
    return [Command(one["theirs"], one["ours"], one.get("published", {}), one.get("differs", "")) for one in found]


def rest(seed: str) -> list[tuple[str, str, str]]:
    """What else a seed document has: theirs, and the kind and name of ours."""
    found = read_mapping(folder() / "predecessor.yaml")[seed]["rest"]
    return [(one["theirs"], kind, one[kind]) for one in found for kind in KINDS if kind in one]


def tables(seed: str, rows: pd.DataFrame, source: Mapping[str, Any], platform: str) -> list[Table]:
    """A table of commands with published and measured times, and one of names."""
    known = commands(seed)
    by = _divided_by(known, rows)
    sizes = f"Hidden and intermediate sizes are divided by {by}, and sweeps are shorter." if by > 1 else ""
    lines = [_line(one, _cells(one, rows, by)) for one in known]
    timed = Group(f"measured ({platform})", ("our command", "cells", "median times", "in what they differ"))
    return [
        Table(
            "Their commands, and ours",
            (Group(f"published ({source['short']})", ("their command", "times")), timed),
            lines,
            f"Of several cells the shortest and the longest time. {sizes}".strip(),
        ),
        Table(
            "Their figures, metrics and rules, and ours",
            (Group("theirs", ("what",)), Group("ours", ("kind", "name"))),
            [list(line) for line in rest(seed)],
        ),
    ]


def _line(command: Command, rows: pd.DataFrame) -> list[str]:
    ok = rows[rows["status"] == "ok"]
    published = ", ".join(f"{name} {number(us, ' µs')}" for name, us in command.published.items())
    times = ", ".join(_range(name, own["median_us"]) for name, own in ok.groupby("implementation", sort=False))
    untimed = rows[~rows["implementation"].isin(ok["implementation"])].drop_duplicates("implementation")
    without = [f"{one['implementation']} {one['status']}: {one['reason']}" for one in untimed.to_dict("records")]
    said = "; ".join(filter(None, (times, *without)))
    return [
        command.theirs,
        published or ABSENT,
        command.ours,
        str(rows["cell"].nunique()),
        said or ABSENT,
        command.differs or ABSENT,
    ]


def _range(name: object, times: pd.Series) -> str:
    low, high = times.min(), times.max()
    return f"{name} {number(low, ' µs') if len(times) == 1 else f'{number(low)} to {number(high)} µs'}"


def _cells(command: Command, rows: pd.DataFrame, by: int) -> pd.DataFrame:
    """The rows of a command's cells at sizes that were divided by `by`; axes that it does not name have their default."""
    found = rows[rows["bench"] == command.bench]
    for name, values in command.axes.items():
        column = found[name] * by if name in _DIVIDED else found[name]
        found = found[column.isin([one for one in values if one is not None]) | (column.isna() & (None in values))]
    return found if "capacity_factor" in command.axes else found[found["capacity_factor"].isna()]


def _divided_by(known: Sequence[Command], rows: pd.DataFrame) -> int:
    """The least whole number that hidden sizes of all benches were divided by; 1 where no one number explains them."""
    common: set[int] | None = None
    for bench, own in rows.groupby("bench"):
        asked = {one for command in known if command.bench == bench for one in command.axes.get("hidden", ())}
        for hidden in own["hidden"].dropna().unique():
            fits = _quotients(asked, int(hidden))
            common = fits if common is None else common & fits
    return min(common) if common else 1


def _quotients(sizes: Iterable[int], by: int) -> set[int]:
    return {size // by for size in sizes if size % by == 0}
