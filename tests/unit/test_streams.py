"""Streams that are closed, full or broken: one line and exit status 2 where results are lost, and nothing where messages are."""

import functools
import json
import subprocess
import sys
from pathlib import Path

import pytest

COMMAND = f"{sys.executable} -m moe_routing_bench.cli"
GATE = "measure gate --tokens 4 --experts 4 --top-k 2 --implementations torch --max-seconds 0.05"


def shell(line: str, folder: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["bash", "-c", line], cwd=folder, capture_output=True, text=True, timeout=100)


@functools.cache
def with_all_streams(arguments: str) -> subprocess.CompletedProcess[str]:
    """The same command once more, with every stream open."""
    return shell(f"{COMMAND} {arguments}", Path("/tmp"))


@pytest.mark.parametrize("arguments", ["--version", "-h", "list --platform cpu", "measure -h"])
@pytest.mark.parametrize("where", [">/dev/full", ">&-"], ids=["full", "closed"])
def test_results_that_nothing_takes_are_a_line_and_status_2(arguments: str, where: str, tmp_path: Path) -> None:
    ended = shell(f"{COMMAND} {arguments} {where}", tmp_path)
    assert ended.returncode == 2
    (line,) = ended.stderr.splitlines()
    assert line.startswith("error: output: got 'stdout'; allowed: one that can be written; hint: ")


@pytest.mark.parametrize("where", [">/dev/full 2>/dev/full", ">&- 2>&-", ">&- 2>/dev/full <&-"])
def test_no_stream_at_all_is_status_2(where: str, tmp_path: Path) -> None:
    ended = shell(f"{COMMAND} --version {where}", tmp_path)
    assert (ended.returncode, ended.stdout, ended.stderr) == (2, "", "")


@pytest.mark.parametrize("where", ["2>/dev/full", "2>&-", "2>&- <&-"], ids=["full", "closed", "closed with stdin"])
@pytest.mark.parametrize(("arguments", "status"), [("--version", 0), ("measure nothing", 2), ("--nothing", 2)])
def test_messages_that_nothing_takes_change_nothing(arguments: str, status: int, where: str, tmp_path: Path) -> None:
    """They do not go to stdout either, which Python has for what is printed to a stream that is closed."""
    heard, unheard = with_all_streams(arguments), shell(f"{COMMAND} {arguments} {where}", tmp_path)
    assert (unheard.returncode, unheard.stdout) == (heard.returncode, heard.stdout)
    assert heard.returncode == status


@pytest.mark.slow
@pytest.mark.parametrize("where", ["2>/dev/full", "2>&-"], ids=["full", "closed"])
def test_measured_rows_are_whole_where_messages_go_nowhere(where: str, tmp_path: Path) -> None:
    ended = shell(f"{COMMAND} {GATE} --json {where}", tmp_path)
    assert ended.returncode == 0
    assert [row["status"] for row in json.loads(ended.stdout)] == ["ok"]


@pytest.mark.slow
def test_measured_rows_are_kept_where_stdout_is_closed(tmp_path: Path) -> None:
    check_kept(f"{COMMAND} {GATE}", tmp_path)


# A supervisor that returns a row at once: neither torch nor a worker is started.
UNMEASURED = """
from moe_routing_bench.cli import main
from moe_routing_bench.measure import supervisor
supervisor.measure = lambda *_: [{"bench": "gate", "implementation": "torch", "status": "ok", "median_us": 1.5}]
main.main()
"""


@pytest.mark.parametrize("form", ["", "--json", "--csv"], ids=["table", "json", "csv"])
def test_rows_of_every_form_are_kept_where_stdout_is_closed(form: str, tmp_path: Path) -> None:
    (tmp_path / "unmeasured.py").write_text(UNMEASURED, encoding="utf-8")
    check_kept(f"{sys.executable} unmeasured.py {GATE} {form}", tmp_path)


def check_kept(command: str, folder: Path) -> None:
    """With stdout closed the row goes to a file, which a line on stderr names."""
    ended = shell(f"TMPDIR={folder} {command} >&-", folder)
    (kept,) = folder.glob("moe-routing-bench-rows-*.json")
    assert ended.returncode == 2 and [row["status"] for row in json.loads(kept.read_text())] == ["ok"]
    assert f"kept in {kept}: 1 row" in ended.stderr and "Traceback" not in ended.stderr
