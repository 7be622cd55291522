"""Figures show which times are suspect, did not converge, or may be of a warm cache: on paper and as data for the page."""

from dataclasses import replace

import pandas as pd
import pytest
from matplotlib.colors import to_hex
from rows import rows, some

from browser import asked
from moe_routing_bench.figures import FIGURES, paper
from moe_routing_bench.figures.chart import DOUBTFUL, WARM, legend_of_doubts, look
from moe_routing_bench.report import script_data
from moe_routing_bench.report.render import render

TABLE = some(rows()).query("status == 'ok'").assign(cold=True, converged=True, suspect=False)


@pytest.fixture(scope="module")
def timed() -> list[str]:
    """Names of the figures with marks of times."""
    return [
        name
        for name, entry in FIGURES.items()
        if entry.source == "measurements" and (chart := entry.chart(TABLE)).timed and chart.marks["bench"].notna().any()
    ]


@pytest.mark.parametrize(
    ("columns", "kind", "text"),
    [
        ({}, "", None),
        ({"suspect": True}, DOUBTFUL, "suspect"),
        ({"converged": False}, DOUBTFUL, "not converged"),
        ({"cold": False}, WARM, "L2 may be warm"),
        ({"cold": False, "suspect": True}, DOUBTFUL, "suspect, L2 may be warm"),
    ],
)
def test_a_mark_of_a_time_says_what_speaks_against_it(
    timed: list[str], columns: dict, kind: str, text: str | None
) -> None:
    assert len(timed) >= 7
    for name in timed:
        chart = FIGURES[name].chart(TABLE.assign(**columns))
        of_rows = chart.marks[chart.marks["bench"].notna()]
        assert len(of_rows) and {look(chart, doubt) for doubt in of_rows["doubt"]} == {kind}, name
        assert set(of_rows["doubt"].dropna()) == ({text} if text else set()), name
        assert (f"{len(of_rows)} marks" in legend_of_doubts(chart)) == bool(text), name
        assert ("doubt" in script_data.chart_data(chart)["marks"]) == bool(text), name


def test_one_mark_is_one(timed: list[str]) -> None:
    chart = FIGURES[timed[0]].chart(TABLE)
    doubts = [None] * len(chart.marks)
    doubts[int(chart.marks["bench"].notna().to_numpy().argmax())] = "suspect"
    assert legend_of_doubts(replace(chart, marks=chart.marks.assign(doubt=doubts))).endswith(" (1 mark)")


def test_medians_over_cells_count_their_doubtful_rows() -> None:
    doubted = TABLE.assign(suspect=TABLE["bench"] == "gate")
    chart = FIGURES["speedup"].chart(doubted)
    assert f"{chart.shown['suspect'].sum()} of {len(chart.shown)} rows suspect" in chart.note
    assert "suspect" not in FIGURES["speedup"].chart(TABLE).note


def test_loads_are_not_doubted_with_the_times() -> None:
    """What was drawn is as sure as ever."""
    chart = FIGURES["load_cv"].chart(TABLE.assign(suspect=True))
    assert len(chart.marks) and not legend_of_doubts(chart)


def points(table: pd.DataFrame) -> list[tuple[str, float]]:
    """Face colour and size of the points of a figure on paper."""
    (axes, *_) = paper.draw(FIGURES["decode"], table).axes
    return [
        (to_hex(line.get_markerfacecolor()), line.get_markersize())
        for line in axes.lines
        if len(line.get_xdata()) and line.get_marker() not in ("", "None")
    ]


def test_doubtful_points_are_hollow_on_paper_and_warm_ones_small() -> None:
    few = TABLE.query("bench == 'gate' and skew == 0 and tokens == 1024").assign(tokens=64)
    plain, hollow, small = (points(few.assign(**columns)) for columns in ({}, {"suspect": True}, {"cold": False}))
    assert len(plain) == len(hollow) == len(small) > 1
    assert all(face != "#ffffff" for face, _ in plain + small) and all(face == "#ffffff" for face, _ in hollow)
    assert max(size for _, size in small) < min(size for _, size in plain)


@pytest.mark.slow
def test_doubtful_points_are_hollow_on_the_page(tmp_path) -> None:
    few = TABLE.query("bench == 'gate' and skew == 0 and tokens == 1024").assign(tokens=64)
    few["suspect"] = few["implementation"] == "cute"
    render(few, {"decode": tmp_path / "decode.svg"}, tmp_path / "index.html")
    fills = asked(
        tmp_path / "index.html",
        """Object.keys(charts).forEach(drawChart);
        return [...document.querySelectorAll("#chart-decode .panels path")].map(one => one.getAttribute("fill")).filter(Boolean);""",
    )
    assert sum(fill == "var(--page)" for fill in fills) == 1, fills
