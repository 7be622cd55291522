"""A round of `watch`: the files whose edits count, the rivals that it has, and a measurement that an edit can break off."""

import ast
import importlib
import shutil
import subprocess
import time
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from moe_routing_bench import packages
from moe_routing_bench.benches.bench import Bench
from moe_routing_bench.benches.plugins import Plugin
from moe_routing_bench.grid.cell import Job
from moe_routing_bench.measure import client, server
from moe_routing_bench.store import platforms, records
from moe_routing_kernels import closure
from moe_routing_kernels.errors import UserError

Row = Mapping[str, Any]


class Rivals:
    """The rivals of the implementations that are being written, and which of them a round measures.

    The first round has all and finds the fastest, which later ones have alone. One that torch.compile makes, seconds in every process,
    is not made again: later rounds then have the bench's baseline, through which they are compared with it.
    """

    def __init__(self, bench: Bench, written: Iterable[str], names: Iterable[str]) -> None:
        """`mine` are those that are being written, `names` the rivals."""
        self._bench, self._mine = bench, set(written)
        self._names = [name for name in names if name not in self._mine]
        # The next round has these.
        self.rivals: list[str] = self._names.copy()
        if any(self._compiled(name) for name in self._names) and bench.baseline not in self._mine.union(self._names):
            self.rivals.append(bench.baseline)
        self._kept: tuple[Row, Row] | None = None  # of the first round: the fastest rival, and the baseline

    def choose(self, rows: Mapping[str, Row]) -> None:
        """Choose what later rounds have, from the rows of the first."""
        right = [name for name in self._names if rows[name]["status"] == "ok"]
        best = min(right, key=lambda name: rows[name]["median_us"], default=None)
        base = self._bench.baseline
        self.rivals = [best] if best else []
        if best and self._compiled(best) and base not in self._mine and rows[base]["status"] == "ok":
            self.rivals, self._kept = [base], (rows[best], rows[base])

    def said(self, row: Row, rows: Mapping[str, Row], last: Row | None) -> Iterator[str]:
        """The ratio to the best other, and to the last version where there is one, each with its verdict."""
        base = rows.get(self._bench.baseline)
        if self._kept and base and base["status"] == "ok":
            ratio, verdict = _chained(self._kept, (row, base))
            yield f"{ratio:.2f}x {self._kept[0]['implementation']} ({verdict}; that of round 1, by way of {base['implementation']})"
        elif row["best_other"]:
            ratio, verdict = _judged(*(row[f"best_speedup{end}"] for end in ("", "_ci_low", "_ci_high", "_p")))
            yield f"{ratio:.2f}x {row['best_other']} ({verdict})"
        if last:
            ratio, verdict = _versions(last, row)
            yield f"{ratio:.2f}x the last version ({verdict})"

    def _compiled(self, name: str) -> bool:
        return "compiler" in self._bench[name].requires


def _judged(ratio: float, low: float | None, high: float | None, p: float | None) -> tuple[float, str]:
    verdicts = importlib.import_module("moe_routing_bench.comparison.verdicts")  # pandas takes a second
    runs = importlib.import_module("moe_routing_bench.comparison.runs")
    numbers = [float("nan") if number is None else number for number in (low, high, p)]
    return ratio, verdicts.verdict(ratio, *numbers, runs.UNKNOWN_FLOOR)


def _chained(then: tuple[Row, Row], now: tuple[Row, Row]) -> tuple[float, str]:
    """How much faster `now` is than `then`, each a row and its baseline's of the same round: what has changed for both in
    between, as on a CPU, does not count."""
    intervals = importlib.import_module("moe_routing_bench.intervals")
    blocks = [[row["block_medians_us"] for row in pair] for pair in (then, now)]
    # A block with a hardware slowdown is left out of one row alone: its neighbours then pair with the next round's.
    shares = [[time / base for time, base in zip(*pair, strict=False)] for pair in blocks]
    known = [intervals.turns_of(pair[0]) for pair in (then, now)]
    turns = [one and one[: len(share)] for one, share in zip(known, shares, strict=True)]
    return _judged(*intervals.unpaired_ratio(*shares, tuple(turns)))


def _versions(last: Row, row: Row) -> tuple[float, str]:
    runs, pandas = (importlib.import_module(name) for name in ("moe_routing_bench.comparison.runs", "pandas"))
    (comparison,) = runs.compare(*(pandas.DataFrame([one]) for one in (last, row))).rows.to_dict("records")
    # Two processes, seconds apart: between them the other work of a CPU changes, which neither interval sees.
    return comparison["ratio"], comparison["verdict"] if row[
        "platform"
    ] != platforms.CPU else "not judged on a CPU, which drifts"


class Sources:
    """The files of implementations, by content: what they import from their package counts, its `__init__` files included."""

    def __init__(self, bench: Bench, names: Iterable[str]) -> None:
        """Read them. Raises `UserError` or SyntaxError for one that cannot be parsed."""
        self._bench, self._names = bench, tuple(names)
        self._held: dict[Path, tuple[float, bytes]] = {}
        self.read()

    @property
    def files(self) -> list[Path]:
        """The files that count, sorted."""
        return sorted(self._held)

    def read(self) -> None:
        """Find the files anew, as an edit may import another. Raises `UserError` or SyntaxError; the files then stay the same."""
        closure.forget()
        paths = {path for name in self._names for path in _files(self._bench, name)}
        contents = {path: self._held.get(path) or _state(path) for path in paths}
        for path, (_, content) in contents.items():
            ast.parse(content, str(path))  # of a closure only the imports are parsed
        self._held = contents

    def changed(self) -> list[Path]:
        """The files whose content has changed since this was last asked; a time that is new alone is no change."""
        changed = []
        for path, (time_ns, content) in self._held.items():
            try:
                if path.stat().st_mtime_ns != time_ns:
                    self._held[path] = _state(path)
                    if self._held[path][1] != content:
                        changed.append(path)
            except FileNotFoundError:
                continue  # an editor is about to put the new one in its place
        return changed


def _files(bench: Bench, name: str) -> set[Path]:
    """The source files of an implementation, those of the parts that it names among them."""
    implementation = bench[name]
    stages = [stage for stage in bench.stages if stage.name in implementation.parts]
    paths = {path for stage in stages for path in _files(bench.operation(stage), implementation.parts[stage.name])}
    return paths | set(
        implementation.files()
        if isinstance(implementation, Plugin)
        else packages.closure(implementation.modules(bench.name))
    )


def _state(path: Path) -> tuple[float, bytes]:
    return path.stat().st_mtime_ns, path.read_bytes()


class Round:
    """A measurement by the warm server, as one of the workflow's; the project and the implementation are imported afresh."""

    def __init__(self, job: Job, folder: Path) -> None:
        """Start it; its rows and its output go to files of `folder`."""
        self._out, self._log, self._began = folder / "rows.parquet", folder / "log", time.monotonic()
        self._bench = job.cell.bench
        self._out.unlink(missing_ok=True)
        with self._log.open("w", encoding="utf-8") as log:
            command = client.command(str(self._out), job.spec)
            self._process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log)

    @property
    def seconds(self) -> float:
        """How long it has run."""
        return time.monotonic() - self._began

    def over(self) -> bool:
        """Whether it has ended by itself."""
        return self._process.poll() is not None

    def end(self) -> None:
        """Break it off: the server ends a measurement whose caller is gone."""
        self._process.kill()
        self._process.wait()

    def rows(self) -> list[dict[str, Any]]:
        """Its rows. Raises `UserError` with its last words where it made none."""
        if self._process.returncode or not self._out.is_file():
            raise UserError(self.output().strip() or f"exit status {self._process.returncode}")
        return records.read(self._out).to_pylist()

    def profile(self, names: Iterable[str], folder: Path) -> str:
        """Profile implementations of it, into a folder that has its rows then; returns what `moe-routing-bench profile` prints."""
        folder.mkdir(parents=True, exist_ok=True)
        rows = folder / self._out.name
        shutil.copyfile(self._out, rows)
        command = client.command(
            "--module",
            "moe_routing_bench.cli",
            "profile",
            str(rows),
            "--out",
            str(folder),
            "--force",
            "--only",
            ",".join(names),
        )
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, encoding="utf-8", errors="replace", check=False
        )
        return (done.stdout + done.stderr).rstrip()

    def output(self) -> str:
        """What it has printed, which is the traceback of a crash: lines that say no more than the rows are left out."""
        lines = self._log.read_text(encoding="utf-8", errors="replace").splitlines()
        return "\n".join(line for line in lines if not line.startswith(f"{self._bench} "))


class Warmth:
    """Keeps the server from ending, which it does two minutes after the last call: an edit may take longer."""

    _EVERY = server.IDLE_SECONDS / 2

    def __init__(self) -> None:
        """A measurement has just called it."""
        self._called = time.monotonic()

    def keep(self) -> None:
        """Call the server if it is time, and if there is one."""
        if time.monotonic() - self._called > self._EVERY:
            self._called = time.monotonic()
            command = client.command("--running", "--module", "moe_routing_bench.cli", "--version")
            subprocess.run(
                command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, check=False
            )
