"""Commands that are printed to be copied: a shell that runs them finds the user's paths, whatever characters they have."""

import importlib.metadata
import re
import shlex
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from moe_routing_bench.cli import main as cli
from moe_routing_bench.cli import printing, profile
from moe_routing_bench.store import project_files

ROOT = Path(__file__).parents[2]
NAMES = {
    "plain": "mine",
    "a space": "my folder",
    "a quote": "it's mine",
    "double quotes": 'a "b"',
    "a dollar": "$HOME",
    "a command": "$(touch made)",
    "a semicolon": "a; touch made",
    "an ampersand": "a && touch made",
    "a tilde": "~",
    "a dash": "-rf",
    "a letter of another alphabet": "größe-日本",
}


@pytest.fixture(params=NAMES.values(), ids=[name.replace(" ", "-") for name in NAMES])
def name(request, tmp_path, monkeypatch):
    """A name of a folder in the working directory, that is not made yet."""
    (tmp_path / "config").symlink_to(ROOT / "config")
    (tmp_path / "mine.txt").touch()  # for a star to match
    monkeypatch.chdir(tmp_path)
    return request.param


def call(monkeypatch, capsys, *arguments):
    monkeypatch.setattr(sys, "argv", ["moe-routing-bench", *arguments])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert not ended.value.code, capsys.readouterr()
    return capsys.readouterr().out


def led_to(command):
    """The working directory after a `cd` of a printed command, as a shell runs it."""
    change = command.partition(" && ")[0] if " && moe" not in command else command[: command.rindex(" && moe")]
    done = subprocess.run(["sh", "-c", f"{change} && pwd -P"], capture_output=True, text=True, check=True)
    return Path(done.stdout[:-1])


def test_init_prints_a_cd_that_leads_there(name, monkeypatch, capsys):
    out = call(monkeypatch, capsys, "init", "--", name)
    command = out[out.rindex("next: ") + 6 :]
    assert command.endswith(" && snakemake --cores 1 --resources gpu=1\n")
    assert led_to(command.replace(" && snakemake", " && moe")) == Path(name).absolute() and not Path("made").exists()


def test_kernel_prints_a_cd_that_leads_there(name, monkeypatch, capsys):
    out = call(monkeypatch, capsys, "kernel", "pack", "--", f"{name}/own_pack.py")
    command = out[out.rindex("next: ") + 6 :]
    assert led_to(command) == Path(name).absolute() and not Path("made").exists()
    assert command.endswith("watch pack --plugin own_pack --implementations own_pack\n")


def test_trace_prints_options_with_its_file(name, monkeypatch, capsys):
    np.save("ids.npy", np.array([[0, 3], [2, 1], [3, 2], [1, 0]], np.int32))
    out = call(
        monkeypatch, capsys, "trace", "ids.npy", "--first", "tokens", "--experts", "4", "--out", f"{name}/ids.parquet"
    )
    words = shlex.split(out[out.rindex("--trace ") :])
    assert Path(words[1]).samefile(f"{name}/ids.parquet") and not words[1].startswith("-") and words[2] == "--experts"


def test_the_line_for_ncu_has_its_files(name):
    words = shlex.split(profile._ncu("/opt/my tools/ncu", "torch", Path(name), Path(name) / "out"))
    assert words[0] == "/opt/my tools/ncu"
    for before, path in (("profile", Path(name)), ("--export", Path(name) / "out/torch")):
        assert Path(words[words.index(before) + 1]) == path
        assert not words[words.index(before) + 1].startswith("-")


def test_a_path_is_one_word(name):
    assert shlex.split(printing.quoted(Path(name))) == [printing.plain(Path(name))]


def test_where_a_wheel_is_from_is_one_word(name, monkeypatch):
    """The advice on how to install an extra names it."""
    noted = type("Wheel", (), {"read_text": lambda self, _: '{"url": %s}' % __import__("json").dumps(name)})()  # noqa: UP031
    monkeypatch.setattr(project_files, "installed", lambda: True)
    monkeypatch.setattr(importlib.metadata, "distributions", lambda **_: [noted])
    advice = project_files.to_install("needs triton: pip install -e '.[gpu]'")
    assert shlex.split(advice)[-1] == f"moe-routing-bench[gpu] @ {name}"


def test_every_printed_command_with_a_path_is_among_these():
    """A message with a command and a value in it quotes the value, or is of names that have no other letters."""
    line = re.compile(
        r"f\"[^\"\n]*(?:cd |moe-routing-bench [a-z]|snakemake |--trace |--out |pip install )[^\"\n]*\{(?![^}\n]*(?:quote|quoted)\()([^}\n]*)\}"
    )
    found = {
        (path.name, match[1])
        for path in sorted((ROOT / "src").rglob("*.py"))
        for match in line.finditer(path.read_text(encoding="utf-8"))
    }
    # names of benches, of modules (identifiers), of the project's own files; counts
    assert found <= {
        ("init.py", "name"),
        ("init.py", "bench"),
        ("__init__.py", "FILE.name"),
        ("trace.py", "summary.top_k"),
        ("peers.py", "version"),
        ("experts.py", "tokens:g"),
    }, found
