"""`moe-routing-bench watch`: a kernel of a package of one's own is edited, and measured again, until Ctrl-C."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

import forks
from example_package import EXAMPLE
from moe_routing_bench.benches.registry import BENCHES, benches_of
from moe_routing_bench.cli.rounds import Sources
from project import ROOT
from signals import interruptible

pytestmark = pytest.mark.slow

OPTIONS = ("--plugin", "own_kernel:COMBINE", "--implementations", "own_bmm", "--against", "torch")
SIZES = ("--tokens", "64", "--hidden", "64", "--max-seconds", "0.1", "--min-blocks", "3")
# Its warm server is a fork; it is none itself, which Ctrl-C would end without its last words.
START = "import sys; sys.executable = {python!r}; from moe_routing_bench.cli.main import main; main()"


class Watching:
    """A running `watch` in a folder with a copy of the example's package; `said` is what it has printed so far."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        shutil.copytree(EXAMPLE / "own_kernel", folder / "own_kernel")
        self.kernel, self._out = folder / "own_kernel/bmm_combine.py", folder / "out"
        environment = os.environ | {"PYTHONPATH": str(ROOT / "src"), "MOE_ROUTING_BENCH_DEVICE": "cpu"}
        program = START.format(python=str(forks.programs() / "python"))
        command = [
            sys.executable,
            "-P",
            "-c",
            program,
            "watch",
            "combine",
            *OPTIONS,
            *SIZES,
            "--profile",
            "profile",
        ]
        with self._out.open("w") as out:
            self.process = subprocess.Popen(
                command, cwd=folder, env=environment, stdout=out, stderr=subprocess.STDOUT, preexec_fn=interruptible
            )

    def said(self, pattern: str) -> str:
        """The first line that it prints with this, for which two minutes are enough on a busy machine."""
        deadline = time.monotonic() + 120
        while not (found := re.search(f"^.*{pattern}.*$", self._out.read_text(), re.MULTILINE)):
            assert time.monotonic() < deadline and self.process.poll() is None, self._out.read_text()
            time.sleep(0.05)
        return found[0]

    def edit(self, old: str, new: str) -> None:
        text = self.kernel.read_text()
        assert old in text
        self.kernel.write_text(text.replace(old, new))


@pytest.fixture
def watching(tmp_path: Path, own_server: Path) -> Iterator[Watching]:
    """A watch with a server of its own, which ends with the test."""
    found = Watching(tmp_path)
    yield found
    found.process.kill()
    found.process.wait()


def test_every_edit_is_measured_until_an_interrupt(watching: Watching) -> None:
    """Against the rival and the last version that was right; what is wrong or cannot be parsed says so."""
    assert re.search(r"^watching bmm_combine.py and \d+ files of moe_routing_bench; Ctrl-C", watching.said("watching "))
    assert watching.said("first round") == "the first round takes longest: it has torch"
    first = watching.said("round 1,")
    assert re.search(
        r"own_bmm: right, [\d.]+ us(?: \[\S+, \S+\])?; [\d.]+x torch \((faster|slower|undecided|same)\); round",
        first,
    )
    assert "own_bmm: one call, self CPU" in watching.said("one call")
    trace = json.loads((watching.folder / "profile/own_bmm.json").read_text())["traceEvents"]
    assert any(one.get("name") == "aten::bmm" for one in trace)
    watching.edit("    return combine\n", "    return combine  # edited\n")
    assert re.search(
        r"right, .*x the last version \(not judged on a CPU, which drifts\); round 2", watching.said("round 2,")
    )
    watching.edit("combined.copy_(total", "combined.copy_(2 * total")
    assert "own_bmm: incorrect: combined: relative L2 error" in watching.said("round 3,")
    watching.edit("combined.copy_(2 * total", "combined.copy_(2 * ")
    assert re.search(r"broken: \S+bmm_combine.py:\d+: ", watching.said("broken"))
    watching.edit("combined.copy_(2 * ", "combined.copy_(totl")
    assert "crashed: preparing: NameError: name 'totl'" in watching.said("round 4,")
    watching.said(r'bmm_combine.py", line \d+, in combine')  # the traceback of the crash
    watching.process.send_signal(signal.SIGINT)
    assert re.fullmatch(r"4 rounds; fastest: own_bmm [\d.]+ us", watching.said("fastest: "))
    assert watching.process.wait(timeout=60) == 0
    assert "KeyboardInterrupt" not in watching.said("")


def test_a_time_that_is_new_alone_is_no_edit_and_a_new_import_is_watched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(EXAMPLE / "own_kernel", tmp_path / "watched_kernel")
    monkeypatch.syspath_prepend(tmp_path)
    bench = benches_of(["watched_kernel:COMBINE"])["combine"]
    sources = Sources(bench, ["own_bmm"])
    kernel = tmp_path / "watched_kernel/bmm_combine.py"
    assert kernel in sources.files and not sources.changed()
    os.utime(kernel, (1, 1))
    assert not sources.changed()
    other = tmp_path / "watched_kernel/other.py"
    other.write_text("LIMIT = 1\n")
    kernel.write_text(f"from watched_kernel.other import LIMIT\n{kernel.read_text()}")
    assert sources.changed() == [kernel] and not sources.changed()
    sources.read()
    other.write_text("LIMIT = 2\n")
    assert sources.changed() == [other]
    other.write_text("LIMIT = 1\n")
    os.utime(other, (1, 1))  # put back from a copy, with its old time
    assert sources.changed() == [other]


@pytest.mark.parametrize(
    ("name", "files"), [("cute", {"cute_gate.py", "cute_combine.py"}), ("torch_gather_loop", {"torch_experts.py"})]
)
def test_the_files_of_our_own_are_those_of_all_parts_that_it_names(name: str, files: set[str]) -> None:
    names = {path.name for path in Sources(BENCHES["layer"], [name]).files}
    assert files <= names and "definition.py" not in names
