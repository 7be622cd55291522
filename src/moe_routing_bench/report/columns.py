"""The columns of the report's table, in order, with what each means. `Column.of` names the row fields that it shows."""

from dataclasses import dataclass

from moe_routing_bench.config.axes import AXES, Axis


@dataclass(frozen=True)
class Column:
    """A column of the table: one field is shown as it is, two as an interval, three as a value with its interval."""

    name: str
    meaning: str
    of: tuple[str, ...] = ()

    @property
    def fields(self) -> tuple[str, ...]:
        """The fields of the row schema that it shows."""
        return self.of or (self.name,)


def _meaning(axis: Axis) -> str:
    """What the table of axes says of it, and how a key spells it."""
    unit = f", in {axis.unit}" if axis.unit else ""
    return f"{axis.summary}{unit}" + (f" ({axis.prefix})" if axis.prefix else "")


COLUMNS = (
    Column("bench", "operation under test"),
    Column("implementation", "one way to do it"),
    *(Column(axis.name, _meaning(axis)) for axis in AXES.values()),
    Column("status", "ok, or why there is no time"),
    Column("median_us", "median time of a call in µs: device time on a GPU, wall time on a CPU"),
    Column("ci", "95 % confidence interval of the median time, in µs", ("ci_low_us", "ci_high_us")),
    Column("wall_median_us", "median wall time of a call in µs, with launches and waits of the host"),
    Column("gb_per_s", "compulsory bytes (each input read once, each output written once) over the median time"),
    Column("share_of_copy", "gb_per_s over the copy bandwidth measured in the same process (1 is as fast as a copy)"),
    Column("share_of_stream", "gb_per_s over the bandwidth of a long stream with the same mix of reads and writes"),
    Column("share_of_short_stream", "the same, of a stream that moves just as many bytes, its launch and ramp included"),
    Column("tflops", "floating-point operations over the median time, in TFLOP/s; a dash: the bench only moves data"),
    Column("speedup", "baseline time over this time, paired within rounds, with its 95 % interval", ("speedup", "speedup_ci_low", "speedup_ci_high")),
    Column("best_other", "the fastest other implementation of the cell"),
    Column("best_speedup", "time of the fastest other implementation over this time, likewise", ("best_speedup", "best_speedup_ci_low", "best_speedup_ci_high")),
    Column("drop_rate", "share of assignments over capacity, which are dropped"),
    Column("load_cv", "realised coefficient of variation of tokens per expert, before capacity"),
    Column("converged", "whether the interval became narrow enough before the time limit"),
    Column("suspect", "whether something, such as a drift of the ceilings, speaks against the row"),
)  # fmt: skip
