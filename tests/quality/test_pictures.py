"""Figures and report of training runs: drawn from runs that were really trained, and looked at in a real browser."""

import base64
import gzip
import html
import importlib
import math
import re
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from matplotlib.collections import LineCollection
from matplotlib.text import Text
from scipy import stats

from browser import opened
from drawn import draw
from moe_routing_bench.cli import report as cli
from moe_routing_bench.figures import (
    FIGURES,
    capacity,
    expert_domains,
    paper,
    training_lines,
    training_points,
    training_rows,
)
from moe_routing_bench.figures.chart import Chart, Scale, marks
from moe_routing_bench.quality import adaptation_rows, compare, plan, run_rows, train
from moe_routing_bench.report import trained_rules
from moe_routing_bench.report.render import render
from moe_routing_bench.store import paths, records
from moe_routing_bench.store.parquet import write_table
from moe_routing_kernels.errors import UserError
from moe_routing_kernels.routers.zoo import ZOO

pytestmark = pytest.mark.slow

NAMES = [name for name, figure in FIGURES.items() if figure.source == "quality"]
OF_SOME = ("networks", "train_modes")  # drawn of the entries that vary these
DRAWN = set(NAMES)  # by the page
CAUSAL = ("loss_seconds", "capacity_bits")  # drawn of rules whose loss means the same
SIZES = {
    "experts": 4,
    "dim": 16,
    "layers": 2,
    "heads": 2,
    "expert_hidden": 16,
    "sequence": 32,
    "batch": 4,
    "steps": 4,
    "eval_every": 2,
    "warmup": 1,
    "lr": 0.01,
}


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> pd.DataFrame:
    """Rows of three entries: four contestants with three seeds, one of them not causal; two networks; two train modes."""
    folder, draw = tmp_path_factory.mktemp("trained"), np.random.default_rng(0)
    for domain, letters in (("lower", b"abcd efgh"), ("digits", b"0123 4567")):
        (folder / domain).mkdir()
        for number in range(12):
            (folder / domain / f"{number:02}.txt").write_bytes(bytes(draw.choice(list(letters), 150).tolist()))
    text = {str(folder / name): "all" for name in ("lower", "digits")}
    routers = {"label": "routers", "router": ["dense", "softk", "switch_top1", "expert_choice"], "seed": [1, 2, 3]}
    networks = {"label": "networks", "router": ["softk"], "network": ["linear", "mlp"], "seed": [1, 2]}
    modes = {"label": "modes", "router": ["softk"], "train_mode": ["joint", "frozen_router"], "seed": [1, 2]}
    planned = plan.expand([entry | SIZES | {"corpora": text} for entry in (routers, networks, modes)])
    files = {folder / f"{name}.parquet": run for name, run in planned.finals.items()}
    for path, run in files.items():
        train.train(run, path, "cpu")
    found = run_rows.collect(files, {}).to_pandas()
    tried = {"pilot_lrs": [0.005, 0.01, 0.02], "pilot_losses": [4.5, 4.0, 4.2]}
    return found.assign(timed_alone=True, **{name: [values] * len(found) for name, values in tried.items()})


@pytest.mark.parametrize("name", NAMES)
def test_draws(name: str, trained: pd.DataFrame) -> None:
    """With seeds, hardware and the mark of rules that see later tokens; and says why where there is nothing."""
    text = draw(name, trained)[1]
    device = trained["device"].iloc[0]
    assert "no data" not in text and re.search(r"n\s=\s\d+\s+seed|n\s=\s\d\)", text) and device in text
    if name not in (*OF_SOME, *CAUSAL, "learning_rates"):  # of learning rates the best six
        assert "expert_choice †" in text
    assert ("one seed: no intervals" in draw(name, trained[trained["seed"] == 1])[1]) and "one seed:" not in text
    for nothing in (trained.iloc[:0], trained.assign(purpose="pilot")):
        assert "no data: no final training run" in draw(name, nothing)[1]
    dense = trained[trained["router"] == "dense"]
    if name not in ("quality_pareto", "training_curves", "loss_seconds", "learning_rates"):
        assert "no data: none of 3 final runs has" in draw(name, dense)[1]


@pytest.mark.parametrize("name", ["quality_pareto", "specialisation"])
def test_same_rows_same_files(name: str, trained: pd.DataFrame, tmp_path: Path) -> None:
    """Both formats, whatever the index of the rows."""
    few = trained[trained["router"].isin(["softk", "dense"]) & (trained["label"] == "routers")]
    for copy, table in (("a", few), ("b", few.set_index(few.index[::-1]))):
        paper.save(draw(name, table)[0], tmp_path / f"{copy}.svg", tmp_path / f"{copy}.png")
    assert (tmp_path / "a.svg").read_bytes() == (tmp_path / "b.svg").read_bytes()
    assert (tmp_path / "a.png").read_bytes() == (tmp_path / "b.png").read_bytes()


@pytest.mark.parametrize("name", ["quality_pareto", "training_curves"])
def test_rules_that_see_later_tokens_have_their_own_panel(name: str, trained: pd.DataFrame) -> None:
    """In no panel do both kinds have a label, and the front joins causal rules only."""
    for axes in draw(name, trained)[0].axes:
        marked = ["†" in text.get_text() for text in axes.texts]
        assert all(marked) or not any(marked)
    speed = trained.assign(train_tokens_per_s=np.where(trained["causal"], 1.0, 1e9))
    assert max(draw("quality_pareto", speed)[0].axes[0].get_xlim()) < 10


def test_the_interval_of_a_speed_taken_once_is_that_of_its_blocks(trained: pd.DataFrame) -> None:
    """A tenth of the step on each side where it is known, no wider than the mark where it is not."""

    def width(half: float | None) -> float:
        rows = trained.assign(train_tokens_per_s=1e6, step_ms=10.0, step_half_width_ms=half, step_mode="eager")
        axes = draw("quality_pareto", rows)[0].axes[0]
        bars = [line.get_segments()[0] for line in axes.collections if isinstance(line, LineCollection)]
        return max(float(np.ptp(one[:, 0])) for one in bars)

    assert width(1.0) == pytest.approx(2e5) and width(np.nan) == 0


def test_labels_of_many_routers_do_not_overlap() -> None:
    """Seventeen points in one place, and some at the edges; all names inside the picture."""
    heights = [1.0] * 14 + [0.0, 0.001, 2.0]
    points = marks([{"panel": "p", "series": f"router_{i}", "x": 1.0, "y": y} for i, y in enumerate(heights)])
    tints = dict.fromkeys(points["series"], "#0173b2")
    chart = Chart("points", Scale("x"), Scale("y"), points, tints, records.SCHEMA.empty_table().to_pandas(), named=True)
    figure = paper.drawn(chart, "A title")
    figure.canvas.draw()
    (axes,) = figure.axes
    boxes = sorted((Text.get_window_extent(text) for text in axes.texts), key=lambda box: box.y0)  # without the lines
    assert len(boxes) == 17 and all(low.y1 <= high.y0 + 0.5 for low, high in pairwise(boxes))
    assert boxes[0].y0 >= 0 and boxes[-1].y1 <= figure.bbox.height and max(box.x1 for box in boxes) <= figure.bbox.width


def test_a_name_stands_next_to_its_point_where_panels_share_limits() -> None:
    """The name of the only point of a panel stood in its middle, and the point at the bottom of the common scale."""
    points = marks([{"panel": p, "series": p, "x": 1.0, "y": y} for p, y in (("low", 0.04), ("high", 9.0))])
    tints = dict.fromkeys(points["series"], "#0173b2")
    chart = Chart(
        "points",
        *(Scale("x"), Scale("y")),
        points,
        tints,
        records.SCHEMA.empty_table().to_pandas(),
        named=True,
        level=True,
    )
    figure = paper.drawn(chart, "A title")
    figure.canvas.draw()
    for axes, y in zip(figure.axes, points["y"], strict=True):
        (name,) = axes.texts
        assert name.xyann[1] == pytest.approx(
            axes.transAxes.inverted().transform(axes.transData.transform((1, y)))[1], abs=0.02
        )


@pytest.mark.parametrize(
    ("factor", "tokens", "top_k", "experts"), [(1.0, 512, 1, 8), (1.1, 1000, 2, 8), (1.25, 64, 2, 4), (9.0, 16, 1, 4)]
)
def test_floor_is_the_expected_excess(factor: float, tokens: int, top_k: int, experts: int) -> None:
    """Against the sum over all loads; at factor 1 near the 0.399 sqrt(E / (T k)) of a normal load."""
    limit = min(tokens, math.ceil(round(factor * tokens * top_k / experts, 6)))
    loads = np.arange(tokens + 1)
    excess = (stats.binom.pmf(loads, tokens, top_k / experts) * np.maximum(loads - limit, 0)).sum()
    share = capacity.floor(factor, tokens, top_k, experts)
    assert share == pytest.approx(excess / (tokens * top_k / experts), abs=1e-9)
    if factor == 1:
        assert share == pytest.approx(0.399 * math.sqrt(experts / (tokens * top_k)), rel=0.1)


def test_times_average() -> None:
    """1 where an expert's choices do not depend on the domain, and for one that nobody chose."""
    assert expert_domains.times_average(np.array([[1, 0], [1, 0]], dtype=float)).tolist() == [[1, 1], [1, 1]]
    assert expert_domains.times_average(np.array([[3, 1], [1, 3]], dtype=float)).tolist() == [[1.5, 0.5], [0.5, 1.5]]


def test_rules_that_are_looked_for_exist() -> None:
    """A rule that was renamed would leave the figure in silence."""
    assert set(expert_domains.SHOWN) <= set(ZOO)


def test_tables_rank_apart(trained: pd.DataFrame) -> None:
    """One of causal rules and one of the others for an entry; networks of one entry are ranked together."""
    found = trained_rules.contests(trained)
    names = {(one.title.partition(":")[0], one.causal): [row["contestant"] for row in one.rows] for one in found}
    assert set(names["routers", True]) == {"dense", "softk", "switch_top1"}
    assert names["routers", False] == ["expert_choice †"] and set(names["networks", True]) == {"softk", "softk+mlp"}
    softk = next(row for row in found[0].rows if row["contestant"] == "softk")
    last = trained[(trained["label"] == "routers") & (trained["router"] == "softk") & (trained["step"] == 4)]
    assert softk["mean"] == f"{last['bits_per_byte'].mean():.4f}" and softk["seeds"] == 3
    assert softk["values"][1] == f"{last['drop_rate'].mean():.1%}"


def probed(page: Path) -> str:
    """The document as Chromium builds it, without an error."""
    document, console = opened(page)
    assert not console
    return document


def test_report_in_a_browser(trained: pd.DataFrame, tmp_path: Path) -> None:
    """With training runs: their figures and rankings; without: no section on them."""
    measured = records.SCHEMA.empty_table().to_pandas()
    adapted = adaptation_rows.SCHEMA.empty_table().to_pandas()
    render(measured, FIGURES, tmp_path / "with.html", trained, adapted)
    page = html.unescape(probed(tmp_path / "with.html")).replace("<wbr>", "")
    assert {name for name in FIGURES if f'id="chart-{name}"' in page} == DRAWN
    assert '<h2 id="quality">' in page
    assert all(one.title in page for one in trained_rules.contests(trained))
    render(measured, FIGURES, tmp_path / "without.html")
    page = probed(tmp_path / "without.html")
    assert 'id="quality"' not in page


def test_names_of_runs_and_texts_are_text(trained: pd.DataFrame, tmp_path: Path) -> None:
    """A label of a config or a domain of a corpus that is markup: no tag of it in the page, its scripts' data included."""
    evil = "<img src=x onerror=alert(1)>"
    named = trained.assign(
        label=trained["label"].replace("routers", evil), domains=pd.Series([[evil, "b"]] * len(trained), trained.index)
    )
    measured = records.SCHEMA.empty_table().to_pandas()
    render(measured, {name: tmp_path / f"{name}.svg" for name in NAMES}, tmp_path / "index.html", named)
    page = (tmp_path / "index.html").read_text()
    data = page.partition('id="data">')[2].partition("<")[0]
    assert evil not in page and html.escape(evil) in page and evil in gzip.decompress(base64.b64decode(data)).decode()


def test_cautions_are_those_of_the_zoo(trained: pd.DataFrame) -> None:
    """Of a rule that was trained; nothing of others."""
    (name, rule), *_ = ((name, rule) for name, rule in ZOO.items() if rule.caution)
    assert (
        trained_rules.cautions(trained.assign(router=name)) == [(name, rule.caution)]
        and trained_rules.cautions(trained) == []
    )


def test_curves_of_the_page_hold_the_means_of_the_seeds(trained: pd.DataFrame) -> None:
    """Rules that see later tokens in a panel of their own, and the difference of causal rules to the reference, which has none, in another."""
    found = training_lines.training_curves(trained)
    rows = training_rows.history(trained, "bits_per_byte")
    later = found.marks["panel"].str.contains(training_rows.NOT_CAUSAL)
    assert later.any() and all(training_rows.NOT_CAUSAL in name for name in found.marks.loc[later, "series"])
    assert not any(training_rows.NOT_CAUSAL in name for name in found.marks.loc[~later, "series"])
    mark = found.marks.iloc[0]
    title, first = training_rows.contests(rows)[0]
    mine = first[(first["contestant"] == mark["series"]) & (first["tokens_seen"] == mark["x"] * 1e6)]
    assert mark["panel"] == title and mark["y"] == pytest.approx(mine["bits_per_byte"].mean())
    differences = found.marks[found.marks["panel"].str.contains("difference to dense")]
    softk = differences[differences["series"] == "softk"].iloc[-1]
    ends = first[first["tokens_seen"] == softk["x"] * 1e6].groupby("contestant")["bits_per_byte"].mean()
    assert softk["y"] == pytest.approx(ends["softk"] - ends["dense"]) and "dense" not in set(differences["series"])
    assert training_lines.training_load_cv(trained).marks["y"].notna().all()
    none = trained.assign(bits_per_byte=float("nan"), load_cv=float("nan"))
    assert (
        "none of" in training_lines.training_curves(none).reason
        and "none of" in training_lines.training_load_cv(none).reason
    )


def test_crosses_of_the_page_hold_the_means_of_the_seeds(trained: pd.DataFrame) -> None:
    """Of entropy and balance, with intervals on both sides of them."""
    found = training_points.gate_balance(trained)
    mark = found.marks[found.marks["series"] == "softk"].iloc[0]
    rows = training_rows.finals(trained[trained["label"] == "routers"])
    mine = rows[rows["router"] == "softk"]
    assert (mark["x"], mark["y"]) == pytest.approx((mine["gate_entropy"].mean(), mine["load_cv"].mean()))
    assert mark["x_low"] < mark["x"] < mark["x_high"] and mark["low"] <= mark["y"] <= mark["high"]
    assert "entropy of equal scores: 1.39" in mark["panel"] and mark["says"] == "n = 3 seeds"
    assert "none of" in training_points.gate_balance(trained.assign(gate_entropy=float("nan"))).reason


def test_drops_of_the_page_stand_beside_those_of_chance(trained: pd.DataFrame) -> None:
    """In percent, at every factor of the rows; chance at the same factors, without an interval."""
    found = capacity.quality_drops(trained).marks
    rows = training_rows.finals(
        trained[(trained["label"] == "routers") & (trained["router"] == "softk")], "drop_rate_by_factor"
    )
    mine = found[found["series"] == "softk"]
    mine = mine[mine["panel"] == mine["panel"].iloc[0]]
    assert list(mine["x"]) == list(rows["capacity_factors"].iloc[0])
    assert mine["y"].iloc[0] == pytest.approx(100 * np.mean([one[0] for one in rows["drop_rate_by_factor"]]))
    chance = found[(found["series"] == capacity.RANDOM) & (found["says"] == "k=2, 128 tokens, expected")]
    assert chance["join"].nunique() == 1, "a line of its own per number of choices"
    assert chance["y"].iloc[0] == pytest.approx(100 * capacity.floor(chance["x"].iloc[0], 128, 2, 4))
    assert chance["low"].isna().all() and set(chance["x"]) == set(mine["x"])
    shares = [
        [0.5 * (seed == 1)] * len(one) if np.ndim(one) else one
        for one, seed in zip(trained["drop_rate_by_factor"], trained["seed"], strict=True)
    ]
    apart = capacity.quality_drops(trained.assign(drop_rate_by_factor=pd.Series(shares, trained.index))).marks
    assert apart["low"].min() == 0 < apart["y"].max(), "a share is not below 0, however wide its interval"
    assert "none of" in capacity.quality_drops(trained[trained["router"] == "dense"]).reason


@pytest.mark.parametrize("figure", [capacity.quality_drops, capacity.capacity_bits], ids=["drops", "bits"])
def test_nothing_on_capacity_is_shown_of_runs_that_validated_by_domain(
    figure: Callable[[pd.DataFrame], Chart], trained: pd.DataFrame
) -> None:
    """Nor of such runs among others."""
    old = trained.assign(validation_batches="by_domain")
    assert figure(old).marks.empty and figure(old).reason == compare.WITHDRAWN
    assert len(figure(trained).marks)
    both = pd.concat([trained, old.assign(run=old["run"] + "-old", bits_per_byte=9.0)], ignore_index=True)
    assert set(figure(both).shown["validation_batches"]) == {"mixed"}
    (shown,) = {
        value for contest in trained_rules.contests(old) for row in contest.rows for value in row["values"][1:2]
    }
    assert shown == "–", "the share that is dropped"


def test_pairs_of_the_page_are_joined_by_seed(trained: pd.DataFrame) -> None:
    """A line per seed through its runs, and means with intervals, which no line joins; other modes in two panels with scales of their own."""
    found = training_lines.networks(trained)
    seeds = found.marks[found.marks["series"] == training_lines.SEED]
    means = found.marks[found.marks["series"] == "softk"]
    assert seeds.groupby("join")["x"].agg(list).to_dict() == {"1": ["linear", "mlp"], "2": ["linear", "mlp"]}
    assert list(means["y"]) == pytest.approx(list(seeds.groupby("x")["y"].mean())) and means["join"].nunique() == 2
    assert list(means["says"]) == ["mean over n = 2 seeds"] * 2
    assert all(re.fullmatch(r"\d\.\d{3} ± \d\.\d{3}", text) for text in means["text"])
    alone = training_lines.networks(trained[trained["seed"] == 1]).marks
    assert [re.fullmatch(r"\d\.\d{3}", text) is not None for text in alone["text"].dropna()] == [True] * 2
    modes = training_lines.train_modes(trained)
    labels = [modes.scales(panel)[1].label for panel in modes.marks["panel"].unique()]
    assert labels == ["bits between expert and domain", "validation bits per byte (less is better)"]
    one = trained[trained["label"] == "routers"]
    assert "none of" in training_lines.networks(one).reason and "none of" in training_lines.train_modes(one).reason


def test_specialisation_of_the_page_is_in_classes(trained: pd.DataFrame) -> None:
    """A cell per layer, domain and expert, whose class is that of its ratio; experts by their first domain."""
    drawn = expert_domains.specialisation(trained)
    assert drawn.note.startswith("config routers: E=4"), (
        "the page begins a sentence with it: no name of a config is written large"
    )
    found = drawn.marks
    softk = found[found["panel"].str.startswith("softk:")]
    assert len(softk) == 2 * 2 * 4 and list(softk["x"].iloc[:4]) == ["1", "2", "3", "4"]
    alone = expert_domains.specialisation(trained[trained["seed"] == 1]).marks["panel"]
    assert not alone.str.contains("±").any() and alone.str.endswith(" bits (n = 1)").all(), "one seed has no interval"
    assert softk["panel"].str.fullmatch(r"softk: -?\d\.\d{3} ± \d\.\d{3} bits \(n = 3\)").all()
    first = [float(said.removesuffix("x")) for said in softk["says"].iloc[:4]]
    assert first == sorted(first, reverse=True)
    ratios = (0.5, 0.51, 0.79, 0.81, 1.24, 1.26, 1.99, 2.0)
    assert [expert_domains._class(one) for one in ratios] == [
        "less often",
        "less often",
        "less often",
        "within a factor of 1.25",
        "within a factor of 1.25",
        "more often",
        "more often",
        "at least twice as often",
    ]
    assert expert_domains._class(0.49) == "less than half as often"
    assert "none of" in expert_domains.specialisation(trained[trained["router"] == "dense"]).reason


def test_figure_command(trained: pd.DataFrame, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Draws a figure of training runs without measurements; without training runs says what to run."""
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match="snakemake"):
        cli.figure(platform="cpu", name="networks")
    assert not any(figure.source == "quality" for figure in cli._reported("cpu").values())
    write_table(paths.quality("cpu"), _table(trained))
    cli.figure(platform="cpu", name="networks")
    assert paths.figure("cpu", "networks").is_file() and set(cli._reported("cpu")) == {
        name for name, figure in FIGURES.items() if figure.source != "perft"
    }


def _table(trained: pd.DataFrame):
    """The rows as they were collected."""
    pa = importlib.import_module("pyarrow")
    return pa.Table.from_pandas(trained, schema=run_rows.SCHEMA, preserve_index=False).replace_schema_metadata(None)
