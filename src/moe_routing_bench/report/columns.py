"""The columns of the report's table, in order, with what each means. `Column.of` names the row fields that it shows.

What the row is comes first, then its results, then what else tells rows apart: the first of them fit a screen of 1440 px.
"""

from dataclasses import dataclass

from moe_routing_bench.config.axes import AXES, Axis
from moe_routing_bench.store.records import about


@dataclass(frozen=True)
class Column:
    """A column of the table: one field is shown as it is, three as a value with its interval.

    `says` replaces what the schema says of its first field. `printed`: paper, which does not scroll, shows it too.
    `stem`: of a path the name without folder and ending is shown.
    """

    name: str
    of: tuple[str, ...] = ()
    says: str = ""
    printed: bool = False
    stem: bool = False

    @property
    def meaning(self) -> str:
        """What it means, for the legend."""
        return self.says or about()[self.fields[0]].text

    @property
    def fields(self) -> tuple[str, ...]:
        """The fields of the row schema that it shows."""
        return self.of or (self.name,)


def _meaning(axis: Axis) -> str:
    """What the table of axes says of it, and how a key spells it."""
    return about()[axis.name].text + (f" ({axis.prefix})" if axis.prefix else "")


_FIRST = ("model", "tokens", "trace")
_axis = {
    name: Column(name, says=_meaning(axis), printed=name in _FIRST, stem=name == "trace") for name, axis in AXES.items()
}
KEYS = 2  # columns that stay in sight while the others scroll
COLUMNS = (
    Column("bench", printed=True),
    Column("implementation", printed=True),
    *(_axis[name] for name in _FIRST),
    Column("median_us", ("median_us", "ci_low_us", "ci_high_us"), "median time of a call and its 95 % confidence interval, in µs: device time on a GPU, wall time on a CPU", printed=True),
    Column("best_verdict", says="faster, slower, same or undecided against the fastest other implementation of the cell, beyond noise; none: the run has too few twins to judge", printed=True),
    Column("best_other", printed=True),
    Column("best_speedup", ("best_speedup", "best_speedup_ci_low", "best_speedup_ci_high"), printed=True),
    Column("share_of_roofline", says="the least time that the bytes at copy bandwidth, or the FLOPs at the rate of a large matrix product, would take, over the median time", printed=True),
    Column("suspect_reason", says="what speaks against the row's absolute time, in words; none: nothing does", printed=True),
    Column("status", printed=True),
    *(column for name, column in _axis.items() if name not in _FIRST),
    Column("verdict"),
    Column("speedup", ("speedup", "speedup_ci_low", "speedup_ci_high")),
    Column("wall_median_us"),
    Column("gb_per_s"),
    Column("share_of_copy"),
    Column("share_of_stream"),
    Column("share_of_short_stream"),
    Column("tflops"),
    Column("noise_floor", says="by how much (the logarithm of the ratio) 97.5 % of the implementations that were entered twice in a cell differ from themselves at most, in this bench at such times; at least 0.005"),
    Column("drop_rate"),
    Column("load_cv"),
    Column("converged"),
)  # fmt: skip
