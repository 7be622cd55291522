"""Files of tests run at once in forks; a fork that is lost fails its tests."""

import re
import subprocess
import sys
from pathlib import Path

TESTS = Path(__file__).parents[1]
WAITING = """
import time, pytest
@pytest.fixture(scope="module")
def once():
    with open({log!r}, "a") as file: file.write("made ")
    yield
    with open({log!r}, "a") as file: file.write("ended ")
@pytest.fixture(scope="session", autouse=True)
def whole():
    yield
    with open({log!r}, "a") as file: file.write("all ended")
@pytest.mark.parametrize("turn", range(3))
def test_turn(once, turn, tmp_path): (tmp_path.parents[1] / "{own}").touch()
def test_other_runs_at_the_same_time(once, tmp_path):
    end = time.monotonic() + 60
    while not (tmp_path.parents[1] / "{other}").exists(): assert time.monotonic() < end
"""
ENDS = """
import os, pytest
def test_before(): pass
def test_wrong(): os.system("echo said by a program"); assert 1 == 2
@pytest.fixture
def broken(): raise ValueError("no fixture")
def test_broken(broken): pass
def test_skipped(): pytest.skip("for a reason")
def test_killed(): os.kill(os.getpid(), 9)
def test_after(): pass
"""


def run(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-rs",
        "-p",
        "workers",
        "-p",
        "no:cacheprovider",
        "-c",
        "/dev/null",
    ]
    return subprocess.run(
        [*command, *words, "."], cwd=folder, env={"PYTHONPATH": str(TESTS)}, capture_output=True, text=True
    )


def test_files_run_at_once_and_each_makes_its_fixtures_once(tmp_path: Path) -> None:
    logs = [tmp_path / "a.log", tmp_path / "b.log"]
    for log, own, other in zip(logs, "ab", "ba", strict=True):
        (tmp_path / f"test_{own}.py").write_text(WAITING.format(log=str(log), own=own, other=other))
    done = run(tmp_path, "--workers", "2", "--basetemp", str(tmp_path / "temporary"))
    assert (done.returncode, re.findall(r"\d+ \w+", done.stdout)[-1]) == (0, "8 passed"), done.stdout + done.stderr
    assert [log.read_text() for log in logs] == ["made ended all ended"] * 2


def test_what_ends_otherwise_is_counted_with_its_reason(tmp_path: Path) -> None:
    (tmp_path / "test_ends.py").write_text(ENDS)
    (tmp_path / "test_whole.py").write_text("def test_it(): pass")
    done = run(tmp_path, "--workers", "2")
    assert done.returncode == 1
    assert "3 failed, 2 passed, 1 skipped, 1 error in" in done.stdout, done.stdout + done.stderr
    for text in ("assert 1 == 2", "said by a program", "no fixture", "for a reason"):
        assert text in done.stdout
    lost = re.findall(r"_ (test_\w+) _+\n(its worker ended.*)", done.stdout)
    assert lost == [
        ("test_killed", "its worker ended with status -9"),
        ("test_after", "its worker ended with status -9 before it began"),
    ]


def test_the_first_failure_ends_all_workers(tmp_path: Path) -> None:
    (tmp_path / "test_long.py").write_text("import time\ndef test_it(): time.sleep(100)")
    (tmp_path / "test_wrong.py").write_text("def test_it(): assert 0")
    done = run(tmp_path, "--workers", "2", "-x")
    assert done.returncode == 1 and "1 failed in" in done.stdout and "stopping after 1 failures" in done.stdout


def test_forks_of_a_process_that_has_opened_cuda_are_refused(tmp_path: Path) -> None:
    opened = "types.SimpleNamespace(cuda=types.SimpleNamespace(is_initialized=lambda: True))"
    (tmp_path / "test_it.py").write_text(f"import sys, types\nsys.modules['torch'] = {opened}\ndef test_it(): pass")
    done = run(tmp_path, "--workers", "2")
    assert done.returncode == 4 and "ERROR: --workers: got a process that has opened CUDA" in done.stderr, done.stdout


def test_files_of_tests_have_names_of_their_own() -> None:
    """Python imports them by these: of two files with one name, the second cannot be collected with the first."""
    names = [path.name for path in TESTS.glob("*/test_*.py")]
    assert len(names) > 200 and not {name for name in names if names.count(name) > 1}
