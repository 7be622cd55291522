"""Streams that are closed, full or broken: one line and exit status 2 where results are lost, and nothing where messages are."""

import functools
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from campaign import sampled

COMMAND = f"{sys.executable} -m moe_routing_bench.cli"
GATE = "measure gate --tokens 4 --experts 4 --top-k 2 --implementations torch --max-seconds 0.05"


def shell(line: str, folder: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["bash", "-c", line], cwd=folder, capture_output=True, text=True, timeout=100)


@functools.cache
def with_all_streams(arguments: str) -> subprocess.CompletedProcess[str]:
    """The same command once more, with every stream open."""
    return shell(f"{COMMAND} {arguments}", Path("/tmp"))


@pytest.mark.parametrize(
    ("arguments", "where"),
    [("--version", ">/dev/full"), ("--version", ">&-"), ("-h", ">/dev/full"), ("list --platform cpu", ">&-")],
)
def test_results_that_nothing_takes_are_a_line_and_status_2(arguments: str, where: str, tmp_path: Path) -> None:
    ended = shell(f"{COMMAND} {arguments} {where}", tmp_path)
    assert ended.returncode == 2
    (line,) = ended.stderr.splitlines()
    assert line.startswith("error: output: got 'stdout'; allowed: one that can be written; hint: ")


@pytest.mark.parametrize("where", [">/dev/full 2>/dev/full", ">&- 2>&-", ">&- 2>/dev/full <&-"])
def test_no_stream_at_all_is_status_2(where: str, tmp_path: Path) -> None:
    ended = shell(f"{COMMAND} --version {where}", tmp_path)
    assert (ended.returncode, ended.stdout, ended.stderr) == (2, "", "")


def test_a_message_is_in_its_file_at_once(tmp_path: Path) -> None:
    """A process that is killed has said what it was at."""
    code = "import os, sys; from moe_routing_bench import streams; streams.guard(); print('at work', file=sys.stderr); os._exit(3)"
    ended = shell(f'{sys.executable} -c "{code}" 2>said', tmp_path)
    assert ended.returncode == 3 and (tmp_path / "said").read_text() == "at work\n"


@pytest.mark.parametrize("where", ["2>/dev/full", "2>&-", "2>&- <&-"], ids=["full", "closed", "closed with stdin"])
@pytest.mark.parametrize(("arguments", "status"), [("--version", 0), ("--nothing", 2)])
def test_messages_that_nothing_takes_change_nothing(arguments: str, status: int, where: str, tmp_path: Path) -> None:
    """They do not go to stdout either, which Python has for what is printed to a stream that is closed."""
    heard, unheard = with_all_streams(arguments), shell(f"{COMMAND} {arguments} {where}", tmp_path)
    assert (unheard.returncode, unheard.stdout) == (heard.returncode, heard.stdout)
    assert heard.returncode == status


@pytest.mark.slow
@pytest.mark.parametrize("where", sampled(["2>/dev/full", "2>&-"], ["2>&-"]))
def test_measured_rows_are_whole_where_messages_go_nowhere(where: str, tmp_path: Path) -> None:
    ended = shell(f"{COMMAND} {GATE} --json {where}", tmp_path)
    assert ended.returncode == 0
    assert [row["status"] for row in json.loads(ended.stdout)] == ["ok"]


@pytest.mark.slow
@pytest.mark.campaign
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


HOSTILE = "a\x1b]0;title\x07\x1b[2J\u202eb\x9b1m\x00\rc"


@pytest.mark.fault("control characters", 3)
@pytest.mark.parametrize("stream", ["stdout", "stderr"])
def test_what_is_printed_holds_no_control_characters(stream: str, tmp_path: Path) -> None:
    """Whatever prints it: Python, a table, a traceback. What draws in colours does so on a terminal."""
    (tmp_path / "it.py").write_text(
        "import sys\n"
        "from rich.table import Table\n"
        "from moe_routing_bench import streams\n"
        "from moe_routing_bench.cli import printing\n"
        "streams.guard()\n"
        f"stream, text = sys.{stream}, {HOSTILE!r}\n"
        "table = Table(text, title=text)\n"
        "table.add_row(text)\n"
        "print(text, file=stream)\n"
        "sys.stdout = stream\n"
        "printing.show(table)\n"
        "streams.never_raise()\n"
        "print('é', file=stream)\n"
        "stream.flush()\n"
        "raise ValueError(text)\n"
    )
    ended = shell(f"{sys.executable} it.py", tmp_path)
    text = ended.stdout + ended.stderr
    assert text.count(r"\x1b]0;title") == 5 and "é" in text
    assert all(letter.isprintable() or letter == "\n" for letter in text)


def test_a_terminal_shows_colours_that_are_ours() -> None:
    """A table in a pseudo terminal has styles, and the texts of it none."""
    script = (
        "from rich.table import Table; from moe_routing_bench import streams; from moe_routing_bench.cli import printing\n"
        "streams.guard()\ntable = Table('name')\ntable.add_row('\\x1b[31mred')\nprinting.show(table)\nprint('\\x1b[31mred')"
    )
    master, slave = os.openpty()
    env = os.environ | {"TERM": "xterm-256color"}
    subprocess.run([sys.executable, "-c", script], stdout=slave, env=env, check=True, timeout=60)
    os.close(slave)
    shown = os.read(master, 10**5).decode()
    os.close(master)
    assert "\x1b[1m" in shown and shown.count(r"\x1b[31") == 2 and "\x1b[31m" not in shown
