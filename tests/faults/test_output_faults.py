"""An output that cannot be written costs one line: before anything is measured, where that can be known."""

import os
import resource
import sys
from pathlib import Path

import pytest

from moe_routing_bench.config.expand import cell_of
from moe_routing_bench.grid.cell import Job, Settings
from moe_routing_bench.measure import completion, supervisor
from moe_routing_kernels import files
from moe_routing_kernels.errors import UserError

SPEC = Job(cell_of("permute", tokens=8, experts=4, top_k=2), ("torch",), Settings()).spec
ROW = {"status": "incorrect", "reason": "it ran"}


def a_folder(path: Path) -> None:
    path.mkdir(parents=True)


def a_file_for_a_folder(path: Path) -> None:
    path.parent.touch()


def a_link_for_a_folder(path: Path) -> None:
    path.parent.symlink_to("/proc/nowhere")


def a_folder_that_may_not_be_written(path: Path) -> None:
    path.parent.mkdir(mode=0o500)
    if os.access(path.parent, os.W_OK):
        pytest.skip("root may write everywhere")


@pytest.mark.fault("unwritable output")
@pytest.mark.parametrize(
    "fault", [a_folder, a_file_for_a_folder, a_link_for_a_folder, a_folder_that_may_not_be_written]
)
def test_an_output_is_tried_before_anything_is_measured(fault, tmp_path, monkeypatch, capsys) -> None:
    path = tmp_path / "cells" / "cell.parquet"
    fault(path)
    monkeypatch.setattr(supervisor, "_attempt", lambda *_: pytest.fail("it was measured"))
    assert supervisor.main([str(path), SPEC]) == 2
    out, error = capsys.readouterr()
    assert out == "" and error.count("\n") == 1 and f"output: got '{path}'" in error


@pytest.mark.fault("full disk")
@pytest.mark.parametrize("size", [0, 4000])
@pytest.mark.parametrize("old", [b"", b"old rows"])
def test_a_disk_that_is_full_leaves_what_there_was(size, old, tmp_path, monkeypatch) -> None:
    """No half a file, and the file of before; a limit of the file size does what a full disk does, at so many bytes."""
    path = tmp_path / "cell.parquet"
    if old:
        path.write_bytes(old)
    monkeypatch.setattr(supervisor, "_attempt", lambda *_: {"torch": ROW})
    monkeypatch.setattr(completion, "code", lambda bench, memory: {})
    if (child := os.fork()) == 0:
        try:
            receive, send = os.pipe()
            sys.stderr = os.fdopen(send, "w")
            resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))
            code = supervisor.main([str(path), SPEC])
            sys.stderr.close()
            text = os.read(receive, 9999).decode()
            os._exit(code if text.count("\n") == 1 and f"output: got '{path}'" in text else 9)
        finally:
            os._exit(8)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 2
    assert [(one.name, one.read_bytes()) for one in tmp_path.iterdir()] == ([("cell.parquet", old)] if old else [])


@pytest.mark.fault("full disk")
def test_a_disk_that_is_full_is_found_before_anything_is_measured(tmp_path: Path) -> None:
    """An empty file can be made on it."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limits[1]))
        with pytest.raises(UserError, match=r"output: got .*hint: File too large"):
            files.check_writable(tmp_path / "out")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert not list(tmp_path.iterdir())


@pytest.mark.fault("closed output")
def test_rows_are_kept_though_nobody_reads_what_is_said(tmp_path, monkeypatch) -> None:
    """A closed pipe, or a full disk under the log, is no reason to measure again."""
    monkeypatch.setattr(supervisor, "_attempt", lambda *_: {"torch": ROW})
    monkeypatch.setattr(completion, "code", lambda bench, memory: {})
    receive, send = os.pipe()
    os.close(receive)
    with os.fdopen(send, "w") as nobody:
        monkeypatch.setattr(sys, "stdout", nobody)
        assert supervisor.main([str(tmp_path / "cell.parquet"), SPEC]) == 0
        monkeypatch.undo()
        os.dup2(os.open(os.devnull, os.O_WRONLY), nobody.fileno())
    assert (tmp_path / "cell.parquet").exists()
