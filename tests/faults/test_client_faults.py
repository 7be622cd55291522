"""A client that does not find its own server says so in one line, with a status that is not 0, and touches nothing."""

import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest

from moe_routing_bench.measure import client

CLIENT = [sys.executable, "-I", "-S", client.__file__]
pytestmark = pytest.mark.fault("socket's folder")


def readable(folder: Path) -> None:
    folder.mkdir(mode=0o755)


def writable(folder: Path) -> None:
    folder.mkdir()
    folder.chmod(0o777)


def link(folder: Path) -> None:
    (folder.parent / "own").mkdir(mode=0o700)
    folder.symlink_to("own")


def dangling_link(folder: Path) -> None:
    folder.symlink_to("nowhere")


def file(folder: Path) -> None:
    folder.touch(mode=0o700)


def of_another_user(folder: Path) -> None:
    folder.mkdir(mode=0o700)
    try:
        os.chown(folder, 12345, -1)
    except PermissionError:
        pytest.skip("needs rights to give a folder away")


@pytest.mark.parametrize("fault", [readable, writable, link, dangling_link, file, of_another_user])
def test_a_folder_that_others_may_enter_is_refused(fault: Callable[[Path], None], own_server: Path) -> None:
    folder = own_server / f"moe-routing-bench-{os.getuid()}"
    fault(folder)
    before = sorted(os.walk(own_server, followlinks=True))
    done = subprocess.run([*CLIENT, "out.parquet", "{}"], capture_output=True, text=True, timeout=20)
    assert done.returncode == 1 and done.stdout == ""
    assert done.stderr.startswith(f"error: {folder}: got ") and "allowed: a folder of mode 700" in done.stderr
    assert done.stderr.count("\n") == 1 and "WORKER=cold" in done.stderr
    assert sorted(os.walk(own_server, followlinks=True)) == before


@pytest.mark.parametrize("suffix", [".lock", ".log"])
def test_a_link_is_not_followed(suffix, own_server, monkeypatch) -> None:
    """What it leads to keeps its text."""
    monkeypatch.setattr(tempfile, "tempdir", str(own_server))
    monkeypatch.setattr(subprocess, "Popen", None)
    (own_server / "precious").write_text("text")
    path = client.socket_path()
    os.symlink(own_server / "precious", path + suffix)
    with pytest.raises(SystemExit, match=r"error: the warm server: .*symbolic links.*WORKER=cold"):
        client.main(["out.parquet", "{}"])
    assert (own_server / "precious").read_text() == "text"


@pytest.mark.fault("false server")
def test_somebody_else_s_server_is_told_nothing() -> None:
    """It would have the environment, and could say that all went well."""
    if os.getuid():
        pytest.skip("needs rights to become another user")
    path = f"/tmp/moe-routing-bench-false-{os.getpid()}.sock"
    ready, done = os.pipe()
    if (other := os.fork()) == 0:
        os.setuid(12345)
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(path)
            listener.listen(1)
            os.write(done, b"x")
            connection, _ = listener.accept()
            os._exit(len(connection.recv(99)))
    try:
        os.read(ready, 1)
        with pytest.raises(SystemExit, match="got a server of user 12345; allowed: one of user 0"):
            client.connect(path)
    finally:
        assert os.waitstatus_to_exitcode(os.waitpid(other, 0)[1]) == 0, "it was told something"
        os.unlink(path)
