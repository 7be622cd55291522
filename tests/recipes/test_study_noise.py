"""What the notebook says of the first runs of study A0 follows from their rows."""

import importlib
import re
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import yaml

from moe_routing_bench.quality import compare, family, run_rows

ROOT = Path(__file__).parents[2]
RUNS = pd.read_csv(ROOT / "results/nvidia-h200/study_a0.csv")
SECTIONS = {
    text.split("\n")[0]: text for text in re.split(r"^## ", (ROOT / "docs/notebook.md").read_text(), flags=re.MULTILINE)
}
SECTION = SECTIONS["2026-11-29: the seeds of study A0"]


def residual(rows: pd.DataFrame) -> float:
    """The standard deviation that an additive model of variant and seed leaves, bits per byte."""
    variant = rows["label"] + rows["router"] + rows["shared_gate"]
    rows = rows[variant.groupby(variant).transform("size") > 1]
    design = pd.concat([pd.get_dummies(variant[rows.index]), pd.get_dummies(rows["seed"]).iloc[:, 1:]], axis=1)
    _, squares, rank, _ = np.linalg.lstsq(design.to_numpy(float), rows["bits_per_byte"].to_numpy(), rcond=None)
    return float(np.sqrt(squares[0] / (len(rows) - rank)))


def test_the_noise_is_that_of_the_rows() -> None:
    last, first = (residual(RUNS[RUNS["step"] == step]) for step in (3050, 1525))
    assert (
        f"first {RUNS['run'].nunique()} runs" in SECTION
        and f"is {last:.3f} bits per byte ({first:.3f} at half" in SECTION
    )
    assert f"has a standard error of {last * np.sqrt(2 / 5):.3f} bits" in SECTION


def test_the_residual_is_that_of_known_rows() -> None:
    """Variant and seed effects of any size leave nothing; then an error of one run is spread as an additive model spreads it."""
    rows = pd.DataFrame(
        [("a", name, "plain", seed, 10 * ord(name) + seed) for name in "xyz" for seed in (1, 2, 3)],
        columns=["label", "router", "shared_gate", "seed", "bits_per_byte"],
    )
    assert residual(rows) == pytest.approx(0, abs=1e-9)
    rows.loc[0, "bits_per_byte"] += 1.0
    assert residual(rows) == pytest.approx(np.sqrt((2 / 3) ** 2 / 4))


def test_shifted_keys_have_the_least_noise() -> None:
    """Spread of seeds within a rule, of the runs that tried what lowers it."""
    runs = pd.read_csv(ROOT / "results/nvidia-h200/study_noise.csv")
    assert runs["run"].nunique() == 36
    last = runs[runs["step"] == runs.groupby("run")["step"].transform("max")]
    spread = last.groupby(["label", "router"])["bits_per_byte"].var(ddof=1).groupby("label").mean() ** 0.5
    order = ["noise_rate", "noise_steps", "noise_normed", "noise_shifted"]
    assert "| " + " | ".join(f"{spread[label]:.3f}" for label in order) + " |" in SECTION


def test_the_noise_of_the_study_is_that_of_its_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the runs that are far from the others, which were behind at half of the steps already."""
    rows = run_rows.read(ROOT / "results/nvidia-h200/quality.parquet").to_pandas()
    monkeypatch.syspath_prepend(ROOT / "docs")
    study = importlib.import_module("stored_tables").study()
    by_seed = family.by_seed(study, compare.METRIC)
    found = family.family(by_seed)
    half = rows[rows["step"] == 1525].set_index("run")["bits_per_byte"]
    late = study.set_index(["contestant", "seed"]).loc[found.far, "run"]
    others = study[~study["run"].isin(late)].groupby("contestant")["run"].apply(lambda runs: half[runs].max())
    assert len(late) > 0 and all(half[run] > others[name] for (name, _), run in late.items())
    assert f"{rows['run'].nunique()} further runs" in SECTION
    without, seeds = family.without_far(by_seed, found).noise, sorted({seed for _, seed in found.far})
    said = f"noise of A0 is {without:.4f} without {len(late)} runs that learnt to copy late, all of seeds {seeds[0]} to {seeds[-1]}"
    assert said in SECTION
    assert rows["git_sha"].nunique() == 1 and not rows["git_dirty"].any()


def test_studies_have_shifted_keys() -> None:
    for path in sorted((ROOT / "config/studies").glob("*.yaml")):
        if path.stem != "noise":
            entries = yaml.safe_load(path.read_text())["quality"]
            assert entries and all(entry["attention"] == "key_shift" for entry in entries), path.stem


def test_tiles_of_an_exchange_are_those_of_the_notebook() -> None:
    """Times of both ways, by rows and by how they are cut."""
    tiles = pd.read_csv(ROOT / "results/nvidia-h200.ep2/exchange_tiles.csv").query("hidden == 7168")
    times = tiles.set_index(["tokens_of_rank", "threads", "most_blocks", "most_vectors"])["pair_us"]
    few, many = ([times[tokens, 512, 132, vectors] for vectors in (1, 4, 8)] for tokens in (128, 4096))
    twice, half = ([times[tokens, 512, blocks, 4] for tokens in (128, 4096)] for blocks in (264, 64))
    said = f"1, 4 and 8: {few[0]}, {few[1]} and {few[2]} µs (T=128, H=7168); {many[0]}, {many[1]} and {many[2]} (T=4096). With 4 and twice the blocks: {twice[0]} and {twice[1]}; half: {half[0]} and {half[1]}."
    assert said in (ROOT / "docs/notebook.md").read_text()


@pytest.mark.parametrize(("bench", "run"), [("ep_training", "ep2-training"), ("ep_exchange", "ep2-exchange")])
def test_rates_and_speed_ups_over_two_gpus_are_those_of_the_documents(bench: str, run: str) -> None:
    """The row with most tokens: FLOPs of a GPU over time, or bytes over time as a share of the copies of the same run; and the fastest other over
    the fastest of ours."""
    rows = pd.read_parquet(ROOT / f"results/nvidia-h200.{run}/measurements.parquet")
    rows = rows[rows["tokens"] == rows["tokens"].max()].set_index("implementation")
    ours = rows.index.str.startswith(("ops_ep", "cute_push"))
    best = rows.loc[rows["median_us"][ours].idxmin()]
    assert (rows["status"] == "ok").all()
    (line,) = re.findall(
        rf"^\| `{bench}` \| {best['tokens'] // 2} \|.*$", (ROOT / "docs/measurements.md").read_text(), re.MULTILINE
    )
    *_, other, lead, rate, _, _ = (part.strip() for part in line.split("|"))
    others = rows["median_us"][~ours]
    assert other.startswith(f"{others.min():.0f}") and other.endswith(f"(`{others.idxmin()}`)")
    assert lead == f"{others.min() / best['median_us']:.2f}x"
    if bench == "ep_training":
        flops = 3 * 6 * best["tokens"] * best["top_k"] * best["hidden"] * best["intermediate"] / 2
        assert rate == f"{flops / best['median_us'] / 1e6:.0f} TFLOP/s"
    else:
        sent = max(best["rank_deduplicated_bytes"]) / best["median_us"] / 1e3
        assert rate == f"{sent:.0f} GB/s, {100 * sent / best['peer_copy_gb_per_s']:.0f} %"


def test_learning_rates_are_those_of_the_rows() -> None:
    """The table, what a step on the grid from the best rate costs, and how far runs are apart that differ in their label alone."""
    section = SECTIONS["2026-11-30: learning rates of study A1 at its small size"]
    runs = pd.read_csv(ROOT / "results/nvidia-h200/study_a1_xs.csv").query("purpose == 'pilot'")
    means = runs.groupby(["router", "lr"])["bits_per_byte"].mean().unstack()
    for router, row in means.iterrows():
        assert (
            f"| `{router}` | " + " | ".join("–" if np.isnan(bits) else f"{bits:.3f}" for bits in row) + " |" in section
        )
    costs = []
    for router, row in means.drop("switch_top1").dropna(axis="columns").iterrows():
        values, best = row.tolist(), int(row.argmin())
        assert row.index[best] in (0.001, 0.001414), router
        costs += [values[near] - values[best] for near in (best - 1, best + 1)]
    assert f"cost {min(costs):.3f} to {max(costs):.3f} bits" in section
    twice = runs.groupby(["router", "lr", "seed"])["bits_per_byte"].agg(np.ptp)
    assert f"up to {twice.max():.3f} bits apart" in section and set(twice[twice > 0].index.unique(0)) == {"switch_top1"}


def test_parts_of_the_way_back_are_those_of_the_rows() -> None:
    section = SECTIONS["2026-11-30: the way back of an exchange in parts"]
    folder = ROOT / "results/nvidia-h200.ep2"
    parts = pd.read_csv(folder / "exchange_parts.csv").query("vectors == 7").set_index("parts")["pair_us"]
    assert "{:.0f}, {:.0f}, {:.0f} and {:.0f} µs for 1, 2, 4 and 8 parts".format(*parts[[1, 2, 4, 8]]) in section
    assert parts.idxmin() == 4
    sets = pd.read_csv(folder / "exchange_sets.csv").set_index("mailboxes")["own_inputs_us"]
    assert f"{sets[1]:.1f} µs by one mailbox, and {sets[64].max():.1f} by 64" in section
    megabytes = 2 * 4096 * 7168 * 2 / 1e6
    assert f"{megabytes:.0f} MB at the 392 GB/s of a copy, {megabytes / 392 * 1e3:.0f} µs" in section
