"""examples/published_rows.ipynb: its cells run, and what DuckDB and polars find is what pandas does."""

import json
from pathlib import Path

import pandas as pd
import pytest

pytestmark = pytest.mark.slow

NOTEBOOK = Path(__file__).parents[2] / "examples/published_rows.ipynb"


def test_a_notebook_reads_the_published_rows_with_three_libraries(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("duckdb")
    pytest.importorskip("polars")
    monkeypatch.chdir(NOTEBOOK.parent)
    cells = json.loads(NOTEBOOK.read_text())["cells"]
    found: dict = {}
    for cell in cells:
        if cell["cell_type"] == "code":
            assert not cell["outputs"], "kept without outputs: run it"
            exec("".join(cell["source"]), found)
    ok = found["ok"]
    sound = ok[ok["cold"] & ~ok["suspect"].fillna(False).astype(bool)]
    by_pandas = sound.groupby(["bench", "implementation"])["share_of_copy"].agg(["size", "median"]).reset_index()
    by_sql = pd.DataFrame(found["shares"].fetchall(), columns=by_pandas.columns)
    pd.testing.assert_frame_equal(by_pandas, by_sql, check_dtype=False)
    assert len(by_pandas) > 20 and len(sound) < len(ok)
    gate = found["gate"]
    assert len(gate) > 5 and not gate.duplicated(["experts", "implementation"]).any(), (
        "a mean over rules would be none of these"
    )
    assert found["times"].notna().sum().sum() == len(gate)
