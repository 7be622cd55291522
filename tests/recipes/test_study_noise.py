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
SECTION = re.split(r"^## ", (ROOT / "docs/notebook.md").read_text(), flags=re.MULTILINE)[-1]


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
    """The row with most tokens: FLOPs of a GPU over time, or bytes over time as a share of the copies of the same run; and the fastest of torch over
    the fastest of ours."""
    rows = pd.read_parquet(ROOT / f"results/nvidia-h200.{run}/measurements.parquet")
    rows = rows[rows["tokens"] == rows["tokens"].max()].set_index("implementation")
    of_torch = rows.index.str.startswith("torch_")
    best = rows.loc[rows["median_us"][~of_torch].idxmin()]
    assert (rows["status"] == "ok").all()
    (line,) = re.findall(
        rf"^\| `{bench}` \| {best['tokens'] // 2} \|.*$", (ROOT / "docs/measurements.md").read_text(), re.MULTILINE
    )
    *_, torch, lead, rate, _ = (part.strip() for part in line.split("|"))
    fastest = rows["median_us"][of_torch]
    assert torch.startswith(f"{fastest.min():.0f}") and torch.endswith(f"(`{fastest.idxmin()}`)")
    assert lead == f"{fastest.min() / best['median_us']:.2f}x"
    if bench == "ep_training":
        flops = 3 * 6 * best["tokens"] * best["top_k"] * best["hidden"] * best["intermediate"] / 2
        assert rate == f"{flops / best['median_us'] / 1e6:.0f} TFLOP/s"
    else:
        sent = max(best["rank_deduplicated_bytes"]) / best["median_us"] / 1e3
        assert rate == f"{sent:.0f} GB/s, {100 * sent / best['peer_copy_gb_per_s']:.0f} %"
