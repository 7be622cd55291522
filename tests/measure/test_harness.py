"""The warm server imports the harness once for each state of its files, and what a child has found out reaches later ones."""

import os
import socket
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from moe_routing_bench.measure import server


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A package of two modules in place of ours, whose files count as old at once."""
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(server, "_PACKAGES", ("toy_harness",))
    monkeypatch.setattr(server, "_HARNESS", ("toy_harness.first",))
    monkeypatch.setattr(server, "_RECENT_NS", 0)
    folder = tmp_path / "toy_harness"
    folder.mkdir()
    (folder / "__init__.py").touch()
    (folder / "first.py").write_text("from toy_harness import second\nstate = []\n")
    (folder / "second.py").write_text("value = 1\n")
    (folder / "__pycache__").mkdir()
    time.sleep(0.02)
    yield folder
    server._forget()


def loaded() -> dict[str, object]:
    return {name: sys.modules[name] for name in sys.modules if name.startswith("toy_harness")}


def test_the_harness_is_imported_once(package: Path) -> None:
    harness = server.Harness()
    harness.renew()
    before = loaded()
    assert set(before) == {"toy_harness", "toy_harness.first", "toy_harness.second"}
    harness.renew()
    assert loaded() == before


@pytest.mark.parametrize("change", ["content", "same size and time", "replaced", "shadowed", "removed"])
def test_no_child_runs_old_code(change: str, package: Path) -> None:
    """A file that was edited, replaced, shadowed by a folder or removed: everything is imported again, as it is now."""
    harness = server.Harness()
    harness.renew()
    before, file = loaded(), package / "second.py"
    stat = file.stat()
    if change == "content":
        file.write_text("value = 22\n")
    elif change == "same size and time":
        file.write_text("value = 2\n")
        os.utime(file, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    elif change == "replaced":
        (package / "other").write_text("value = 222\n")
        (package / "other").rename(file)
    elif change == "shadowed":
        (package / "second/__pycache__").mkdir(parents=True)
        (package / "second/__init__.py").write_text("value = 3\n")
    else:
        file.unlink()
    time.sleep(0.02)
    harness.renew()
    now = loaded()
    assert not set(map(id, now.values())) & set(map(id, before.values()))
    if change == "removed":  # children import it, and say what is wrong
        assert not now
    else:
        value = now["toy_harness.second"].value  # type: ignore[attr-defined]
        wanted = {"content": [22], "replaced": [222], "shadowed": [3], "same size and time": [2]}[change]
        if change == "same size and time":  # Python itself goes by these where there is a compiled file
            wanted.append(1)
        assert value in wanted


@pytest.mark.parametrize("text", ["value = (", "raise SystemExit(3)", "1 / 0"])
def test_a_harness_that_cannot_be_imported_is_left_to_children(text: str, package: Path) -> None:
    harness = server.Harness()
    (package / "second.py").write_text(text)
    harness.renew()
    assert not loaded()
    (package / "second.py").write_text("value = 7\n")
    time.sleep(0.02)
    harness.renew()
    assert len(loaded()) == 3


def test_a_file_that_has_just_changed_is_not_kept(package: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its next edit may come before its times move on."""
    monkeypatch.setattr(server, "_RECENT_NS", 60 * 10**9)
    server.Harness().renew()
    assert not loaded()


def test_what_a_child_keeps_later_ones_know() -> None:
    memory = server.Memory()
    for value in ({"a": [1.5, None]}, "x" * 5000):  # the second is too long for one piece
        if (child := os.fork()) == 0:
            memory.keep("key", value)
            os._exit(0 if memory.get("key") == value else 1)
        assert os.waitpid(child, 0)[1] == 0
        memory.learn()
        assert memory.get("key") == {"a": [1.5, None]} and memory.get("other") is None
    memory.close()
    memory.keep("key", 2)  # there is no supervisor to tell
    assert memory.get("key") == 2


def test_a_program_is_told_from_a_cell_by_its_first_byte(monkeypatch: pytest.MonkeyPatch) -> None:
    """A caller that says nothing does not hold others up; the byte stays to be read."""
    for first, program in ((b" ", True), (b"{", False), (b"", False)):
        monkeypatch.setattr(server, "FIRST_BYTE_SECONDS", 60 if first else 0.05)
        here, there = socket.socketpair()
        with here, there:
            late = threading.Timer(0.01, here.sendall, [first])
            late.start()
            assert server.is_program(there) is program
            late.join()
            assert there.gettimeout() is None
            if first:
                assert there.recv(9) == first
