"""Pages on several runs: the same cells on two platforms, two runs of one grid, and the rows of a run over earlier ones. No torch."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import pandas as pd

from moe_routing_bench.comparison import origins, runs
from moe_routing_bench.comparison.runs import ONLY_AFTER, ONLY_BEFORE, Comparison, History
from moe_routing_bench.comparison.verdicts import FASTER, SAME, UNDECIDED
from moe_routing_bench.figures import footer, row_groups
from moe_routing_bench.quantities import count, times, us
from moe_routing_bench.report import page
from moe_routing_bench.report.document import Dot
from moe_routing_bench.report.row_data import row_id

CEILINGS = ("copy_gb_per_s", "read_gb_per_s", "write_gb_per_s", "peak_tflops", "launch_us", "graph_node_us")
MACHINE = (
    "gpu_name",
    "power_limit_w",
    "driver",
    "cuda_version",
    "torch_version",
    "triton_version",
    "cutlass_dsl_version",
    "git_sha",
)
_ROW = ["bench", "cell", "implementation"]
_OF_EACH = ["median_us", "ci_low_us", "ci_high_us", "roofline_us", "share_of_roofline", "best_verdict", "suspect"]


def pairs(tables: Mapping[str, pd.DataFrame]) -> list[tuple[str, str]]:
    """The folders of results of two platforms with a GPU and the same run, where both measured some row; in the order of `tables`."""
    names = [name for name, table in tables.items() if origins.column(table) == origins.GPU]
    return [
        (one, other)
        for i, one in enumerate(names)
        for other in names[i + 1 :]
        if one.partition(".")[0] != other.partition(".")[0]
        and one.partition(".")[2] == other.partition(".")[2]
        and len(_timed(tables[one]).merge(_timed(tables[other]), on=_ROW))
    ]


def write(names: tuple[str, str], tables: tuple[pd.DataFrame, pd.DataFrame], out: Path) -> None:
    """A page on two such folders, next to the folders of their reports."""
    found = rows(*tables)
    best = cells(found)
    page.write(
        "versus.html.j2",
        out,
        names=names,
        machines=machines(*tables),
        ceilings=ceilings(*tables),
        agreed=agreed(best),
        times=times,
        pictures=[
            (bench, drawn) for bench in row_groups.benches(best) for drawn in [_picture(best, bench, names[1])] if drawn
        ],
        cells=best.to_dict("records"),
        rows=[one | {"id": row_id(one)} for one in found.to_dict("records")],
    )


def agreement(best: pd.DataFrame) -> tuple[pd.Series, pd.Series]:
    """For each of `cells`: whether the same implementation has the lowest median on both, and whether both runs tell theirs from the best other."""
    return best["one"] == best["other"], best["one_told"] & best["other_told"]


def agreed(best: pd.DataFrame) -> str:
    """In how many cells both runs tell the same implementation from the best other, in how many different ones, and in how many one tells none."""
    same, told = agreement(best)
    parts = [
        f"In {int((told & same).sum())} of {count(len(best), 'cell')} both runs tell the same implementation from the best other as the fastest"
    ]
    parts += [f"in {int((told & ~same).sum())} they tell different ones"] if (told & ~same).any() else []
    parts += [f"in {int((~told).sum())} at least one of them tells none (≈)"] if not told.all() else []
    return f"{'; '.join(parts)}."


def _timed(table: pd.DataFrame) -> pd.DataFrame:
    """The rows that have a time, with what the page shows of each."""
    return row_groups.ok(table)[_ROW + _OF_EACH]


def rows(one: pd.DataFrame, other: pd.DataFrame) -> pd.DataFrame:
    """The rows that both measured: what each has, with suffixes _one and _other, `ratio` (above 1: `other` is faster) with its interval,
    `ceiling`, which is the same ratio of their rooflines, `doubt` where one of the two is suspect, and `label`, the cell in few letters."""
    judged = runs.compare(one[list(runs.COLUMNS)], other[list(runs.COLUMNS)], across=True).rows
    both = _timed(one).merge(_timed(other), on=_ROW, suffixes=("_one", "_other"))
    found = both.merge(judged[[*_ROW, "ratio", "ratio_ci_low", "ratio_ci_high"]], on=_ROW)
    labels = dict(zip(one["cell"], row_groups.labels(one), strict=True))
    numbers = {name: found[name].astype(float) for name in ("ratio", "ratio_ci_low", "ratio_ci_high")}
    doubt = (found["suspect_one"] == True) | (found["suspect_other"] == True)  # noqa: E712
    return found.assign(
        **numbers,
        label=found["cell"].map(labels),
        ceiling=found["roofline_us_one"] / found["roofline_us_other"],
        doubt=doubt,
    )


def cells(found: pd.DataFrame) -> pd.DataFrame:
    """The fastest implementation of each cell on either platform among those that both measured, whether it is told from the next by the stored
    verdict of its run, its time, and the ratio of both times, as wide as their intervals make it."""
    records = []
    for (bench, cell), group in found.groupby(["bench", "cell"], sort=False):
        one, other = (group.loc[group[f"median_us_{side}"].idxmin()] for side in ("one", "other"))
        records.append(
            {
                "bench": bench,
                "cell": cell,
                "label": one["label"],
                "doubt": bool(one["doubt"] or other["doubt"]),
                "one": one["implementation"],
                "other": other["implementation"],
                "one_us": one["median_us_one"],
                "other_us": other["median_us_other"],
                "one_told": one["best_verdict_one"] == FASTER,
                "other_told": other["best_verdict_other"] == FASTER,
                "ratio": one["median_us_one"] / other["median_us_other"],
                "low": one["ci_low_us_one"] / other["ci_high_us_other"],
                "high": one["ci_high_us_one"] / other["ci_low_us_other"],
            }
        )
    return pd.DataFrame(records)


def machines(one: pd.DataFrame, other: pd.DataFrame) -> list[tuple[str, str, str]]:
    """Name and value on either platform of what is known of the machines."""
    shown = [table[list(MACHINE)].assign(git_sha=table["git_sha"].astype("string").str[:7]) for table in (one, other)]
    return [(name, *(footer.distinct(table[name]) for table in shown)) for name in MACHINE]


def ceilings(one: pd.DataFrame, other: pd.DataFrame) -> list[tuple[str, float, float, float]]:
    """Name, median on either platform and ratio (other over one) of every ceiling that both measured."""
    known = [(name, one[name].median(), other[name].median()) for name in CEILINGS]
    return [(name, a, b, b / a) for name, a, b in known if pd.notna(a) and pd.notna(b)]


def _picture(best: pd.DataFrame, bench: str, name: str) -> str:
    """The ratios of a bench's cells, largest first; empty of fewer than two."""
    mine = best[best["bench"] == bench].sort_values("ratio", ascending=False)
    dots = [Dot(row["label"], row["ratio"], row["low"], row["high"]) for _, row in mine.iterrows()]
    return page.picture(dots, f"times as fast on {name}", "x", 1.0)


_LATER = {SAME: 1, UNDECIDED: 1, ONLY_BEFORE: 2, ONLY_AFTER: 2}
_RATIO = ("ratio", "ratio_ci_low", "ratio_ci_high")
_HOLLOW = ("same", UNDECIDED)


def write_changes(found: Comparison, names: tuple[str, str], out: Path) -> None:
    """Write a comparison to `out`, what is told to have changed most first; `names` are those of the two runs."""
    rows = found.changed()
    rows = rows.iloc[rows["verdict"].map(_LATER).fillna(0).argsort(kind="stable")]
    page.write(
        "changes.html.j2",
        out,
        names=names,
        marks=found.marks,
        across=found.across,
        counts=list(found.counts().items()),
        rows=[_change(row) for row in rows.to_dict("records")],
    )


def _change(row: dict) -> dict[str, str]:
    """The texts of a row; a missing number is a dash."""
    known = {name: us(row[name], exact=True) if pd.notna(row[name]) else "–" for name in ("before_us", "after_us")}
    ratio = times(*(float(row[name]) for name in _RATIO)) if pd.notna(row["ratio"]) else "–"
    reason = row["reason"] if isinstance(row["reason"], str) else ""
    named = {name: str(row[name]) for name in ("bench", "implementation", "cell", "verdict")}
    return named | known | {"ratio": ratio, "reason": reason}


def write_history(rows: Sequence[History], earlier: Sequence[str], last: str, out: Path) -> None:
    """Write them to `out`; those that changed in some run come first, the largest change before the others. `earlier` and `last` name the runs."""
    ordered = sorted(
        rows, key=lambda one: -max((abs(then.ratio - 1) for then in one.then if then.verdict not in _HOLLOW), default=0)
    )
    changed = sum(any(then.verdict not in _HOLLOW for then in one.then) for one in rows)
    lines = [(one, {then.run: then for then in one.then}, _past(one)) for one in ordered]
    page.write("histories.html.j2", out, times=times, us=us, lines=lines, earlier=earlier, last=last, changed=changed)


def _past(one: History) -> str:
    """The ratios, oldest first; hollow where the change is not told."""
    dots = [
        Dot(
            then.run,
            then.ratio,
            then.low,
            then.high,
            hollow=then.verdict in _HOLLOW,
            chosen=then.verdict not in _HOLLOW,
        )
        for then in one.then
    ]
    return page.picture(dots, "times as fast now", "x", 1.0)
