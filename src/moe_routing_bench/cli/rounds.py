"""What `watch` is made of: files whose edits count, and a measurement that runs beside them and can be broken off."""

import ast
import shutil
import subprocess
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from moe_routing_bench import packages
from moe_routing_bench.benches.bench import Bench
from moe_routing_bench.benches.plugins import Plugin
from moe_routing_bench.grid.job import Job
from moe_routing_bench.measure import client, server
from moe_routing_bench.store import records
from moe_routing_kernels import closure
from moe_routing_kernels.errors import UserError


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
        found = {path for name in self._names for path in _files(self._bench, name)}
        held = {path: self._held.get(path) or _state(path) for path in found}
        for path, (_, content) in held.items():
            ast.parse(content, str(path))  # of a closure only the imports are parsed
        self._held = held

    def changed(self) -> list[Path]:
        """The files whose content has changed since this was last asked; a time that is new alone is no change."""
        found = []
        for path, (time_ns, content) in self._held.items():
            try:
                if path.stat().st_mtime_ns != time_ns:
                    self._held[path] = _state(path)
                    if self._held[path][1] != content:
                        found.append(path)
            except FileNotFoundError:
                continue  # an editor is about to put the new one in its place
        return found


def _files(bench: Bench, name: str) -> set[Path]:
    """The source files of an implementation, those of the parts that it names among them."""
    one = bench[name]
    stages = [stage for stage in bench.stages if stage.name in one.parts]
    found = {path for stage in stages for path in _files(bench.operation(stage), one.parts[stage.name])}
    return found | set(one.files() if isinstance(one, Plugin) else packages.closure(one.modules(bench.name)))


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
        """Break it off: the server ends a measurement for which nobody waits."""
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
            "--cli", "profile", str(rows), "--out", str(folder), "--force", "--only", ",".join(names)
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
    """Keeps the server from ending, which it does when nobody has called for two minutes: an edit may take longer."""

    _EVERY = server.IDLE_SECONDS / 2

    def __init__(self) -> None:
        """A measurement has just called it."""
        self._called = time.monotonic()

    def keep(self) -> None:
        """Call the server if it is time, and if there is one."""
        if time.monotonic() - self._called > self._EVERY:
            self._called = time.monotonic()
            command = client.command("--running", "--cli", "--version")
            subprocess.run(
                command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, check=False
            )
