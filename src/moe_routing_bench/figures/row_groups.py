"""How rows are grouped, labelled and compared: all of it follows from the table of axes and from what benches declare.

An axis that is added later is in every grouping by itself, and a median over it is said to be one.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import pandas as pd

from moe_routing_bench.benches.registry import BENCHES
from moe_routing_bench.comparison import origins
from moe_routing_bench.config.axes import AXES, PRESET, Axis
from moe_routing_bench.figures.chart import MOST_SERIES, NOT_CAUSAL, Chart
from moe_routing_bench.grid.run_spec import DENSE
from moe_routing_kernels.formats.weights import WEIGHTS

COMPOSITES = tuple(name for name, bench in BENCHES.items() if bench.stages)


def benches(rows: pd.DataFrame) -> list[str]:
    """The benches of rows in the order of the report; those of other benchmarks last."""
    there = set(rows["bench"])
    return [name for name in BENCHES if name in there] + sorted(there - set(BENCHES))


def reading(axis: str) -> tuple[str, ...]:
    """The benches that read an axis, in the order of the report."""
    return tuple(name for name, bench in BENCHES.items() if axis in bench.axes)


def moving(table: pd.DataFrame) -> tuple[str, ...]:
    """The benches among the rows that only move data: none of their rows has a floating-point operation."""
    computing = set(table.loc[table["flops"] > 0, "bench"])
    return tuple(name for name in benches(table) if name not in computing)


def composed(rows: pd.DataFrame) -> pd.DataFrame:
    """The rows of composites: of those with experts, if any was measured, else of those without."""
    result = rows[rows["bench"].isin(COMPOSITES)]
    return result[result["flops"] > 0] if (result["flops"] > 0).any() else result


def card(rows: pd.DataFrame) -> pd.Series:
    """What each row was measured on: the UUID of its GPU, or without one its host."""
    return rows["gpu_uuid"].astype(object).fillna("host " + rows["host"].fillna("unknown").astype(str))


def joined(rows: pd.DataFrame, by: Sequence[str]) -> pd.Series:
    """What a line over tokens joins the rows of: the GPUs of one name, or the card, where cards measured the same tokens of a line. Lines differ
    in `by`."""
    cards, lines = card(rows), [rows[name] for name in by]
    counts = cards.groupby([*lines, rows["tokens"]], dropna=False).transform("nunique")
    several = counts.groupby(lines, dropna=False).transform("max") > 1
    return cards.where(several | rows["gpu_name"].isna(), rows["gpu_name"])


def pooled(rows: pd.DataFrame, by: Sequence[str] = (), but: Iterable[str] = ()) -> list[str]:
    """The axes, in the order of their table and without `but`, that have several values among rows that agree in `by`."""
    if rows.empty:
        return []
    left_out = {*by, *but}
    result = {name: pd.factorize(_own(rows, name), use_na_sentinel=False) for name in AXES if name not in left_out}
    if not by:
        return [name for name, (_, values) in result.items() if len(values) > 1]
    codes = pd.DataFrame({name: numbers for name, (numbers, _) in result.items()}, index=rows.index)
    counts = codes.groupby([rows[name] for name in by], dropna=False).nunique().max()
    return [str(name) for name in counts.index[counts > 1]]


def words(names: Sequence[str]) -> str:
    """Names of axes in a sentence: ``tokens, top k and dtype``."""
    plain = [name.replace("_", " ") for name in names]
    return " and ".join([", ".join(plain[:-1]), plain[-1]] if len(plain) > 1 else plain)


def differing(rows: pd.DataFrame, noun: str, by: Sequence[str] = (), but: Iterable[str] = ()) -> str:
    """``cells that differ in tokens and dtype``, or only the noun where rows that agree in `by` differ in nothing."""
    names = pooled(rows, by, but)
    return f"{noun} that differ in {words(names)}" if names else noun


def labels(rows: pd.DataFrame, but: Iterable[str] = ()) -> pd.Series:
    """A text for each row that has every value of an axis that is not its default, in the spelling of keys, without `but`.

    What a model sets is left out where its rows agree in it. Rows that differ in an axis have different labels.
    """
    texts_of = {name: _said(AXES[name], _own(rows, name)) for name in AXES if name not in set(but)}
    texts_of = {name: texts for name, texts in texts_of.items() if texts}
    others = set(AXES) - set(PRESET)
    implied = {model: set(PRESET) - set(pooled(group, but=others)) for model, group in rows.groupby("model")}
    models = rows["model"].astype(object).where(rows["model"].notna(), None).tolist()
    shown = {
        model: [texts for name, texts in texts_of.items() if name not in implied.get(model, ())]
        for model in set(models)
    }
    texts = [" ".join([text for value in shown[model] if (text := value[i])]) for i, model in enumerate(models)]
    return pd.Series(texts, index=rows.index, dtype=object)


def _said(axis: Axis, values: pd.Series) -> list[str]:
    """What each row has of an axis, in the spelling of keys; nothing where it is missing or the default, and an empty list where it is in all rows."""
    places, distinct = pd.factorize(values)
    texts = ["" if value == axis.default else axis.text(axis.kind(value)) for value in distinct]
    if not any(texts):
        return []
    texts.append("")  # of a missing value, whose place is -1
    return [texts[place] for place in places.tolist()]


def _own(rows: pd.DataFrame, name: str) -> pd.Series:
    """The values of an axis; none where they only follow another axis."""
    follows = AXES[name].follows
    return rows[name].mask(rows[name] == rows[follows]) if follows else rows[name]


def shown_of(shown: pd.DataFrame, rows: pd.DataFrame) -> str:
    """How many of the cells of `rows` are `shown`, where not all are, and why those of one cell have several labels, where they do."""
    kept, cells = (table.groupby("bench")["cell"].nunique().sum() for table in (shown, rows))
    apart = words(pooled(shown, ["bench", "cell"]))
    counted = f"{kept} of {cells} cells" if kept < cells else ""
    return "; ".join(
        filter(None, (counted, f"rows of one cell that differ in {apart} have lines of their own" if apart else ""))
    )


def shape(rows: pd.DataFrame, names: Sequence[str]) -> pd.Series:
    """The values of some axes of each row as a text, such as ``T4096 H2048 E64 k8``; a missing value is left out."""
    return labels(rows.assign(model=None), but=set(AXES) - set(names))


def ok(table: pd.DataFrame, *benches: str) -> pd.DataFrame:
    """Rows that were measured, of the given benches (all when none is named)."""
    good = (table["status"] == "ok") & table["median_us"].notna()
    return table[good & table["bench"].isin(benches)] if benches else table[good]


def why(table: pd.DataFrame, *benches: str) -> str:
    """Why no row of these benches can be drawn."""
    asked = table[table["bench"].isin(benches)] if benches else table
    what = "/".join(benches) or "measured"
    if asked.empty:
        return f"no {what} row was asked for"
    bad = asked.loc[asked["status"] != "ok", "status"].value_counts()
    if bad.empty:
        return f"no {what} row has the values that this panel shows"
    counts = ", ".join(f"{n} {status}" for status, n in bad.items())
    return f"{len(asked) - bad.sum()} of {len(asked)} {what} rows ok\n({counts})"


_NAMES = ("bench", "cell", "implementation", "suspect", "converged", "cold", "gpu_name")  # what `chart.row` reads


def records(rows: pd.DataFrame, names: Iterable[str]) -> Iterator[dict[str, Any]]:
    """Rows as mappings with their index, some columns, and those that name a row and speak against its time; `iterrows` takes fifty times as long."""
    columns = {name: rows[name].tolist() for name in (*_NAMES, *names) if name in rows}
    for index, *values in zip(rows.index, *columns.values(), strict=True):
        yield {"index": index, **dict(zip(columns, values, strict=True))}


def front(points: pd.DataFrame, x: str, y: str) -> pd.DataFrame:
    """The points that no other one beats in both columns (less is better), by rising x."""
    rising = points.sort_values([x, y])
    return rising[rising[y] < rising[y].cummin().shift(fill_value=float("inf"))]


def stages(value: Any) -> dict[str, float]:
    """A row's stage_us as a dict: Arrow maps arrive as pairs or dicts; missing is empty."""
    if value is None or isinstance(value, float):
        return {}
    return {name: time for name, time in dict(value).items() if time is not None and time == time}


_LEAST_OWN = 2  # series of ours, where others would take all places


def preferred(chart: Chart) -> list[str]:
    """The series of a chart, those to keep first: of implementations ours and the others that are fastest most often, of formats one of each
    kind, of rules those of a front, the dense model and those of best quality, of all else those with most marks."""
    names, shown = list(chart.colors), chart.shown
    known = set(shown["implementation"]) if "implementation" in shown else set()
    if len(known & set(names)) >= len(names) - 1 > 0:
        lines = [name for name in names if name not in known]  # such as a roof
        return [*lines, *_fastest(shown, MOST_SERIES - len(lines))]
    who = shown.get("contestant", shown.get("router", pd.Series(dtype=str))).astype(str).str.removesuffix(NOT_CAUSAL)
    if "bits_per_byte" in shown and set(who) & {name.removesuffix(NOT_CAUSAL) for name in names}:
        bits = shown["bits_per_byte"]
        if "label" in shown:  # entries differ in sizes, and not all have all rules
            bits = bits - bits.groupby(shown["label"]).transform("median")
        means = bits.groupby(who).mean()
        fronts = set(chart.marks.loc[chart.marks["join"].notna(), "series"]) if chart.kind == "points" else set()
        return sorted(names, key=lambda name: (name not in fronts, _quality(name.removesuffix(NOT_CAUSAL), means)))
    if any(name in WEIGHTS for name in names):
        return sorted(names, key=lambda name: name in WEIGHTS and WEIGHTS[name].zero_points)
    counts = chart.marks["series"].value_counts()
    return sorted(names, key=lambda name: -counts.get(name, 0))


def _quality(name: str, means: pd.Series) -> tuple[int, float]:
    """What is no rule first, such as the best rate; then the dense model, then rules by their bits."""
    return (0, 0.0) if name not in means else (1, 0.0) if name == DENSE else (2, float(means[name]))


def _fastest(rows: pd.DataFrame, most: int) -> list[str]:
    """Implementations, ours and others, by how often they are the fastest of their side in a cell of these rows, then by how many cells they have."""
    first: tuple[Counter[str], Counter[str]] = Counter(), Counter()
    there: tuple[Counter[str], Counter[str]] = Counter(), Counter()
    cells: dict[tuple[str, str], dict[str, None]] = {}  # of each its implementations, the fastest first
    columns = rows[["bench", "cell", "implementation", "median_us"]].sort_values("median_us", kind="stable")
    for bench, cell, name, _ in columns.itertuples(index=False, name=None):
        cells.setdefault((bench, cell), {})[name] = None
    for (bench, _), names in cells.items():
        mine = origins.ours(bench) if bench in BENCHES else frozenset()
        for which in (0, 1):
            some = [name for name in names if (name in mine) == (which == 0)]
            there[which].update(some)
            first[which].update(some[:1])
    own, others = (
        sorted(there[which], key=lambda name, which=which: (-first[which][name], -there[which][name], name))
        for which in (0, 1)
    )
    winners = {next(iter(names)) for names in cells.values()}
    own.sort(key=lambda name: name not in winners)  # stable: the fastest of all in a cell come first
    places = max(_LEAST_OWN, most - len(others), min(len(winners & set(own)), most - 1))
    return list(dict.fromkeys([*own[:places], *others, *own]))
