"""No reader waits for a pipe, reads a device, or believes the size of a file of /proc: one line, at once."""

import os
import signal
import socket
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from moe_routing_bench.comparison import published_rows
from moe_routing_bench.config import claims, huggingface, load, presets
from moe_routing_bench.figures import foreign
from moe_routing_bench.grid import cell
from moe_routing_bench.grid.run_spec import Run
from moe_routing_bench.quality import loop, run_rows, texts
from moe_routing_bench.store import accuracy_matrix, manifest, paths, records
from moe_routing_bench.traces import reading
from moe_routing_bench.workload import trace
from moe_routing_kernels import guarded
from moe_routing_kernels.errors import UserError


def archive(path: Path) -> None:
    """Read a corpus from the folder of archives, where `path` is in place of its file."""
    os.environ[texts.FOLDER] = str(path.parent)
    os.rename(path, path.with_name(texts.ARCHIVES["kjv"][0].rsplit("/", 1)[1]))
    texts.load({"kjv": None}, 0.1)


def read_manifest(path: Path) -> None:
    """Read the manifest of a run, where `path` is in its place."""
    place = paths.manifest("cpu")
    place.parent.mkdir(parents=True)
    os.rename(path, place)
    manifest.read("cpu")


READERS: dict[str, tuple[str, Callable[[Path], object]]] = {
    "config": (".yaml", load.read_mapping),
    "presets": (".yaml", presets.load),
    "claims": (".yaml", claims.load),
    "manifest": (".yaml", read_manifest),
    "config.json": (".json", huggingface.preset),
    **{f"trace of {suffix}": (suffix, reading.read) for suffix in reading._READERS},
    "replayed trace": (".parquet", lambda path: trace.read(path, 8, 8, 2)),
    "hash of a trace": (".parquet", cell.file_sha256),
    "cell": (".parquet", records.read),
    "run of git or a name": (".parquet", lambda path: records.read_some(path, ["bench"])),
    "training run": (".parquet", run_rows.read),
    "accuracy": (".parquet", lambda path: accuracy_matrix.read(path, "cpu")),
    "foreign rows": (".csv", foreign.read_csv),
    "published rows": (".csv", published_rows.read),
    "corpus": (".txt", lambda path: Run(corpora={str(path): None}).spec),
    "archive of a corpus": (".whl", archive),
    "checkpoint": (".ckpt", lambda path: loop.saved(path, "cpu")),
}


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
