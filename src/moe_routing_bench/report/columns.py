"""The columns of the report's table, in order, with what each means. `Column.of` names the row fields that it shows."""

from dataclasses import dataclass

from moe_routing_bench.config.axes import AXES, Axis
from moe_routing_bench.store.columns import about


@dataclass(frozen=True)
class Column:
    """A column of the table: one field is shown as it is, two as an interval, three as a value with its interval.

    `says` replaces what the schema says of its first field.
    """

    name: str
    of: tuple[str, ...] = ()
    says: str = ""

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
    unit = f", in {axis.unit}" if axis.unit else ""
    return f"{axis.summary}{unit}" + (f" ({axis.prefix})" if axis.prefix else "")


COLUMNS = (
    Column("bench"),
    Column("implementation"),
    *(Column(axis.name, says=_meaning(axis)) for axis in AXES.values()),
    Column("status"),
    Column("median_us"),
    Column("ci", ("ci_low_us", "ci_high_us"), "95 % confidence interval of the median time, in µs"),
    Column("wall_median_us"),
    Column("gb_per_s"),
    Column("share_of_copy"),
    Column("share_of_stream"),
    Column("share_of_short_stream"),
    Column("tflops"),
    Column("speedup", ("speedup", "speedup_ci_low", "speedup_ci_high")),
    Column("verdict"),
    Column("best_other"),
    Column("best_speedup", ("best_speedup", "best_speedup_ci_low", "best_speedup_ci_high")),
    Column("best_verdict"),
    Column("noise_floor"),
    Column("drop_rate"),
    Column("load_cv"),
    Column("converged"),
    Column("suspect"),
)
