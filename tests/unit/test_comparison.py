"""One run against another: what pairs, what counts as a change, and what stops a CI."""

import re
import subprocess

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from rows import rows
from typer.testing import CliRunner

from moe_routing_bench.cli.main import app
from moe_routing_bench.comparison import runs, verdicts
from moe_routing_bench.store.records import SCHEMA
from moe_routing_kernels.errors import UserError


def table(factor: float = 1.0, noise: float = 0.001, **change: object) -> pd.DataFrame:
    """A run whose times are `factor` times those of the synthetic rows of one skew, with 20 blocks each."""
    rng = np.random.default_rng(0 if factor == 1 else 1)
    found = rows().query("status == 'ok' and bench in ('pack', 'layer') and skew == 0.7").reset_index(drop=True)
    medians = [list(factor * us * np.exp(rng.normal(0, noise, 20))) for us in found["median_us"]]
    found = found.assign(block_medians_us=medians, median_us=[float(np.median(one)) for one in medians])
    return found.assign(**change)[list(runs.COLUMNS)]


def test_a_run_is_the_same_as_itself():
    found = runs.compare(table(), table())
    assert found.counts() == {"same": len(table())} and not found.marks and found.worse(0).empty
    numbered = table().set_axis(range(7, 7 + len(table())))
    assert runs.compare(numbered, table()).counts() == {"same": len(table())}, "rows have their keys, not their numbers"


@pytest.mark.parametrize(("factor", "verdict"), [(1.1, "slower"), (0.9, "faster"), (1.01, "same")])
def test_a_change_beyond_the_floor(factor, verdict):
    """A run without twins has a floor of 2 %."""
    found = runs.compare(table(), table(factor))
    assert found.counts() == {verdict: len(table())}
    assert found.rows["ratio"].astype(float).median() == pytest.approx(1 / factor, rel=0.01)
    assert len(found.worse(0.03)) == (len(table()) if factor == 1.1 else 0) and found.worse(0.12).empty


def test_worse_by_more_than_a_share():
    """Of the time before: exactly so much is not more; and what has lost its time is worse than any."""
    rows = [
        ("slower", 100.0, 150.0),
        ("slower", 100.0, 151.0),
        ("faster", 100.0, 200.0),
        ("no longer ok", 100.0, np.nan),
    ]
    found = runs.Comparison(pd.DataFrame(rows, columns=["verdict", "before_us", "after_us"]))
    assert list(found.worse(0.5).index) == [1, 3] and list(found.worse(0.49).index) == [0, 1, 3]
    assert found.counts() == {"slower": 2, "faster": 1, "no longer ok": 1} and found.marks == []


def test_the_device_s_own_drift_is_no_change():
    """A card whose copy is 10 % slower; for a bench with FLOPs the matrix product counts as well."""
    found = runs.compare(table(), table(1.08, copy_gb_per_s=3600.0))
    assert set(found.rows["verdict"]) == {"same"}
    found = runs.compare(table(), table(1.08, peak_tflops=600.0)).rows
    assert set(found[found["bench"] == "pack"]["verdict"]) == {"slower"} and set(
        found[found["bench"] == "layer"]["verdict"]
    ) == {"same"}


def test_what_two_kinds_of_device_differ_by_is_compared():
    """Ceilings that are 30 % apart are no drift there, and hide nothing; another CPU beside the same GPU is no other device."""
    for change, across, verdict in (({"gpu_name": "NVIDIA H100"}, True, "slower"), ({"cpu_model": "D"}, False, "same")):
        found = runs.compare(table(), table(1.4, copy_gb_per_s=2800.0, **change), across=True)
        assert (found.across, set(found.rows["verdict"])) == (across, {verdict})
    cpu = {"gpu_name": None, "gpu_uuid": None}
    found = runs.compare(table(**cpu), table(1.4, copy_gb_per_s=2800.0, cpu_model="D", **cpu), across=True)
    assert found.across and set(found.rows["verdict"]) == {"slower"}


def test_twins_set_the_floor():
    """Equals that differ by 0.1 % let a change of 1 % be seen; equals that differ by 5 % hide one of 4 %."""
    for gap, factor, verdict in ((1.001, 1.01, "slower"), (1.05, 1.04, "same")):
        found = runs.compare(table(twin_speedup=gap), table(factor, twin_speedup=gap))
        assert found.counts() == {verdict: len(table())}


def test_the_floor_is_that_of_the_noisier_run():
    """Whichever of the two it is; where the device moved more than either, it is that."""
    quiet, noisy = table(twin_speedup=1.001), table(twin_speedup=1.05)
    known = sorted(verdicts.floors(noisy))
    assert known[0] == pytest.approx(np.log(1.05))
    for pair in ((quiet, noisy), (noisy, quiet)):
        assert sorted(runs.compare(*pair).rows["floor"].astype(float)) == pytest.approx(known)
    found = runs.compare(quiet, noisy.assign(copy_gb_per_s=quiet["copy_gb_per_s"] * 1.3)).rows
    assert found["floor"].astype(float).tolist() == pytest.approx([np.log(1.3)] * len(quiet))


def test_what_changed_most_comes_first():
    """Slower or faster alike; what has no ratio comes last."""
    found = runs.Comparison(pd.DataFrame({"ratio": [1.1, np.nan, 0.7, 1.2]}, dtype=object))
    assert list(found.changed().index) == [2, 3, 0, 1]


def test_rows_of_one_run_only_and_lost_ones():
    """None is left out in silence, and what is no longer right is worse than slow."""
    before, after = table(), table()
    before.loc[0, "status"], after.loc[1, "status"], after.loc[1, "reason"] = "crashed", "incorrect", "NaN"
    found = runs.compare(before.drop(index=3), after.drop(index=4))
    counts = found.counts()
    assert (counts.pop("same"), counts) == (
        len(before) - 4,
        {"ok now": 1, "no longer ok": 1, "only before": 1, "only after": 1},
    )
    assert list(found.worse(0.5)["reason"]) == ["NaN"]
    cells = runs.compare(before.assign(cell="before").drop(index=3), after.assign(cell="after")).rows
    assert cells["cell"].value_counts().to_dict() == {"after": len(before)}, "of both, that of the later run"
    cells = runs.compare(before.assign(cell="before"), after.assign(cell="after").drop(index=4)).rows
    assert list(cells.loc[cells["cell"] == "before", "verdict"]) == ["only before"]


def test_what_never_ran_has_no_row():
    assert len(runs.compare(table(status="unsupported"), table(status="unsupported")).rows) == 0


def test_other_cards_are_refused_and_versions_are_marked():
    other = table(gpu_name="NVIDIA H100")
    with pytest.raises(UserError) as error:
        runs.compare(table(), other.assign(cpu_model="D"))
    marks = "gpu_name: NVIDIA H200 before, NVIDIA H100 after; cpu_model: C before, D after"
    assert (
        str(error.value)
        == f"runs: got '{marks}'; allowed: runs of one kind of device; hint: --across compares them all the same"
    )
    assert runs.compare(table(), other, across=True).marks == ["gpu_name: NVIDIA H200 before, NVIDIA H100 after"]
    assert runs.compare(table(), table(torch_version="3")).marks == ["torch_version: 2 before, 3 after"]


def test_runs_of_different_grids_and_doubled_rows():
    with pytest.raises(UserError) as error:
        runs.compare(table(), table(tokens=table()["tokens"] + 1))
    assert str(error.value) == "runs: got 'no cell and implementation in common'; allowed: at least one"
    with pytest.raises(UserError) as error:
        runs.compare(table(), pd.concat([table(), table()], ignore_index=True))
    assert str(error.value) == """run: got "('pack', 'torch') twice"; allowed: one row per cell and implementation"""


def test_rows_from_before_an_axis_was_there_are_found():
    """As if every row had its default; integers stay integers where others miss."""
    old = table(layout=None, packed=None)
    new = table().assign(packed=lambda rows: rows["dtype"])
    new["layout"] = new["bench"].map({"pack": "compact"})  # layer reads none
    assert runs.compare(old, new).counts() == {"same": len(new)}
    new["top_k"] = new["top_k"].astype(float)
    assert runs.compare(old, new).counts() == {"same": len(new)}


def stored(path, frame: pd.DataFrame):
    full = (
        rows()
        .query("status == 'ok' and bench in ('pack', 'layer') and skew == 0.7")
        .reset_index(drop=True)
        .assign(**frame.to_dict("series"))
    )
    pq.write_table(pa.Table.from_pandas(full, schema=SCHEMA, preserve_index=False), path)
    return str(path)


def test_command(tmp_path, monkeypatch):
    """Paths, folders of results and commits; the exit status is for a CI, and the page has every row."""
    monkeypatch.chdir(tmp_path)
    slow = table(1.2)
    slow.loc[0, "status"] = "crashed"
    before, after = stored(tmp_path / "a.parquet", table()), stored(tmp_path / "b.parquet", slow)
    call = CliRunner().invoke
    done = call(app, ["compare", before, after, "--html", "page.html"])
    assert done.exit_code == 0 and f"{len(slow)} rows: {len(slow) - 1} slower, 1 no longer ok" in done.output
    page = (tmp_path / "page.html").read_text()
    assert page.count("<tr>") == 1 + len(slow) and "no longer ok: crashed" in page and "drift of the device" in page
    other = stored(tmp_path / "c.parquet", table(1.2, gpu_name="NVIDIA H100"))
    assert call(app, ["compare", before, other, "--across", "--html", "page.html", "--force"]).exit_code == 0
    assert "devices are of two kinds" in (page := (tmp_path / "page.html").read_text()) and "drift" not in page
    done = call(app, ["compare", before, after, "--fail-if-slower", "3%"])
    assert done.exit_code == 1 and f"or lost: {len(slow)} rows" in done.output
    assert call(app, ["compare", before, after, "--fail-if-slower", "50"]).exit_code == 1  # the lost one
    assert call(app, ["compare", after, before, "--fail-if-slower", "3%"]).exit_code == 0

    (tmp_path / "results/cpu").mkdir(parents=True)
    stored(tmp_path / "results/cpu/measurements.parquet", table())
    for command in (("init", "-q"), ("add", "."), ("-c", "user.name=n", "-c", "user.email=e", "commit", "-qm", "a")):
        subprocess.run(["git", *command], check=True)
    changed = table(1.2)
    changed.loc[3, "median_us"] *= 2
    changed.at[3, "block_medians_us"] = [2 * us for us in changed.loc[3, "block_medians_us"]]
    stored(tmp_path / "results/cpu/measurements.parquet", changed)
    done = call(app, ["compare", "HEAD:cpu", "cpu", "--most", "2"])
    assert done.exit_code == 0 and f"{len(slow)} rows: {len(slow)} slower" in done.output
    assert done.output.count(" slower") == 3 and " 0.41" in done.output, "the greatest changes are printed"
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], check=True, capture_output=True, text=True
    ).stdout.strip()
    assert call(app, ["compare", "HEAD:cpu", "cpu", "--html", "page.html", "--force"]).exit_code == 0
    page = (tmp_path / "page.html").read_text()
    assert f"cpu against {commit}:cpu" in page and "HEAD" not in page, "HEAD is another commit tomorrow"


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["nowhere", "cpu"], "there is no results/nowhere/measurements.parquet"),
        (["no-commit:cpu", "cpu"], "run: got 'no-commit:results/cpu/measurements.parquet'"),
        (["text.parquet", "cpu"], "measurements: got 'text.parquet'; allowed: a readable Parquet file"),
        (["other.parquet", "cpu"], "columns of other.parquet: got 'no bench'"),
        (["cpu", "cpu", "--fail-if-slower", "much"], "--fail-if-slower: got 'much'; allowed: a percentage such as 3%"),
    ],
)
def test_bad_input_of_the_command(arguments, text, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text.parquet").write_text("text")
    pq.write_table(pa.table({"a": [1]}), tmp_path / "other.parquet")
    with pytest.raises(UserError, match=re.escape(text)) as error:
        CliRunner().invoke(app, ["compare", *arguments], catch_exceptions=False)
    assert "\n" not in str(error.value)
