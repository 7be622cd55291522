"""What all tests share."""

import ctypes
import gc
import os
import re
import signal
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
from _pytest.assertion import rewrite

import forks

# Asking torch for a GPU while tests are collected must not open CUDA: workers are forked from this process.
os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
# Nor may torch start threads in this process, which are missing in a worker that is forked from it, and are waited for there.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# A shell without job control has what it starts in the background ignore interrupts, of which tests are.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """What collecting imports, torch among it, stays, and is not searched for garbage; what tests make is, less often than else."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.set_threshold(10_000)
        gc.enable()


WHOLE_FILE = re.compile(r"^pytestmark = .*\bpytest\.mark\.slow\b", re.MULTILINE)
LANES = {
    "not slow": WHOLE_FILE,
    "slow and not campaign": re.compile(r"mark\.slow\b"),
    "campaign": re.compile("campaign", re.IGNORECASE),
}


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """A file with no test of the lane that is asked for is not imported: collecting all files takes a core 15 to 20 seconds."""
    lane = config.getoption("markexpr")
    if lane not in LANES or not collection_path.match("test_*.py"):
        return None
    marked = LANES[lane].search(collection_path.read_text(encoding="utf-8"))
    return bool(marked) == (lane == "not slow") or None


LONGEST = ("workflow", "recipes")  # folders of files whose tests share a fixture that runs for a minute or more


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files with slow tests first, those that take minutes before all: of several workers none then has a slow file left when the others
    are done."""
    slow = {item.path for item in items if item.get_closest_marker("slow")}
    for item in items:
        if item.get_closest_marker("campaign") and item.path not in slow:  # `make test` would run it
            raise pytest.UsageError(f"marks of {item.nodeid}: got campaign without slow")
    items.sort(key=lambda item: (item.path.parent.name not in LONGEST, item.path not in slow))
    for item in items:
        if mark := item.get_closest_marker("fault"):
            kind, count = (*mark.args, 1)[:2]
            item.user_properties += [("fault", kind)] * count


def is_worker(config: pytest.Config) -> bool:
    """Whether this process runs a part of the tests of another."""
    return hasattr(config, "workerinput")


def pytest_configure(config: pytest.Config) -> None:
    """Several workers have one process to fork programs from, and are forks of it themselves."""
    if (count := config.getoption("numprocesses", None)) and not is_worker(config):
        forks.share()
        config.option.tx = [f"popen//python={forks.programs() / forks.PYTHON}"] * count
        if config.args_source is config.ArgsSource.TESTPATHS:
            prepare_asserts(config)


def prepare_asserts(config: pytest.Config) -> None:
    """Rewrite the asserts of all test files once, while that process imports what they need. Else each worker does, as all collect the same
    files at the same time: in a new clone it takes each of them twice as long as the rest of collecting."""
    if sys.dont_write_bytecode:
        return
    state = config.stash[rewrite.assertstate_key]
    for path in sorted(Path(__file__).parent.rglob("test_*.py")):
        folder = rewrite.get_cache_dir(path)
        made = folder / f"{path.stem}{rewrite.PYC_TAIL}"
        if rewrite._read_pyc(path, made) is None and rewrite.try_makedirs(folder):
            stat, code = rewrite._rewrite_test(path, config)
            rewrite._write_pyc(state, code, stat, made)


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Stop adopting orphans, which a measurement in this process begins: a mutation run goes on in it, and waits for its own children."""
    if not is_worker(session.config):
        forks.stop()
    ctypes.CDLL(None).prctl(36, 0)  # PR_SET_CHILD_SUBREAPER


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Where faults were injected: how many, of how many kinds, and what became of them."""
    found = {
        outcome: [kind for one in reports for name, kind in getattr(one, "user_properties", ()) if name == "fault"]
        for outcome, reports in terminalreporter.stats.items()
        if outcome in ("passed", "failed", "error", "skipped")
    }
    if kinds := Counter(kind for each in found.values() for kind in each):
        terminalreporter.section("injected faults")
        outcomes = ", ".join(f"{len(each)} {outcome}" for outcome, each in found.items() if each)
        terminalreporter.write_line(f"{kinds.total()} faults of {len(kinds)} kinds: {outcomes}")
        terminalreporter.write_line(", ".join(f"{kind} {count}" for kind, count in sorted(kinds.items())))


@pytest.fixture
def own_server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder of its own for the socket, so that this test starts its own server, which its command line names."""
    with tempfile.TemporaryDirectory(prefix="mrb-", dir="/tmp", ignore_cleanup_errors=True) as folder:
        monkeypatch.setenv("TMPDIR", folder)
        yield Path(folder)
