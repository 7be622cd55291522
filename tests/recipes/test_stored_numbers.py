"""What prose says of stored rows in words: cards, commits, pairing. Its figures are computed (test_prose_numbers.py)."""

import re
from pathlib import Path

import pandas as pd
import pytest

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
H200 = "nvidia-h200"


def stored(run: str = H200, name: str = "measurements") -> pd.DataFrame:
    rows = pd.read_parquet(ROOT / f"results/{run}/{name}.parquet")
    return rows[rows["status"] == "ok"]


def text_of(name: str) -> str:
    return re.sub(r"\s+", " ", (ROOT / name).read_text())


def test_the_comparisons_of_formats_are_of_the_commit_that_is_named() -> None:
    (commit,) = stored("nvidia-h200.quantised", "accuracy")["git_sha"].str[:7].unique()
    assert f"commit {commit})." in text_of("docs/quantised.md")


def test_how_many_cards_measured_a_run() -> None:
    """One each, and one commit, but for those that are named; a run that is added or measured anew is named, too."""
    words = {2: "two", 3: "three", 6: "six"}
    runs = sorted(path.parent.name for path in ROOT.glob(f"results/{H200}*/measurements.parquet"))
    rows = {run.removeprefix(f"{H200}."): stored(run) for run in runs}
    several = {run: found["gpu_uuid"].nunique() for run, found in rows.items() if found["gpu_uuid"].nunique() > 1}
    by_card, by_commit = (
        text_of("docs/method.md").partition("from one card, but for ")[2].split(" Runs differ")[0].split(".", 1)
    )
    assert set(re.findall(r"\b(?:seed-[\w-]+|decode|layers|published)\b", by_card)) == set(several)
    for run, number in several.items():
        assert words[number] in re.split(rf"{run}\b(?!-)", by_card)[1].partition(")")[0]
    mixed = {run for run, found in rows.items() if found["git_sha"].nunique() > 1}
    assert set(re.findall(r"\b(?:seed-[\w-]+|decode|layers|published)\b", by_commit.partition(", whose")[0])) == mixed


@pytest.mark.parametrize(
    "name",
    [
        "src/moe_routing_bench/store/columns.yaml",
        "src/moe_routing_bench/figures/captions.yaml",
        "src/moe_routing_bench/report/templates/compare.js",
    ],
)
def test_ratios_are_not_said_to_be_of_rounds_where_rows_have_none(name: str) -> None:
    """Rows in long turns, whose blocks make pairs by their number, have ratios to others, too."""
    rows = stored(f"{H200}.layers")
    assert (rows["turns"] == "long").all() and rows["best_speedup"].notna().any()
    assert "within rounds" not in text_of(name)
