"""Tests on several workers, which are forks of the process that has collected them: `--workers 4`.

A worker that imports and collects for itself, as those of pytest-xdist do, takes a core 12 seconds before its first test, and 2.5 ms a
test to tell of it. Each worker takes the next file from a pipe; a file's tests run in one worker, so its fixtures are made once.
"""

import atexit
import contextlib
import ctypes
import os
import pickle
import selectors
import signal
import struct
import sys
import traceback
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import BinaryIO, Literal, cast

import pytest

NUMBER = struct.Struct("I")  # a file's, or a message's length
PR_SET_PDEATHSIG = 1


def pytest_addoption(parser: pytest.Parser) -> None:
    """How many files run at once."""
    parser.addoption("--workers", type=int, default=0, help="run files of tests in so many forks of this process")


def pytest_configure(config: pytest.Config) -> None:
    """Without the option, pytest's own loop runs the tests."""
    if count := config.getoption("workers"):
        config.pluginmanager.register(Workers(count))


@dataclass
class Worker:
    """A fork: its messages, and the tests of the files that it has taken, by number, which have not ended."""

    pid: int
    pidfd: int
    messages: BinaryIO
    received: bytearray = field(default_factory=bytearray)
    open: dict[int, bool] = field(default_factory=dict)  # whether the test has begun

    def read(self) -> Iterator[tuple]:
        """The messages that have come."""
        while part := self.messages.read():
            self.received += part
        while len(self.received) >= NUMBER.size:
            end = NUMBER.size + NUMBER.unpack_from(self.received)[0]
            if len(self.received) < end:
                return
            yield pickle.loads(self.received[NUMBER.size : end])
            del self.received[:end]

    def end(self) -> int:
        """End it with all that its tests have started and left in its group; its exit status."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        status = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        os.close(self.pidfd)
        self.messages.close()
        return status


class Workers:
    """The loop over tests, in place of pytest's own."""

    def __init__(self, count: int) -> None:
        """With so many workers, or one for each file where there are fewer."""
        self.count = count

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> bool | None:
        """Run the tests; nothing where pytest itself does, as it only lists them or could not collect."""
        if session.testsfailed or session.config.option.collectonly or not session.items:
            return None
        if (torch := sys.modules.get("torch")) and torch.cuda.is_initialized():
            raise pytest.UsageError(
                "--workers: got a process that has opened CUDA while it collected; allowed: one that has not, as a fork cannot use it; "
                "hint: ask for properties of a GPU in a test or a fixture"
            )
        files: dict[Path, list[int]] = {}
        for number, item in enumerate(session.items):
            files.setdefault(item.path, []).append(number)
        self.session, self.files = session, list(files.values())
        # All of them, and then the end: a pipe holds 16,384 such numbers.
        queue, filled = os.pipe()
        os.write(filled, b"".join(map(NUMBER.pack, range(len(self.files)))))
        os.close(filled)
        temporary = session.config._tmp_path_factory.getbasetemp()  # type: ignore[attr-defined]
        workers = [self._fork(temporary / f"worker-{i}", queue) for i in range(min(self.count, len(self.files)))]
        os.close(queue)
        with selectors.DefaultSelector() as selector:
            for worker in workers:
                selector.register(worker.messages, selectors.EVENT_READ, worker)
                selector.register(worker.pidfd, selectors.EVENT_READ, worker)
            try:
                while selector.get_map():
                    for key, _ in selector.select():
                        worker = key.data
                        self._take(worker)
                        if (
                            key.fd == worker.pidfd
                        ):  # not where the pipe ends: a process that a test has left may hold it open
                            selector.unregister(worker.messages)
                            selector.unregister(worker.pidfd)
                            workers.remove(worker)
                            self._take(worker)
                            self._lost(worker)
                        if session.shouldfail:
                            raise session.Failed(session.shouldfail)
                        if session.shouldstop:
                            raise session.Interrupted(session.shouldstop)
            finally:
                for worker in workers:
                    worker.end()
        return True

    def _take(self, worker: Worker) -> None:
        """Hand what a worker says of its tests to pytest."""
        hook, items = self.session.config.hook, self.session.items
        for kind, value in worker.read():
            if kind == "file":
                worker.open |= dict.fromkeys(self.files[value], False)
            elif kind == "begin":
                worker.open[value] = True
                hook.pytest_runtest_logstart(nodeid=items[value].nodeid, location=items[value].location)
            elif kind == "report":
                report = hook.pytest_report_from_serializable(config=self.session.config, data=value)
                hook.pytest_runtest_logreport(report=report)
            else:
                del worker.open[value]
                hook.pytest_runtest_logfinish(nodeid=items[value].nodeid, location=items[value].location)

    def _lost(self, worker: Worker) -> None:
        """A worker has ended: its tests that have not fail."""
        status, items = worker.end(), self.session.items
        if status and not worker.open:
            raise RuntimeError(f"a worker ended with status {status} when its tests had ended")
        for number, begun in worker.open.items():
            said = f"its worker ended with status {status}{'' if begun else ' before it began'}"
            report = pytest.TestReport(items[number].nodeid, items[number].location, {}, "failed", said, "call")
            self.session.config.hook.pytest_runtest_logreport(report=report)

    def _fork(self, temporary: Path, queue: int) -> Worker:
        """A worker, which takes files from the queue."""
        reads, writes = os.pipe()
        parent = os.getpid()
        sys.stdout.flush(), sys.stderr.flush()
        if pid := os.fork():
            os.close(writes)
            os.set_blocking(reads, False)
            return Worker(pid, os.pidfd_open(pid), cast("BinaryIO", os.fdopen(reads, "rb", buffering=0)))
        status = 1
        try:
            os.setsid()  # a Ctrl-C is for the parent, which ends this one
            ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
            if os.getppid() == parent:
                Tests(self.session, self.files, queue, writes, temporary).run()
                status = 0
        except BaseException:
            self.session.config.pluginmanager.get_plugin("capturemanager").stop_global_capturing()
            traceback.print_exc()
        finally:
            atexit._run_exitfuncs()
            os._exit(status)


class Tests:
    """The tests of a worker."""

    def __init__(
        self, session: pytest.Session, files: list[list[int]], queue: int, messages: int, temporary: Path
    ) -> None:
        """Files come from the descriptor `queue`, and messages go to another; fixtures have folders below `temporary`."""
        self.session, self.files, self.queue, self.messages = session, files, queue, messages
        manager = session.config.pluginmanager
        capture = manager.get_plugin("capturemanager")  # its files are the parent's, and of all workers
        capture.stop_global_capturing()
        capture.start_global_capturing()
        # The parent reports; plugins that write to the terminal, as the one that ends long tests does, write to a test's stderr.
        writer = session.config.get_terminal_writer()
        writer._file = sys.stderr
        manager.unregister(name="terminalreporter")
        manager.register(SimpleNamespace(_tw=writer), name="terminalreporter")
        manager.register(self)
        temporary.mkdir()
        session.config._tmp_path_factory._basetemp = temporary  # type: ignore[attr-defined]
        self.whole = session.config.option.durations is not None  # its table has fixtures, too

    def tell(self, kind: Literal["file", "begin", "report", "end"], value: object) -> None:
        """Send a message."""
        text = pickle.dumps((kind, value))
        data = memoryview(NUMBER.pack(len(text)) + text)
        while data:
            data = data[os.write(self.messages, data) :]

    def run(self) -> None:
        """Run the tests of files until none is left. With the next test pytest says which fixtures to keep: after a file, those of the session."""
        protocol = self.session.config.hook.pytest_runtest_protocol
        while taken := os.read(self.queue, NUMBER.size):
            (file,) = NUMBER.unpack(taken)
            self.tell("file", file)
            following = [self.session.items[number] for number in self.files[file][1:]]
            for number, nextitem in zip(self.files[file], [*following, self.session], strict=True):
                self.tell("begin", number)
                protocol(item=self.session.items[number], nextitem=nextitem)
                self.tell("end", number)
        self.session._setupstate.teardown_exact(None)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Send what is counted or printed: not that a fixture was made."""
        if self.whole or report.when == "call" or not report.passed:
            data = self.session.config.hook.pytest_report_to_serializable(config=self.session.config, report=report)
            self.tell("report", data)
