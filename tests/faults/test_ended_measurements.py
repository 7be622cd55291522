"""Rows that are measured are printed or kept, however `measure` ends: by a signal, by an error of a later cell, or by an output that fails."""

import csv
import errno
import io
import json
import os
import resource
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path

import pytest

from moe_routing_bench.cli import main as cli
from moe_routing_bench.cli import printing
from moe_routing_bench.measure import processes, supervisor
from moe_routing_bench.store import records, rows
from moe_routing_kernels.errors import UserError
from signals import commands, interruptible

ROOT = Path(__file__).parents[2]
TOKENS = (8, 16, 24)
MEASURE = ["measure", "gate", "--implementations", "torch", "--tokens", ",".join(map(str, TOKENS))]
FORMS = {"table": [], "json": ["--json"], "csv": ["--csv"]}


def row_of(job, *_) -> list[dict]:
    return [
        {
            "schema_version": rows.SCHEMA_VERSION,
            "bench": "gate",
            "cell": job.cell.key,
            "implementation": "torch",
            "status": "ok",
            "median_us": float(job.cell.tokens),
            "tokens": job.cell.tokens,
        }
    ]


def tokens_in(text: str, form: str) -> list[int]:
    """The cells whose rows a text has, by their tokens."""
    if form == "json":
        return [row["tokens"] for row in json.loads(text)]
    if form == "csv":
        return [int(row["tokens"]) for row in csv.DictReader(io.StringIO(text))]
    return [tokens for tokens in TOKENS if f"gate T{tokens}-" in text and f" {tokens}.00 " in text]


class Started:
    """The command in a fork of this process; its cells take no time, but the last one does what it is told."""

    def __init__(
        self,
        *arguments: str,
        last: Callable[[], object],
        cells: list[str] = MEASURE,
        folder: Path | None = None,
        stdout: int | None = None,
        ignored: tuple = (),
    ) -> None:
        """`folder` is for temporary files; `stdout` is a descriptor in place of a pipe; `ignored` are signals."""
        out, send = os.pipe()
        error, complain = os.pipe()
        if (pid := os.fork()) == 0:
            os.dup2(send if stdout is None else stdout, 1)
            os.dup2(complain, 2)
            os.closerange(3, 256)
            self._child([*cells, *arguments], last, folder, ignored)
        os.close(send)
        os.close(complain)
        self.pid, self.out, self.error = pid, os.fdopen(out), os.fdopen(error)

    def _child(self, arguments: list[str], last: Callable[[], object], folder: Path | None, ignored: tuple) -> None:
        code = 99
        try:
            sys.stdout, sys.stderr = os.fdopen(1, "w", closefd=False), os.fdopen(2, "w", 1, closefd=False)
            tempfile.tempdir = folder and str(folder)
            for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
                signal.signal(
                    number,
                    signal.SIG_IGN
                    if number in ignored
                    else signal.default_int_handler
                    if number == signal.SIGINT
                    else signal.SIG_DFL,
                )

            def measure(job, *_):
                if job.cell.tokens == 24:
                    last()
                return row_of(job)

            supervisor.measure = measure
            sys.argv = ["moe-routing-bench", *arguments]
            cli.main()
        except SystemExit as error:
            code = error.code or 0
            sys.stdout.flush()
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stderr.flush()
            os._exit(code)

    def at_the_last(self) -> "Started":
        """Wait until the last cell is measured."""
        assert any("measuring the last one" in line for line in self.error), "it has ended before"
        return self

    def send(self, number: int) -> None:
        os.kill(self.pid, number)

    def ended(self) -> tuple[int, str, str]:
        """Exit status, and what is left of stdout and stderr."""
        with self.out, self.error:
            out, error = self.out.read(), self.error.read()
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1]), out, error


def wait() -> None:
    print("measuring the last one", file=sys.stderr, flush=True)
    time.sleep(60)


@pytest.mark.fault("signal")
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP], ids=lambda number: number.name)
def test_a_signal_costs_no_finished_cell(number, form) -> None:
    process = Started(*FORMS[form], last=wait).at_the_last()
    process.send(number)
    code, out, error = process.ended()
    assert code == 128 + number
    assert tokens_in(out, form) == [8, 16] and "Traceback" not in error
    assert f"{number.name}: the rows are those of 2 of 3 cells\n" in error


@pytest.mark.fault("signal")
@pytest.mark.parametrize("form", FORMS)
def test_further_signals_break_no_row(form) -> None:
    """Impatient users send several, and so do `timeout` and schedulers."""
    process = Started(*FORMS[form], last=wait).at_the_last()
    for _ in range(200):
        process.send(signal.SIGTERM)
        process.send(signal.SIGINT)
        time.sleep(0.0001)
    code, out, error = process.ended()
    assert code in (130, 143) and tokens_in(out, form) == [8, 16], error
    assert "of 2 of 3 cells" in error


@pytest.mark.fault("signal")
@pytest.mark.parametrize(("form", "text"), [("json", "[]\n"), ("csv", ""), ("table", "")])
def test_a_signal_before_the_first_row_leaves_a_document(form, text) -> None:
    """An empty list is JSON; an empty text is not."""
    process = Started(*FORMS[form], "--tokens", "24", last=wait, cells=MEASURE[:-2]).at_the_last()
    process.send(signal.SIGTERM)
    code, out, error = process.ended()
    assert (code, out) == (143, text) and "0 of 1 cell\n" in error


@pytest.mark.fault("signal")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGHUP, signal.SIGTERM], ids=lambda number: number.name)
def test_a_signal_that_is_ignored_stays_so(number) -> None:
    """As SIGHUP is after `nohup`: all cells are measured."""
    process = Started("--json", last=lambda: os.kill(os.getpid(), number), ignored=(number,))
    code, out, error = process.ended()
    assert code == 0 and tokens_in(out, "json") == list(TOKENS), error


@pytest.mark.fault("signal")
def test_sigterm_counts_where_sigint_is_ignored() -> None:
    """A shell's job in the background ignores SIGINT."""
    process = Started("--json", last=wait, ignored=(signal.SIGINT,)).at_the_last()
    process.send(signal.SIGINT)
    process.send(signal.SIGTERM)
    code, out, _ = process.ended()
    assert code == 143 and tokens_in(out, "json") == [8, 16]


@pytest.mark.fault("signal")
@pytest.mark.parametrize("form", FORMS)
def test_a_signal_while_rows_are_printed_waits(form) -> None:
    """They are printed once, and whole."""

    def while_printing() -> None:
        results, document = printing.results, json.dump

        def interrupted(*arguments, **options):
            os.kill(os.getpid(), signal.SIGTERM)
            return (results if form == "table" else document)(*arguments, **options)

        printing.results = interrupted
        printing.json.dump = interrupted

    process = Started(*FORMS[form], last=while_printing)
    code, out, error = process.ended()
    assert tokens_in(out, form) == list(TOKENS)
    assert code == (0 if form == "csv" else 143), error


@pytest.mark.fault("signal")
def test_a_worker_that_gets_sigterm_is_a_row_that_crashed() -> None:
    """It ends as it would without the command's own treatment of the signal, which a fork inherits."""
    options = ["gate", "--implementations", "torch", "--tokens", "8", "--max-seconds", "60", "--min-blocks", "5000"]
    process = subprocess.Popen(
        [sys.executable, "-m", "moe_routing_bench.cli", "measure", *options, "--json"],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    children, deadline = Path(f"/proc/{process.pid}/task/{process.pid}/children"), time.monotonic() + 60
    while not (workers := children.read_text().split()) and time.monotonic() < deadline:
        time.sleep(0.05)
    status = Path(f"/proc/{workers[0]}/status")
    while "State:\tZ" not in status.read_text() and time.monotonic() < deadline:
        os.kill(int(workers[0]), signal.SIGTERM)
        time.sleep(0.5)
        if not status.exists():
            break
    out, error = process.communicate(timeout=60)
    (row,) = json.loads(out)
    assert row["status"] == "crashed" and "SIGTERM" in row["reason"] and "KeyboardInterrupt" not in error


def started_beforehand(*arguments: str) -> subprocess.Popen:
    """`measure`, the leader of a session, once its worker is there."""
    process = subprocess.Popen(
        [sys.executable, "-m", "moe_routing_bench.cli", "measure", *arguments],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        preexec_fn=interruptible,
    )
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
    while not children.read_text() and process.poll() is None:
        time.sleep(0.001)
    assert process.poll() is None
    return process


def of_session(pid: int) -> list[list[str]]:
    """What the kernel counts of the processes of a session that have not ended."""
    stats = [processes.stat(f"/proc/{one}") for one, _ in commands()]
    return [stat for stat in stats if stat and stat[0] not in "ZX" and int(stat[3]) == pid]


@pytest.mark.fault("signal")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL], ids=lambda number: number.name)
def test_a_signal_before_the_options_are_read_leaves_no_worker(number) -> None:
    process = started_beforehand("gate")
    os.killpg(process.pid, number)
    process.communicate()
    assert process.returncode in (-number, 128 + number)
    deadline = time.monotonic() + 10
    while of_session(process.pid) and time.monotonic() < deadline:  # the kernel kills a worker after its parent
        time.sleep(0.01)
    assert not of_session(process.pid)


def test_a_mistake_leaves_no_worker() -> None:
    process = started_beforehand("gate", "--tokens", "8.5")
    out, error = process.communicate()
    assert (process.returncode, out) == (2, "") and len(error.splitlines()) == 1
    assert not of_session(process.pid)


@pytest.fixture
def call(monkeypatch, capsys, tmp_path):
    """Run `measure` here, with rows that are made up; return (exit status or error, stdout, stderr)."""
    monkeypatch.setattr(supervisor, "measure", row_of)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))

    def run(*arguments):
        monkeypatch.setattr(sys, "argv", ["moe-routing-bench", *MEASURE, *arguments])
        with pytest.raises((SystemExit, Exception)) as caught:
            cli.main()
        error = caught.value
        return (error.code or 0 if isinstance(error, SystemExit) else error), *capsys.readouterr()

    return run


def kept_in(folder: Path) -> list[int]:
    """The tokens of the rows in the one file that is kept."""
    (path,) = folder.glob("moe-routing-bench-rows-*.json")
    return tokens_in(path.read_text(), "json")


@pytest.mark.fault("error of a later cell")
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(
    "error",
    [UserError("no GPU is free"), RuntimeError("broken"), OSError(errno.EIO, "broken"), MemoryError("broken")],
    ids=lambda one: type(one).__name__,
)
def test_an_error_of_a_later_cell_costs_no_finished_one(call, monkeypatch, form, error) -> None:
    def measure(job, *_):
        if job.cell.tokens == 24:
            raise error
        return row_of(job)

    monkeypatch.setattr(supervisor, "measure", measure)
    code, out, said = call(*FORMS[form])
    assert code == (2 if isinstance(error, UserError) else error)
    assert tokens_in(out, form) == [8, 16] and "an error: the rows are those of 2 of 3 cells\n" in said


def test_an_error_of_the_first_cell_prints_nothing(call, monkeypatch) -> None:
    def measure(*_):
        raise UserError("no GPU is free")

    monkeypatch.setattr(supervisor, "measure", measure)
    code, out, said = call("--json")
    assert (code, out) == (2, "") and said.endswith("error: no GPU is free\n") and "the rows" not in said


@pytest.mark.fault("closed output")
@pytest.mark.parametrize("form", FORMS)
def test_a_reader_that_has_gone_costs_no_row(form, tmp_path) -> None:
    """`measure | head`, or a program in its place that has failed."""
    receive, send = os.pipe()
    os.close(receive)
    process = Started(*FORMS[form], last=bool, stdout=send, folder=tmp_path)
    os.close(send)
    code, _, error = process.ended()
    assert code == 1 and "Traceback" not in error and str(tmp_path) in error
    # Tables are printed one by one: nothing is measured for a reader that has gone.
    assert kept_in(tmp_path) == ([8] if form == "table" else list(TOKENS))


@pytest.mark.fault("full disk")
@pytest.mark.parametrize("form", FORMS)
def test_stdout_on_a_full_disk_costs_no_row(form, tmp_path) -> None:
    with open("/dev/full", "w") as full:
        code, _, error = Started(*FORMS[form], last=bool, stdout=full.fileno(), folder=tmp_path).ended()
    assert code == 2 and "Traceback" not in error
    assert "error: output: got 'stdout'; allowed: one that can be written; hint: No space left on device\n" in error
    assert kept_in(tmp_path) == ([8] if form == "table" else list(TOKENS))


@pytest.mark.fault("full disk")
def test_where_no_file_can_be_kept_stderr_has_the_rows() -> None:
    """Neither stdout nor a folder for temporary files takes them."""
    with open("/dev/full", "w") as full:
        code, _, error = Started("--json", last=bool, stdout=full.fileno(), folder=Path("/dev/null/none")).ended()
    assert code == 2 and tokens_in(error[error.index("[\n") : error.index("]\n") + 1], "json") == list(TOKENS)
    assert "kept in stderr: 3 rows\n" in error


@pytest.mark.fault("full disk")
def test_a_file_that_cannot_be_kept_whole_is_removed(tmp_path) -> None:
    def limited() -> None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (100, 100))

    with open("/dev/full", "w") as full:
        code, _, error = Started("--json", last=limited, stdout=full.fileno(), folder=tmp_path).ended()
    assert code == 2 and "kept in stderr: 3 rows\n" in error and not list(tmp_path.iterdir())


def test_rows_that_cannot_be_printed_are_kept(call, monkeypatch, tmp_path) -> None:
    """Whatever is wrong with printing them."""

    def broken(*_):
        raise KeyError("median_us")

    monkeypatch.setattr("moe_routing_bench.cli.printing.results", broken)
    code, _, said = call()
    assert isinstance(code, KeyError) and kept_in(tmp_path) == [8] and "an error: the rows" not in said


@pytest.fixture
def one_cell(call, monkeypatch):
    """`call` for one cell, with rows that its file takes."""
    monkeypatch.setattr("test_ended_measurements.MEASURE", [*MEASURE[:-1], "8"])
    return call


@pytest.mark.fault("full disk")
@pytest.mark.parametrize("form", FORMS)
def test_an_out_that_cannot_be_written_costs_no_column(one_cell, monkeypatch, tmp_path, form) -> None:
    """The table has some of the columns; a file that is kept has all."""

    def full(*_, **__):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(rows, "write_table", full)
    code, out, said = one_cell("--out", str(tmp_path / "cell.parquet"), *FORMS[form])
    assert code == 2 and "No space left on device" in said and tokens_in(out, form) == [8]
    assert kept_in(tmp_path) == [8] and "wrote" not in out + said and not (tmp_path / "cell.parquet").exists()


@pytest.mark.fault("signal")
def test_a_second_signal_while_the_last_rows_are_printed_does_nothing() -> None:
    """Where the reader is slow, and the user has no patience: the status is that of the first."""
    dump = json.dump

    def slow(*arguments, **options) -> None:
        time.sleep(1.1)
        os.kill(os.getpid(), signal.SIGINT)
        dump(*arguments, **options)

    def ended() -> None:
        printing.json.dump = slow
        os.kill(os.getpid(), signal.SIGTERM)

    code, out, error = Started("--json", last=ended).ended()
    assert code == 143 and tokens_in(out, "json") == [8, 16] and "of 2 of 3 cells\n" in error


@pytest.mark.fault("full disk")
def test_the_process_ends_in_order_on_a_full_disk(tmp_path) -> None:
    """Python itself writes what is left in stdout when it ends: by then there must be nothing."""
    script = "import sys; from moe_routing_bench.measure import supervisor; from moe_routing_bench.cli.main import main; supervisor.measure = lambda *_: [{'implementation': 'torch', 'status': 'ok'}]; main()"
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "-c", script, *MEASURE, "--json"],
            cwd=ROOT,
            env=os.environ | {"TMPDIR": str(tmp_path), "PYTHONUNBUFFERED": ""},
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
        )
    assert done.returncode == 2 and "Exception ignored" not in done.stderr and len(list(tmp_path.glob("moe-*"))) == 1


@pytest.mark.fault("signal")
def test_a_signal_while_an_out_is_written_waits(tmp_path) -> None:
    """The file is written, and the table printed."""
    path, write = tmp_path / "cell.parquet", rows.write_table

    def interrupted(*arguments, **options) -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        write(*arguments, **options)

    def while_writing() -> None:
        rows.write_table = interrupted

    code, out, _ = Started("--tokens", "24", "--out", str(path), last=while_writing, cells=MEASURE[:-2]).ended()
    assert code == 143 and records.read(path)["tokens"].to_pylist() == tokens_in(out, "table") == [24]


@pytest.mark.fault("closed output")
def test_an_out_is_written_though_nobody_reads_the_table(tmp_path) -> None:
    receive, send = os.pipe()
    os.close(receive)
    process = Started(
        "--tokens", "8", "--out", str(tmp_path / "cell.parquet"), last=bool, cells=MEASURE[:-2], stdout=send
    )
    os.close(send)
    code, *_ = process.ended()
    assert code == 1 and records.read(tmp_path / "cell.parquet")["tokens"].to_pylist() == [8]


@pytest.mark.fault("output that is there")
@pytest.mark.parametrize("force", [False, True])
def test_a_file_that_is_made_meanwhile_is_not_overwritten(one_cell, monkeypatch, tmp_path, force) -> None:
    path = tmp_path / "cell.parquet"

    def measure(job, *_):
        path.write_text("of another program")
        return row_of(job)

    monkeypatch.setattr(supervisor, "measure", measure)
    code, out, _ = one_cell("--out", str(path), *["--force"] * force)
    assert tokens_in(out, "table") == [8]
    if force:
        assert code == 0 and records.read(path)["tokens"].to_pylist() == [8]
    else:
        assert code == 2 and path.read_text() == "of another program" and kept_in(tmp_path) == [8]
