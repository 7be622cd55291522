"""The table of power: its noise is that of the stored rows, and a kind simulated anew finds as much."""

import csv
import importlib
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[2] / "docs"


def test_the_table_is_that_of_the_stored_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("torch")
    monkeypatch.syspath_prepend(DOCS)
    power = importlib.import_module("power")
    with power.OUT.open() as file:
        stored = {line["kind"]: line for line in csv.DictReader(file)}
    found = {line["kind"]: line for line in power.lines(simulate={"router"})}
    assert found.keys() == stored.keys()
    for kind, line in found.items():
        assert {name: str(power.text(value)) for name, value in line.items()} == {
            name: stored[kind][name] for name in line
        }
    assert {"1%", "2%"} < found["router"].keys() and not {"1%"} & found["gate"].keys()
