"""Rows over stored states, on rows whose changes, cards and dates are planted; the command and the page that show their steps."""

import html
import re
import subprocess
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from rows import rows
from typer.testing import CliRunner

from moe_routing_bench.cli.compare import is_whole, timelines
from moe_routing_bench.cli.main import app
from moe_routing_bench.comparison import timeline
from moe_routing_bench.report import platform_charts, platform_pages, platform_sections
from moe_routing_bench.store import paths
from moe_routing_bench.store.parquet import write_table
from moe_routing_bench.store.records import SCHEMA
from moe_routing_kernels.errors import UserError

RUN = "nvidia-h200"
CELL = "T1024-0.0"


def state(day, factors=None, card="GPU-1", commit="a" * 40, seed=0):
    """Rows of `pack` on one day; `factors` are those of implementations' times."""
    rng = np.random.default_rng(seed)
    found = rows().query("status == 'ok' and bench == 'pack' and tokens == 1024 and skew == 0").reset_index(drop=True)
    times = found["median_us"] * [(factors or {}).get(name, 1.0) for name in found["implementation"]]
    medians = [list(us * np.exp(rng.normal(0, 0.001, 20))) for us in times]
    return found.assign(
        block_medians_us=medians,
        median_us=[float(np.median(one)) for one in medians],
        started_at=f"2026-11-{day}T06:55:00+00:00",
        gpu_uuid=card,
        git_sha=commit,
        platform=RUN,
    )


def line(found, name):
    (one,) = [line for line in found if line.implementation == name]
    return one


def test_each_measurement_counts_once_and_the_oldest_comes_first():
    """States repeat rows that were not measured again; order is that of dates, whatever the order of states."""
    old, new = state(21), state(23, seed=1)
    found = timeline.lines([("b", new), ("a", old), ("b", new)])
    assert {len(one.points) for one in found} == {2} and len(found) == len(old)
    assert [(point.run, point.started[8:10]) for point in found[0].points] == [("a", "21"), ("b", "23")]
    assert timeline.lines([("a", old), ("b", old)]) == [] and timeline.lines([]) == []
    marked = timeline.lines([("a", old), ("again", old.assign(suspect=True)), ("b", new)])
    assert {(one.points[0].run, one.points[0].row["suspect"]) for one in marked} == {("again", True)}, "as it is today"
    undated = new.assign(started_at=None)
    assert timeline.lines([("a", old), ("b", undated)]) == [], "what has no date has no place"
    lost = new.assign(status="crashed")
    assert timeline.lines([("a", old), ("b", lost)]) == []


def test_steps_are_beyond_noise():
    """By the rule of `compare`: 1.5x is a step, equals are none; the ratio is above 1 where the row is faster now."""
    found = timeline.lines(
        [("a", state(21, {"cute": 1.5})), ("b", state(22, seed=1)), ("c", state(23, {"triton": 1.2}, seed=2))]
    )
    cute, triton = line(found, "cute"), line(found, "triton")
    assert [point.verdict for point in cute.points] == ["", "faster", "same"]
    assert [point.verdict for point in triton.points] == ["", "same", "slower"]
    assert cute.points[1].ratio == pytest.approx(1.5, rel=0.01) and np.isnan(cute.points[0].ratio)
    assert cute.points[1].ratio_low < cute.points[1].ratio < cute.points[1].ratio_high
    steps = timeline.steps(found)
    assert [(one.line.implementation, one.after.started[8:10]) for one in steps] == [("triton", "23"), ("cute", "22")]
    assert steps[1].before.us == pytest.approx(1.5 * steps[1].after.us, rel=0.01)


def test_a_drift_of_the_ceilings_is_no_step():
    """Copies are slower by as much on that day."""
    slow = state(22, {"cute": 1.1}, seed=1).assign(copy_gb_per_s=4000 / 1.12)
    assert timeline.steps(timeline.lines([("a", state(21)), ("b", slow)])) == []
    same = state(22, {"cute": 1.1}, seed=1)
    assert [one.line.implementation for one in timeline.steps(timeline.lines([("a", state(21)), ("b", same)]))] == [
        "cute"
    ]


def test_another_card_is_marked_and_shown_with_what_others_did():
    """Ours is 1.3 times as fast, and so is what others wrote: the card, not the code. A row of others is not compared with itself."""
    names = set(state(21)["implementation"])
    moved = state(22, dict.fromkeys(names, 1 / 1.3), card="GPU-2", seed=1)
    steps = timeline.steps(timeline.lines([("a", state(21)), ("b", moved)]))
    assert len(steps) == len(names) and all(one.after.moved for one in steps)
    foreign = names - {"cute", "triton", "auto", "ops"}
    by_name = {one.line.implementation: one for one in steps}
    assert by_name["cute"].others == pytest.approx(1.3, rel=0.01)
    torch = by_name["torch"]
    assert by_name["cute"].count == torch.count + 1 and torch.count < len(foreign)
    same = timeline.steps(timeline.lines([("a", state(21, {"cute": 1.3})), ("b", state(22, seed=1))]))
    assert not same[0].after.moved and same[0].others == pytest.approx(1, rel=0.01)
    unknown = state(22, seed=1).assign(gpu_uuid=None)
    assert timeline.steps(timeline.lines([("a", state(21, {"cute": 1.3})), ("b", unknown)]))[0].after.moved


def test_a_row_twice_in_a_state_is_refused():
    with pytest.raises(UserError, match="twice"):
        timeline.lines([("a", state(21).iloc[[0, 0]].reset_index(drop=True))])


def test_a_figure_over_days():
    """Ours and at most five others, relative to the first time, with the steps of ours as numbers."""
    found = timeline.lines([("a", state(21, {"cute": 2.0})), ("b", state(23, seed=1))])
    drawn = platform_sections.over_time(found)
    names = [one["name"] for one in drawn["legend"]]
    assert names[0] == platform_charts.OURS and 1 < len(names) <= platform_charts.MOST_SERIES
    assert drawn["reference"] == 1 and drawn["level"] and drawn["x"]["label"] == "days since 2026-11-21"
    assert platform_sections.over_time([]) is None
    cute = line(found, "cute")
    last = platform_sections._then("a panel", "ours", cute, cute.points[-1], cute.points[0].started)
    assert last["y"] == pytest.approx(2, rel=0.01) and last["low"] < last["y"] < last["high"], "of speeds, not of times"


def test_a_history_without_ours_has_no_panel():
    """However long it is: the page shows ours among others."""
    found = timeline.lines([("a", state(21, {"cute": 2.0})), ("b", state(23, seed=1))])
    foreign = [one for one in found if not timeline.is_ours(one)]
    assert foreign and timeline.longest(foreign, 9) == {}
    assert list(timeline.longest(found, 9)) == [f"pack, {found[0].cell}"]
    key = "olmoe-decode-T64-H2048-cfnone-skew0-exact-softmax_topk-bf16-compact-seed17"
    titled = timeline.longest([replace(one, cell=key) for one in found], 9)
    assert list(titled) == ["pack, olmoe-decode T64-H2048-softmax_topk-bf16"], "a title without what is usual in keys"


def repository(folder, *states):
    """A repository with a commit per state of a published run."""
    path = folder / paths.measurements(RUN)
    path.parent.mkdir(parents=True)
    path.with_name("manifest.yaml").write_text("tables: {}\n")
    git = ["git", "-C", str(folder), "-c", "user.name=a", "-c", "user.email=a@b.c"]
    subprocess.run([*git, "init", "-q"], check=True)
    for table in states:
        write_table(path, pa.Table.from_pandas(table, SCHEMA, preserve_index=False))
        subprocess.run([*git, "add", "results"], check=True)
        subprocess.run([*git, "commit", "-qm", "rows"], check=True)


def test_the_command_reads_what_git_keeps(tmp_path, monkeypatch):
    """Two commits of one run, of which only the last is in its folder; the step and its reason are printed."""
    repository(tmp_path, state(21, {"cute": 1.5}), state(22, card="GPU-2", seed=1))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "300")
    assert is_whole() and [point.verdict for point in line(timelines([RUN]), "cute").points] == ["", "faster"]
    done = CliRunner().invoke(app, ["history"])
    assert done.exit_code == 0 and re.search(r"2026-11-22 +pack +cute .* 1\.\d+x .* another", done.stdout)
    assert "1 step beyond noise, 1 faster and 0 slower" in done.stdout and "may be due to the card" in done.stdout
    assert "cute" not in CliRunner().invoke(app, ["history", "--most", "0"]).stdout.splitlines()[1]


def test_outside_a_repository_only_stored_rows_count(tmp_path, monkeypatch):
    repository(tmp_path, state(21, {"cute": 1.5}), state(22, seed=1))
    subprocess.run(["rm", "-rf", str(tmp_path / ".git")], check=True)
    monkeypatch.chdir(tmp_path)
    assert not is_whole() and timelines([RUN]) == []
    done = CliRunner().invoke(app, ["history"])
    assert done.exit_code == 0 and "No row was measured more than once" in done.stdout and "not here" in done.stdout


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--platform", "nvidia-h2000"], "--platform: got 'nvidia-h2000'"),
        (["--html", "a.html"], "runs: got 'none'"),
        (["a.parquet", "b.parquet"], "--html: got 'nothing'"),
        (["a.parquet", "--html", "a.html"], "two or more, each once"),
    ],
)
def test_bad_words(words, said, tmp_path, monkeypatch):
    repository(tmp_path, state(21))
    monkeypatch.chdir(tmp_path)
    found = CliRunner().invoke(app, ["history", *words])
    assert isinstance(found.exception, UserError) and said in str(found.exception)


def test_the_page_lists_the_latest_steps(tmp_path, monkeypatch):
    """All of the texts that the terminal has; no more than the page has room for; what is missing is said."""
    found = timeline.lines([("a", state(21, {"cute": 1.5, "triton": 1.3})), ("b", state(22, card="GPU-2", seed=1))])
    steps = timeline.steps(found)
    monkeypatch.setattr(timeline, "MOST_STEPS", 1)
    shared = {"heading": "h", "title": "t", "about": "", "tabs": [("History", "history.html")], "root": "../"}
    out = Path(tmp_path / "history.html")
    platform_pages._write_history(found, False, out, shared)
    text = html.unescape(out.read_text())
    cells = re.findall("<td[^>]*>(.*?)</td>", text)
    assert cells == timeline.step(steps[0]) and len(steps) == 2
    assert "The 1 latest of 2." in text and "the git history is not here or not whole" in text
    platform_pages._write_history([], True, out, shared)
    text = out.read_text()
    assert "No row was measured more than once" in text and "<table" not in text and 'class="chart"' not in text
