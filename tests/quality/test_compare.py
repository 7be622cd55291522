"""The ranking, its ties and the columns of runs."""

import dataclasses
import itertools
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow.parquet as pq
import pytest
from scipy import stats

from moe_routing_bench import statistics
from moe_routing_bench.grid.run_spec import DENSE, Run
from moe_routing_bench.quality import compare, family, rates, run_rows
from moe_routing_bench.report import trained_rules
from moe_routing_bench.store.parquet import write_table
from moe_routing_kernels.errors import UserError
from moe_routing_kernels.routers import ROUTERS
from moe_routing_kernels.routers.zoo import ZOO

ROOT = Path(__file__).parents[2]


def rows(router: str, values: list[float], causal: bool = True, **more: object) -> list[dict]:
    """Two evaluations of a run for every value; the first is not the one that counts."""
    fixed = {
        "label": "e",
        "config_hash": "c",
        "purpose": "final",
        "network": "linear",
        "capacity_factor": 1.25,
        "drop_policy": "position",
        "train_mode": "joint",
        "lr": 0.1,
    }
    return [
        fixed
        | {
            "router": router,
            "run": f"{router}{seed}{more}",
            "seed": seed,
            "step": step,
            "causal": causal,
            "bits_per_byte": value + (step == 1),
        }
        | more
        for seed, value in enumerate(values)
        for step in (1, 2)
    ]


def test_a_table_of_refused_runs_has_no_rank_and_says_why() -> None:
    """As those of a text of one's own that repeats itself."""
    table = pd.DataFrame(rows("a", [2.0, 2.1], recurring_share=0.4) + rows("b", [2.2, 2.3], recurring_share=0.4))
    found = compare.summary(table)
    assert found.empty and {"label", "contestant", "rank", "letters"} <= set(found)
    assert (
        compare.text(table)
        == "a, b: not ranked: 40.0% of its validation text recurs in training, of which at most 1% may."
    )


def test_ranking_says_different_equivalent_or_undecided() -> None:
    """b is better than a by 0.1 in every seed, though their intervals overlap; d is b within 0.001; rules that see later tokens are apart."""
    noise = np.array([0.0, 0.3, -0.2, 0.5, 0.1])
    own = {name: np.random.default_rng(i).normal(0, 0.001, 5) for i, name in enumerate("abd")}
    table = pd.DataFrame(
        rows("a", (2 + noise + own["a"]).tolist())
        + rows("b", (1.9 + noise + own["b"]).tolist())
        + rows("d", (1.9005 + noise + own["d"]).tolist())
        + rows("z", [0.1] * 5, causal=False)
    )
    found = compare.summary(table).set_index("contestant")
    assert found["rank"].to_dict() == {"b": 1, "d": 1, "a": 3, "z": 1}
    assert found.loc["b", "equivalent"] == ["d"] and found.loc["d", "equivalent"] == ["b"]
    assert (found["equivalent"]["a"], found["undecided"]["a"]) == ([], []) and not found["causal"]["z"]
    assert found["letters"].to_dict() == {"b": "a", "d": "a", "a": "b", "z": "a"}
    a = 2 + noise + own["a"]
    low, high = stats.t.interval(0.95, 4, loc=a.mean(), scale=stats.sem(a))
    assert found.loc["a", "half_width"] == pytest.approx((high - low) / 2)
    text = compare.text(table)
    assert "NOT causal" in text and text.index(" b ") < text.index(" a ")


def test_a_tie_is_no_equivalence() -> None:
    """Of two means that are alike within noise of 0.1; every verdict has effect, interval, margin and number of seeds."""
    by_seed = pd.DataFrame({"a": [1.0, 1.2, 1.1], "b": [1.15, 1.0, 1.15]})
    (pair,) = family.family(by_seed).pairs
    assert pair.effect < family.MARGIN and pair.low < 0 and pair.verdict == family.UNDECIDED
    assert all(
        part in str(pair) for part in ("undecided", "margin 0.01", "n = 3", f"{pair.low:.4f} to {pair.high:.4f}")
    )
    (wider,) = family.family(by_seed, margin=2.0).pairs
    assert wider.verdict == family.EQUIVALENT and wider.p_equivalent < family.ALPHA < pair.p_equivalent


def test_the_family_is_that_of_the_stored_rows() -> None:
    """Noise, pairs and letters of a rule + seed ANOVA with Tukey's HSD, by its textbook formulas for balanced data: rules with all seeds."""
    finals = compare.finals(run_rows.read(ROOT / "results/nvidia-h200/quality.parquet").to_pandas())
    by_seed = family.by_seed(finals[(finals["label"] == "a0") & finals["causal"].astype(bool)], compare.METRIC)
    by_seed = by_seed.dropna(axis=1)
    found = family.family(by_seed)
    values = by_seed.to_numpy()
    seeds, rules = values.shape
    rest = values - values.mean(0) - values.mean(1, keepdims=True) + values.mean()
    freedom = (seeds - 1) * (rules - 1)
    noise = ((rest**2).sum() / freedom) ** 0.5
    least = stats.studentized_range.ppf(0.95, rules, freedom) * noise / seeds**0.5
    gaps = [abs(a - b) for a, b in itertools.combinations(values.mean(0), 2)]
    assert found.noise == pytest.approx(noise) and seeds == 5 and rules > 20
    assert found.means == pytest.approx(by_seed.mean().to_dict())
    words = [pair.verdict for pair in found.pairs]
    assert words.count(family.DIFFERENT) == sum(gap > least for gap in gaps) > 99
    assert all(pair.high - pair.effect == pytest.approx(least) for pair in found.pairs)
    assert found.detectable > least
    letters = family.letters(found, list(by_seed.mean().sort_values().index))
    for pair in found.pairs:
        shared = set(letters[pair.better]) & set(letters[pair.worse])
        assert bool(shared) == (pair.verdict != family.DIFFERENT), pair


def test_a_seed_that_is_used_twice_is_refused() -> None:
    """It would count as two."""
    table = pd.DataFrame(rows("a", [1.0, 1.1]) + rows("b", [1.0, 1.1]))
    table.loc[table["seed"] == 1, "seed"] = 0
    with pytest.raises(UserError, match="0 twice for a"):
        compare.summary(table)


@pytest.mark.parametrize(("lr", "grid", "refused"), [(0.1, [0.1, 0.2, 0.4], True), (0.4, [0.1, 0.2, 0.4], True), (0.2, [0.1, 0.2, 0.4], False), (0.1, [0.1], False), (0.1, None, False)])  # fmt: skip
def test_a_best_rate_at_the_edge_of_its_grid_is_refused(lr: float, grid: list[float] | None, refused: bool) -> None:
    table = pd.DataFrame(rows("a", [1.0, 1.1], lr=lr, pilot_lrs=grid) + rows("b", [2.0, 2.3]))
    assert set(compare.summary(table)["contestant"]) == ({"b"} if refused else {"a", "b"})
    assert (("e a", compare.AT_THE_EDGE) in trained_rules.cautions(table)) == refused


def test_rows_from_before_their_rule_changed_are_refused_and_said_so() -> None:
    """GShard's seating changed on 2026-11-22."""
    assert ZOO["gshard_top2"].changed == "2026-11-22"
    for ended, refused in (("2026-11-21T16:33:53+00:00", True), ("2026-11-22T16:33:53+00:00", False)):
        table = pd.DataFrame(
            rows("gshard_top2", [1.0, 1.1], ended_at=ended) + rows("softk", [2.0, 2.3], ended_at=ended)
        )
        assert ("gshard_top2" in set(compare.summary(table)["contestant"])) == (not refused)
        assert (("e gshard_top2", compare.OLDER_CODE) in trained_rules.cautions(table)) == refused


def test_holm() -> None:
    """The example of three tests, in any order; never above one, never falling."""
    assert statistics.holm([0.01, 0.04, 0.03]) == pytest.approx([0.03, 0.06, 0.06])
    assert statistics.holm([0.9, 0.8]) == [1, 1] and statistics.holm([]) == []


def test_equal_runs_are_a_tie_and_one_seed_tells_nothing() -> None:
    """Without a warning about a division by zero."""
    same = compare.summary(pd.DataFrame(rows("a", [1.0, 2.0]) + rows("b", [1.0, 2.0])))
    assert set(same["rank"]) == {1}
    one = compare.summary(pd.DataFrame(rows("a", [1.0]) + rows("b", [2.0])))
    assert set(one["rank"]) == {1} and one["half_width"].isna().all()


def test_what_varies_is_in_the_name() -> None:
    """Only that: the router alone where nothing else does."""
    table = pd.DataFrame(
        rows("a", [1.0])
        + rows("a", [2.0], network="mlp")
        + rows("a", [3.0], drop_policy="random")
        + rows("dense", [4.0], capacity_factor=None)
    )
    assert set(compare.finals(table)["contestant"]) == {"a position", "a+mlp position", "a random", "dense"}


def stored(folder: Path, run: Run, **fields: object) -> Path:
    """The file of a run with one row."""
    path = folder / f"{run.name}.parquet"
    run_rows.write(
        path,
        [{"schema_version": run_rows.SCHEMA_VERSION, "run": run.name, "lr": run.lr, "corpus_sha256": "t"} | fields],
        run.spec,
    )
    return path


def test_the_best_pilot_is_that_of_least_loss(tmp_path: Path) -> None:
    """One that diverged is none; when all did, that is an error."""
    losses = {0.1: float("nan"), 0.03: 1.5, 0.01: 1.5, 0.001: 1.7}
    files = [stored(tmp_path, Run(lr=lr), val_loss=loss) for lr, loss in losses.items()]
    lr, fields = rates.best(files)
    assert (
        lr == 0.01 and fields["pilot_lrs"] == [0.001, 0.01, 0.03, 0.1] and fields["pilot_losses"][:3] == [1.7, 1.5, 1.5]
    )
    with pytest.raises(UserError, match="smaller learning rates"):
        rates.best(files[:1])


@pytest.mark.parametrize(
    "path", sorted((ROOT / "results").glob("*/quality.parquet")), ids=lambda path: path.parent.name
)
def test_stored_rows_have_names_of_today(path: Path) -> None:
    """Every router that was trained is one of the zoo; former names stay free."""
    former, now = (set(table["router"].to_pylist()) for table in (pq.read_table(path), run_rows.read(path)))
    assert now == {run_rows.FORMER_NAMES.get(name, name) for name in former} and {
        part for name in now for part in name.split("+")
    } <= {*ZOO, DENSE}
    assert not run_rows.FORMER_NAMES.keys() & ZOO.keys()
    assert run_rows.FORMER_NAMES.keys() <= ROUTERS.keys() and set(run_rows.FORMER_NAMES.values()) <= ZOO.keys()


def test_a_renamed_table_keeps_its_spec(tmp_path: Path) -> None:
    """Only the name of the router changes."""
    run = Run(router="deepseek_v3", experts=16)
    path = stored(tmp_path, run, router=run.router, val_loss=1.0)
    table = run_rows.read(path)
    assert table["router"].to_pylist() == ["deepseek_v3_small"] and run_rows.spec_of(table) == run.spec
    assert table.drop(["router"]).equals(pq.read_table(path).drop(["router"]))


def test_what_a_run_says_is_its_last_evaluation(tmp_path: Path) -> None:
    row = dict.fromkeys(run_rows.COLUMNS) | {"schema_version": run_rows.SCHEMA_VERSION, "router": "base"}
    rows = [row | {"step": step, "val_loss": 1 / step} for step in (1, 2, 5)]
    run_rows.write(tmp_path / "run.parquet", rows, "spec")
    assert run_rows.last(tmp_path / "run.parquet")["step"] == 5


def test_columns_that_were_added_are_null_in_older_files(tmp_path: Path) -> None:
    """Which a file of before lacks; any other column it must have."""
    path = stored(tmp_path, Run(), host="n1", slurm_job_id="7")
    assert run_rows.last(path)["slurm_job_id"] == "7"
    write_table(path, pq.read_table(path).drop(["host", "slurm_job_id"]))
    assert run_rows.last(path)["host"] is run_rows.last(path)["slurm_job_id"] is None
    write_table(path, pq.read_table(path).drop(["device"]))
    with pytest.raises(UserError, match="other columns"):
        run_rows.read(path)


def test_collect_takes_times_and_refuses_what_does_not_fit(tmp_path: Path) -> None:
    """A timing speaks for all seeds; other text, another spec or a missing file are named."""
    one, two = Run(seed=1), Run(seed=2)
    files = {stored(tmp_path, run, step_ms=9.0, timed_alone=False, val_loss=1.0): run for run in (one, two)}
    time = tmp_path / "time.parquet"
    run_rows.write(
        time,
        [{"schema_version": run_rows.SCHEMA_VERSION, "step_ms": 2.0, "router_ms": 1.0, "timed_alone": True}],
        one.spec,
    )
    table = run_rows.collect(files, {time: [one.name, two.name]})
    assert (
        table["step_ms"].to_pylist() == [2.0, 2.0]
        and table["timed_alone"].to_pylist() == [True, True]
        and table["val_loss"].to_pylist() == [1, 1]
    )
    assert run_rows.collect(files, {})["step_ms"].to_pylist() == [9.0, 9.0]
    stored(tmp_path, two, corpus_sha256="other")
    with pytest.raises(UserError, match="trained on different text"):
        run_rows.collect(files, {})
    stored(tmp_path, two, code_fingerprint="other")
    with pytest.raises(UserError, match=rf"2 versions of the code trained the runs: .*{two.name}.* \(1 files\)"):
        run_rows.collect(files | {stored(tmp_path, Run(seed=3)): Run(seed=3)}, {})
    stored(tmp_path, two)
    with pytest.raises(UserError, match="another spec"):
        run_rows.collect({path: dataclasses.replace(run, dim=128) for path, run in files.items()}, {})
    with pytest.raises(UserError, match="nowhere"):
        run_rows.collect({tmp_path / "nowhere.parquet": one}, {})


def timing_rows(label: str, *modes: str | None, cuda: str | None = "13.0", alone: bool = True) -> pd.DataFrame:
    """Final rows of 1000 bytes a step: 10 ms from Python, 4 ms as a graph."""
    steps = [4.0 if mode == run_rows.GRAPH else 10.0 for mode in modes]
    return pd.DataFrame(
        {
            "label": label,
            "batch": 10,
            "sequence": 100,
            "step_mode": pd.Series(modes, dtype=object),
            "eager_step_ms": 10.0,
            "step_ms": steps,
            "step_half_width_ms": 0.1,
            "train_tokens_per_s": [1e6 / ms for ms in steps],
            "timed_alone": alone,
            "cuda_version": cuda,
        }
    )


def test_speeds_of_a_config_are_of_one_mode() -> None:
    """A rule that could not be captured is not held against one that was; other configs keep their graphs."""
    table = pd.concat(
        [
            timing_rows("a", run_rows.GRAPH, "eager: no CUDA graph, because"),
            timing_rows("b", run_rows.GRAPH, run_rows.GRAPH),
        ],
        ignore_index=True,
    )
    found = compare.with_speeds(table)
    assert found["train_tokens_per_s"].tolist() == [1e5, 1e5, 2.5e5, 2.5e5]
    assert found["step_ms"].tolist() == [10, 10, 4, 4]
    assert found["step_half_width_ms"].isna().tolist() == [True, False, False, False], (
        "that of the graph, not of the step"
    )
    assert found["step_mode"].tolist() == ["eager", "eager", "cuda_graph", "cuda_graph"]
    assert "in some configs, launched from Python in others" in compare.timed(found)


def test_figures_say_how_speeds_were_taken() -> None:
    def said(*args, **more) -> str:
        return compare.timed(compare.with_speeds(timing_rows("a", *args, **more)))

    assert said(run_rows.GRAPH, run_rows.GRAPH).endswith("to itself, steps replayed as a CUDA graph")
    assert said(run_rows.EAGER).endswith("launched from Python (limited by the host)")
    assert said(run_rows.EAGER, cuda=None) == "one run per rule with the machine to itself"
    assert said(run_rows.EAGER, alone=False) == "of runs that shared the machine"


def test_rows_of_another_machine_are_collected_by_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without its files the error names the platform asked for, not this machine."""
    from typer.testing import CliRunner

    from moe_routing_bench.cli.main import app

    monkeypatch.chdir(tmp_path)
    config = '{"seed": 1, "device": "cpu", "grid": [{"benches": ["gate"], "implementations": ["torch"], "tokens": [8], "experts": [4], "top_k": [2]}], "quality": [{"label": "a", "router": ["softk"], "seed": [1], "lr": 0.1, "corpora": {"stdlib": 9000}}]}'
    result = CliRunner().invoke(app, ["collect-quality", "--platform", "other-gpu", "--config-json", config])
    assert result.exit_code and "results/other-gpu/runs" in str(result.exception or "") + result.output


def test_pairs_of_incomplete_seeds_have_wider_intervals() -> None:
    """The additive model takes every seed that a contestant has; c lacks one, so that its pairs are known less well."""
    random = np.random.default_rng(3)
    table = pd.DataFrame({name: random.normal(i, 0.1, 4) for i, name in enumerate("abc")})
    table.loc[3, "c"] = np.nan
    found = {frozenset((pair.better, pair.worse)): pair for pair in family.family(table).pairs}
    whole, part = found[frozenset("ab")], found[frozenset("ac")]
    assert (whole.seeds, part.seeds) == (4, 3) and part.high - part.low > whole.high - whole.low > 0
