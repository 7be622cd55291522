"""No reader waits for a pipe, reads a device, or believes the size of a file of /proc: one line, at once."""

import os
import signal
import socket
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from moe_routing_bench.quality import texts
from moe_routing_kernels import guarded
from moe_routing_kernels.errors import UserError
from readers import READERS


def bound(path: Path) -> None:
    """A socket of that name."""
    with socket.socket(socket.AF_UNIX) as link:
        link.bind(str(path))


def sparse(path: Path) -> None:
    """A file of a TiB that takes no space."""
    with path.open("wb") as file:
        file.truncate(2**40)


SPECIAL: dict[str, Callable[[Path], object]] = {
    "pipe": os.mkfifo,
    "socket": bound,
    "device without end": lambda path: path.symlink_to("/dev/zero"),
    "device without content": lambda path: path.symlink_to("/dev/null"),
    "folder": Path.mkdir,
    "link to nothing": lambda path: path.symlink_to("absent"),
    "links in a circle": lambda path: path.symlink_to(path.name),
    "file of /proc": lambda path: path.symlink_to("/proc/self/status"),
    "memory of a process": lambda path: path.symlink_to("/proc/self/mem"),
    "huge file": sparse,
}
FINE = {
    ("folder", "corpus"),
    ("huge file", "trace of .npy"),
    ("huge file", "checkpoint"),
}  # accepted, or refused by what they hold


@pytest.fixture(autouse=True)
def deadline(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """A reader that waits is ended."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv(texts.FOLDER, "")
    before = signal.signal(signal.SIGALRM, lambda *_: pytest.fail("it hangs"))
    signal.alarm(5)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize("kind", [pytest.param(kind, marks=pytest.mark.fault(kind)) for kind in SPECIAL])
def test_one_line_at_once(kind: str, reader: str) -> None:
    suffix, read = READERS[reader]
    path = Path(f"it{suffix}")
    SPECIAL[kind](path)
    if (kind, reader) == ("folder", "corpus"):
        assert read(path)
        return
    with pytest.raises(UserError) as error:
        read(path)
    text = str(error.value)
    assert "\n" not in text and len(text) <= 500 and text.isprintable()


@pytest.mark.parametrize("name", ["a\0b", "x" * 5000, "", "/proc/self/fd/999", "/dev/full"])
def test_names_that_no_file_has(name: str) -> None:
    with pytest.raises(OSError, match=r"null|long|such|device|folder"):
        guarded.content(Path(name))


def test_a_regular_file_is_read(tmp_path: Path) -> None:
    path = tmp_path / "text"
    path.write_bytes(b"\xef\xbb\xbfabc")
    assert guarded.text(path) == "abc" and guarded.content(path, 6) == path.read_bytes()
    with pytest.raises(guarded.Refused, match=r"^6 bytes, at most 5"):
        guarded.content(path, 5)
    path.write_bytes(b"[1, [2, 3]]")
    assert guarded.json_of(path, values=4) == [1, [2, 3]]
    with pytest.raises(guarded.Refused, match=r"^4 values, at most 3"):
        guarded.json_of(path, values=3)
