"""The rows of a run over earlier ones, on rows whose changes are planted."""

import re

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from rows import rows
from typer.testing import CliRunner

from browser import asked
from moe_routing_bench.cli.main import app
from moe_routing_bench.comparison import runs
from moe_routing_bench.comparison.runs import history
from moe_routing_bench.store.records import SCHEMA
from moe_routing_kernels.errors import UserError


def table(factor=1.0, seed=0):
    """A run whose times are `factor` times those of the synthetic rows, with 20 blocks each."""
    rng = np.random.default_rng(seed)
    found = rows().query("status == 'ok' and bench == 'pack'").reset_index(drop=True)
    medians = [list(factor * us * np.exp(rng.normal(0, 0.001, 20))) for us in found["median_us"]]
    return found.assign(block_medians_us=medians, median_us=[float(np.median(one)) for one in medians])


def test_every_row_over_the_runs_that_timed_it():
    """Oldest first, with the verdict of each pair of runs; a run that lacks a row leaves it out; what is new now has no history."""
    old, middle, now = table(1.5), table(1.001, 1).drop(index=0), table(1.0, 2)
    found = history({"old": old.drop(index=1), "middle": middle}, now.drop(index=2))
    assert len(found) == len(now) - 1
    by_row = {(one.cell, one.implementation): one for one in found}
    of = [by_row.get((now["cell"][i], now["implementation"][i])) for i in range(4)]
    assert (
        [then.run for then in of[0].then] == ["old"] and [then.run for then in of[1].then] == ["middle"] and not of[2]
    )
    assert [(then.run, then.verdict) for then in of[3].then] == [("old", "faster"), ("middle", "same")]
    first = of[3].then[0]
    assert first.ratio == pytest.approx(1.5, rel=0.01) and first.low < first.ratio < first.high
    assert of[3].us == now["median_us"][3] and first.us == old["median_us"][3]
    elsewhere = {"elsewhere": old.assign(gpu_name="another")}
    with pytest.raises(UserError, match="runs of one kind of device"):
        history(elsewhere, now)
    assert len(history(elsewhere, now, across=True)) == len(now)
    with pytest.raises(UserError, match="no cell and implementation in common"):
        history({"old": old.assign(tokens=old["tokens"] + 1)}, now)


@pytest.mark.slow
def test_the_page(tmp_path, monkeypatch):
    """What changed first, in columns of runs, with a picture where there are two; nothing sticks out on a phone."""
    monkeypatch.chdir(tmp_path)
    changed = table(1.0, 1)
    for name in ("median_us", "block_medians_us"):
        changed[name] = [np.asarray(one) * (1.2 if i == 5 else 1) for i, one in enumerate(changed[name])]
    for name, one in (("a", table()), ("b", changed), ("c", table(1.0, 2))):
        pq.write_table(pa.Table.from_pandas(one, SCHEMA, preserve_index=False), f"{name}.parquet")
    call = CliRunner().invoke
    done = call(app, ["history", "a.parquet", "b.parquet", "c.parquet", "--html", "compare-history.html"])
    assert done.exit_code == 0 and f"{len(changed)} rows of c.parquet" in done.output, done.output
    text = (tmp_path / "compare-history.html").read_text()
    assert f"1 of {len(changed)} rows changed" in text and text.count("<svg") == len(changed)
    assert re.search(r"<tbody>\n<tr>.*1\.(20|199)\d*x \[1\.\d+, 1\.2\d*\], faster", text), (
        "the row that changed is the first"
    )
    script = "const wide = document.documentElement.clientWidth; return [document.documentElement.scrollWidth <= wide, document.querySelectorAll('#histories tbody tr').length]"
    assert asked(tmp_path / "compare-history.html", script, width=390) == [True, len(changed)]
    with pytest.raises(UserError, match="two or more, each once"):
        call(app, ["history", "a.parquet", "a.parquet", "--html", "page.html"], catch_exceptions=False)


@pytest.mark.parametrize("names", [["a.parquet"], ["a.parquet"] * 2, ["a.parquet", "b.parquet", "a.parquet"]])
def test_a_run_has_no_history_in_itself(names):
    with pytest.raises(UserError, match="two or more, each once"):
        CliRunner().invoke(app, ["history", *names, "--html", "page.html"], catch_exceptions=False)


def test_it_reads_what_a_comparison_reads():
    found = history({"old": table()[list(runs.COLUMNS)]}, table(1.0, 3)[list(runs.COLUMNS)])
    assert len(found) == len(table())
