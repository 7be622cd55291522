"""Numbers in prose that no generated block holds: each is computed from stored rows, and stands in its document."""

import re
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from moe_routing_kernels.formats import FORMATS

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
H200 = "nvidia-h200"


def stored(run: str = H200, name: str = "measurements") -> pd.DataFrame:
    rows = pd.read_parquet(ROOT / f"results/{run}/{name}.parquet")
    return rows[rows["status"] == "ok"]


def text_of(name: str) -> str:
    return re.sub(r"\s+", " ", (ROOT / name).read_text())


def test_what_formats_lose_is_said_of_the_stored_comparisons() -> None:
    rows = stored("nvidia-h200.quantised", "accuracy")
    formats = set(rows["weights"]) - set(FORMATS)
    (commit,) = rows["git_sha"].str[:7].unique()
    assert (rows["of_bound"].dropna() <= 1).all() and (rows["kernel_error"].dropna() <= rows["tolerance"]).all()
    said = f"all {len(formats)} formats, and bf16 and fp16, were right in all {len(rows)} comparisons"
    assert said in text_of("docs/quantised.md") and f"commit {commit})." in text_of("docs/quantised.md")


def test_no_row_of_the_routing_grid_is_in_doubt() -> None:
    rows = stored()
    assert rows["anomaly"].isna().all()
    assert f"None of the {len(rows)} measured rows of the routing grid" in text_of("docs/method.md")


def test_the_largest_error_of_a_gate_is_that_of_the_rows() -> None:
    rows = stored().query("bench == 'gate' and implementation in ('torch', 'triton', 'cute')")
    assert f"in the stored H200 rows is {rows['rel_l2_error'].max():.1e}".replace("e-0", "e-") in text_of(
        "docs/method.md"
    )


def test_how_many_cards_measured_a_run() -> None:
    """One each, but for those that are named, and one commit; a run that is added or measured anew is named, too."""
    words = {2: "two", 3: "three"}
    runs = sorted(path.parent.name for path in ROOT.glob(f"results/{H200}*/measurements.parquet"))
    cards = {run: stored(run)["gpu_uuid"].nunique() for run in runs}
    assert all(stored(run)["git_sha"].nunique() == 1 for run in runs)
    several = {run.removeprefix(f"{H200}."): number for run, number in cards.items() if number > 1}
    sentence = text_of("docs/method.md").partition("from one card, but for ")[2].partition(". Runs differ")[0]
    assert set(re.findall(r"seed-[\w-]+", sentence)) == set(several)
    for run, number in several.items():
        assert words[number] in re.split(rf"{run}\b(?!-)", sentence)[1].partition(")")[0]


def test_layers_without_gpt_oss_beside_sonicmoe() -> None:
    """Over the cells with even loads in which it ran; and which rows are suspect or did not converge."""
    rows, said = stored(f"{H200}.layers"), text_of("docs/experts.md")
    medians = rows[rows["skew"] == 0].pivot(index="cell", columns="implementation", values="median_us")
    ratios = (medians["sonicmoe"] / medians[["cute", "cute_gather"]].min(axis=1)).dropna()
    assert f"{np.exp(np.log(ratios).mean()):.2f}x SonicMoE alone" in said and len(ratios) == 9
    assert f"{(~rows['converged'].astype(bool)).sum()} of {len(rows)} rows did not converge" in said
    suspect = rows[rows["suspect"].fillna(False).astype(bool)]
    drifts = suspect["suspect_reason"].str.extract(r"drifted ([\d.]+)%")[0].astype(float)
    assert suspect["cell"].nunique() == 3 and f"drifted by {drifts.min()} to {drifts.max()} %" in said
    assert f"busy for {100 * rows['busy_share'].min():.0f} to {100 * rows['busy_share'].max():.1f} %" in said


@pytest.mark.parametrize(
    "name",
    [
        "docs/columns.md",
        "src/moe_routing_bench/figures/captions.yaml",
        "src/moe_routing_bench/report/templates/compare.js",
    ],
)
def test_ratios_are_not_said_to_be_of_rounds_where_rows_have_none(name: str) -> None:
    """Rows in long turns, whose blocks make pairs by their number, have ratios to others, too."""
    rows = stored(f"{H200}.layers")
    assert (rows["turns"] == "long").all() and rows["best_speedup"].notna().any()
    assert "within rounds" not in text_of(name)
