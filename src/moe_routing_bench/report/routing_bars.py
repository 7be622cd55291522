"""What our kernels of routing, of gate to combine in CuTe DSL, set out to reach on one H200. Pure functions; no torch."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial

import pandas as pd

from moe_routing_bench.comparison import ratios
from moe_routing_bench.comparison.ratios import Estimate
from moe_routing_bench.report.bars import (
    AT_MOST,
    MICROSECONDS,
    PERCENT,
    PERCENT_MORE,
    WITHIN,
    Bar,
    Cells,
    Figure,
    Level,
    Row,
    Values,
    against,
    fastest,
    own_figure,
    uneven,
)

_OURS = ("cute",)
_PLAIN = {"experts": 128, "top_k": 8}
_LARGE = {"tokens": 16384, "hidden": 2048, **_PLAIN}
_ROWS = {"tokens": 16384, "hidden": 2048, "top_k": 8}  # of any number of experts
_GATE = {"tokens": 16384, "dtype": "fp32", **_PLAIN}
_PERMUTE = {"tokens": 16384, **_PLAIN}
_DRAWN = dict.fromkeys(("sampler", "trace"))  # whatever these are: assignments that were recorded count, too
_FLOORS: Mapping[str, Values] = {"pack": _ROWS, "combine": _ROWS, "gate": _GATE, "permute": _PERMUTE}
_SHARE = {"pack": "share_of_stream", "combine": "share_of_stream", "gate": "share_of_copy", "permute": "share_of_copy"}
_TOGETHER = ("router", "permute")
_FINE = replace(PERCENT, digits=2)  # some shares are within a tenth of a percent of their bar


def _share(column: str, group: str, rows: Sequence[Row]) -> Figure | None:
    """A share of a ceiling, with that of a stream that is as short as the stage, which says what no kernel could gain."""
    found = own_figure(column, ratios.share, _OURS, rows)
    if found is None:
        return None
    own = found.rows[0]
    short = own["share_of_short_stream"]
    return replace(found, group=group and f"k={own[group]:g}", second=None if pd.isna(short) else short)


def _ours(bench: str, what: str, column: str, level: float, group: str, **bounds: tuple[float, float]) -> Bar:
    """A share of a ceiling in every cell of the default format and layout whose columns are within these bounds."""

    def among(rows: pd.DataFrame) -> pd.DataFrame:
        found = Cells(rows[rows["implementation"].isin(_OURS)]).of(_DRAWN)
        for name, (least, most) in bounds.items():
            found = found[found[name].between(least, most)]
        return found

    return Bar(
        f"{bench}, {what}",
        bench,
        partial(_share, column, group),
        Level(each=level),
        among=among,
        unit=_FINE,
        second="of a stream as short",
    )


def _over(bench: str, rival: str, name: str, level: Level) -> Bar:
    """The speed of cute over another implementation in every cell that both ran."""
    return Bar(
        f"{bench}: speed of cute over {name}",
        bench,
        partial(against, _OURS, rival.__eq__),
        level,
        among=lambda rows: rows[rows["implementation"].isin((*_OURS, rival))],
    )


def _time(what: str, bench: str, most_us: float, label: str, values: Values) -> Bar:
    """The time of one cell."""
    figure = partial(own_figure, "median_us", ratios.multiple, _OURS)
    return Bar(what, bench, figure, Level(each=most_us), cells={label: values}, side=AT_MOST, unit=MICROSECONDS)


def _together(rows: Sequence[Row]) -> Figure | None:
    """The time of gate and permute one after the other, as stages of routing; an interval of a stage is not stored."""
    own = fastest([row for row in rows if isinstance(row["stage_us"], list)], _OURS.__contains__)
    if own is None:
        return None
    stages = dict(own["stage_us"])
    return Figure(Estimate(sum(stages[name] for name in _TOGETHER), math.nan, math.nan), (own,), own["implementation"])


def _small(rows: pd.DataFrame) -> pd.DataFrame:
    found = Cells(rows[rows["implementation"].isin(_OURS)]).of(_PLAIN)
    return found[found["tokens"] <= 512]


def _routing(rows: Sequence[Row]) -> Figure | None:
    """The time of routing, and how many times as fast as torch it is."""
    found, speed = own_figure("median_us", ratios.multiple, _OURS, rows), against(_OURS, "torch".__eq__, rows)
    if found is None or speed is None:
        return found
    return replace(found, says=f"{found.says}, {speed.estimate.value:.2f}x torch")


def _over_torch(rows: Sequence[Row]) -> Figure | None:
    """How many times as fast as torch routing is, and its time."""
    found = against(_OURS, "torch".__eq__, rows)
    return found and replace(found, says=f"{found.says}; {found.rows[0]['median_us']:.1f} µs")


def _floors(rows: Sequence[Row]) -> Figure | None:
    """Routing over the sum of its floors: pack and combine at the rate of their stream, gate and permute at a copy's.

    A stage's floor is its time by its share of the ceiling, whose scatter is not known: the interval is that of routing.
    """
    whole, *parts = (
        next((row for row in rows if row["bench"] == bench and row["implementation"] in _OURS), None)
        for bench in ("routing", *_FLOORS)
    )
    found = [one for one in parts if one is not None]
    if whole is None or len(found) < len(parts):
        return None
    floor = sum(one["median_us"] * one[_SHARE[one["bench"]]] for one in found)
    if math.isnan(floor):
        return None
    ends = (whole[name] / floor for name in ("median_us", "ci_low_us", "ci_high_us"))
    return Figure(Estimate(*ends), (whole, *found), f"of {floor:.0f} µs")


BARS = (
    *(
        _ours(
            bench,
            "T ≥ 16384, H ≥ 2048: cute's share of the stream of its mix",
            "share_of_stream",
            level,
            "top_k",
            tokens=(16384, math.inf),
            hidden=(2048, math.inf),
        )
        for bench, level in (("pack", 0.95), ("combine", 0.96))
    ),
    *(
        _ours(bench, "16 to 64 MB: cute's share of a copy", "share_of_copy", 0.8, "", compulsory_bytes=(16e6, 64e6))
        for bench in ("pack", "combine")
    ),
    *(_over(bench, "triton", "triton", Level(1.0)) for bench in ("gate", "permute", "pack", "combine")),
    _time("gate, T=16384, E=128, k=8, fp32: time of cute", "gate", 8, "T=16384", _GATE),
    _over("gate", "quack", "QuACK", Level(each=1.0)),
    _time("permute, 131,072 assignments, E=128: time of cute", "permute", 12, "T=16384", _PERMUTE),
    Bar(
        "gate and permute, E=128, k=8, T ≤ 512: time of both as stages of routing",
        "routing",
        _together,
        Level(each=8),
        among=_small,
        side=AT_MOST,
        unit=MICROSECONDS,
    ),
    Bar(
        "routing, T=16384, H=2048, E=128, k=8: speed of cute over torch",
        "routing",
        _over_torch,
        Level(each=4.0),
        cells={"T=16384": _LARGE},
    ),
    Bar(
        "routing, T=16384, H=2048, E=128, k=8: time of cute over the sum of its floors",
        "routing",
        _floors,
        Level(each=1.12),
        cells={"T=16384": _LARGE},
        others=_FLOORS,
        side=AT_MOST,
    ),
    *(
        replace(
            _time(
                f"routing, T={tokens}, H=2048, E=128, k=8: time of cute",
                "routing",
                most_us,
                f"T={tokens}",
                _LARGE | {"tokens": tokens},
            ),
            figure=_routing,
        )
        for tokens, most_us in ((64, 20), (512, 28))
    ),
    Bar(
        "routing, T=16384, H=2048, E=128, k=8: time of cute with skewed loads over balanced, less 1",
        "routing",
        partial(uneven, _OURS),
        Level(each=1.1),
        cells={f"skew {skew:g}": _LARGE | {"skew": (0.0, skew)} for skew in (1.7, 3.7)},
        side=WITHIN,
        unit=PERCENT_MORE,
    ),
)
