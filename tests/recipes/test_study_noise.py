"""What the notebook says of the first runs of study A0 follows from their rows."""

import re
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

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
        f"{RUNS['run'].nunique()} of 210 runs" in SECTION
        and f"is {last:.3f} bits per byte ({first:.3f} at half" in SECTION
    )
    assert f"a standard error of {last * np.sqrt(2 / 5):.3f} bits" in SECTION


def test_the_residual_is_that_of_known_rows() -> None:
    """Variant and seed effects of any size leave nothing; then an error of one run is spread as an additive model spreads it."""
    rows = pd.DataFrame(
        [("a", name, "plain", seed, 10 * ord(name) + seed) for name in "xyz" for seed in (1, 2, 3)],
        columns=["label", "router", "shared_gate", "seed", "bits_per_byte"],
    )
    assert residual(rows) == pytest.approx(0, abs=1e-9)
    rows.loc[0, "bits_per_byte"] += 1.0
    assert residual(rows) == pytest.approx(np.sqrt((2 / 3) ** 2 / 4))
