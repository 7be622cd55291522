"""The A/A table: kinds, how far apart twins are, and what of them is called different."""

import importlib
from pathlib import Path

import pandas as pd
import pytest

TWIN = {
    "bench": "gate",
    "phase": None,
    "dtype": "bf16",
    "weights": "bf16",
    "status": "ok",
    "turns": "short",
    "median_us": 50.0,
}


@pytest.fixture
def tables(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.syspath_prepend(Path(__file__).parents[2] / "docs")
    return importlib.import_module("twins")


def twin(ratio: float, **values: object) -> dict[str, object]:
    ends = {"twin_speedup_ci_low": ratio * 0.999, "twin_speedup_ci_high": ratio * 1.001, "twin_speedup_p": 1e-6}
    return TWIN | {"twin_speedup": ratio} | ends | values


def test_a_line_per_kind(tables):
    """Twenty gates within 0.1 %, one of 4 % that the rule calls different, and a quantised one in long turns."""
    rows = [twin(1.0005 if i % 2 else 1 / 1.0005) for i in range(20)] + [twin(1.04)]
    rows += [twin(1.0, bench="experts", weights="int4_g128", turns="long"), twin(1.0, bench="layer", phase="decode")]
    rows += [twin(2.0, status="incorrect"), twin(1.0) | {"twin_speedup": None}]
    decode, gates, *others = tables.lines(
        tables.among(pd.DataFrame([dict.fromkeys(tables.KEPT) | row for row in rows]))
    )
    assert (decode["kind"], decode["twins"]) == ("decode layer", "1")
    assert (gates["twins"], gates["most"], gates["intervals without 1"]) == ("21", "3.92", "1")
    assert gates["called different"] == "1 of 21" and gates["median"] == "0.05"
    assert [(line["kind"], line["twins"], line["in long turns"]) for line in others] == [
        ("quantised", "1", "1"),
        ("all", "23", "1"),
    ]


def test_twins_of_stored_rows_and_of_the_file_count(tables, tmp_path):
    stored = pd.DataFrame([dict.fromkeys(tables.KEPT) | twin(1.01)])
    tables.among(stored.assign(bench="pack")).to_csv(tmp_path / "twins.csv")
    assert [*tables.known(tmp_path, stored)["kind"]] == ["gate", "pack"]
