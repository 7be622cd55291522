"""Characters that an encoding does not have: streams replace them, and files are UTF-8 whatever the locale."""

import ast
import io
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import moe_routing_bench
from moe_routing_bench import streams
from moe_routing_bench.cli import main as cli
from moe_routing_bench.config.expand import cell_of
from moe_routing_bench.grid.cell import Job, Settings
from moe_routing_bench.store import records
from project import SMALL

PACKAGE = Path(moe_routing_bench.__file__).parents[1]
ROOT = Path(__file__).parents[2]
ENCODINGS = ("ascii", "latin-1", "utf-8")
BARE = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}  # what Python takes a plain C locale for, ASCII
# Files and streams in ASCII, then streams alone; one process tests the other encodings.
COMMANDS = {
    "list": ["list", "--platform", "cpu"],
    "help": ["-h"],
    "help of a command": ["measure", "-h"],
    "a preset": ["preset", "größe-日本/config.json"],
    "a trace": [
        "trace",
        "größe-日本/ids.npy",
        "--first",
        "tokens",
        "--experts",
        "4",
        "--out",
        "größe-日本/ids.parquet",
    ],
    "a folder": ["init", "neu-日本"],
    "a kernel": ["kernel", "pack", "größe-日本/own_pack.py"],
    "an error": ["measure", "日本"],
    "an error of options": ["measure", "gate", "--日本"],
    "a lone surrogate": ["measure", "\udcff"],
}
CONFIG = '{"model_type": "mixtral", "architectures": ["MixtralForCausalLM"], "hidden_size": 64, "intermediate_size": 128, "num_local_experts": 8, "num_experts_per_tok": 2, "hidden_act": "silu"}'


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """The working directory; a folder in it has a name that few encodings have."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "config").symlink_to(ROOT / "config")
    named = tmp_path / "größe-日本"
    named.mkdir()
    (named / "config.json").write_text(CONFIG, encoding="utf-8")
    np.save(named / "ids.npy", np.array([[0, 3], [2, 1], [3, 2], [1, 0]], np.int32))
    return tmp_path


@pytest.mark.parametrize("encoding", ENCODINGS)
@pytest.mark.parametrize("command", COMMANDS)
def test_no_command_ends_for_a_character(folder, monkeypatch, command, encoding):
    """Its output is that of UTF-8, but for characters that the encoding does not have."""
    out, error = (io.TextIOWrapper(io.BytesIO(), encoding, errors="strict", write_through=True) for _ in range(2))
    monkeypatch.setattr(sys, "stdout", out)
    monkeypatch.setattr(sys, "stderr", error)
    monkeypatch.setattr(sys, "argv", ["moe-routing-bench", *COMMANDS[command]])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert (ended.value.code or 0) == (2 if command in ("an error", "an error of options", "a lone surrogate") else 0)
    text = (out.buffer.getvalue() + error.buffer.getvalue()).decode(
        encoding, "replace"
    )  # click itself takes UTF-8 for ASCII
    assert text and "Traceback" not in text
    if "größe-日本" in " ".join(COMMANDS[command]) and command != "a preset":
        assert "größe-日本".encode(encoding, "replace").decode(encoding) in text


@pytest.mark.parametrize("encoding", ["ascii", "latin-1"])
def test_only_streams_of_text_are_changed(monkeypatch, encoding):
    """A notebook has others, and a process without a terminal may have none."""
    stream = io.TextIOWrapper(io.BytesIO(), encoding, errors="strict")
    monkeypatch.setattr(sys, "stdout", None)
    monkeypatch.setattr(sys, "stderr", stream)
    streams.never_raise()
    print("µ日", file=stream, flush=True)
    assert stream.buffer.getvalue() == {"ascii": b"??\n", "latin-1": b"\xb5?\n"}[encoding]


@pytest.mark.parametrize("name", ["stdout", "stderr"])
def test_a_pipe_in_the_place_of_a_file_is_no_error(monkeypatch, tmp_path, name):
    """As in a child of the warm server, whose own output goes to a log."""
    receive, send = os.pipe()
    with (tmp_path / "log").open("w", encoding="ascii", buffering=1) as stream:
        os.dup2(send, stream.fileno())
        monkeypatch.setattr(sys, name, stream)
        streams.never_raise()
        print("µ", file=getattr(sys, name), flush=True)
        assert os.read(receive, 9) == b"?\n" and getattr(sys, name).line_buffering


@pytest.mark.slow
def test_an_implementation_may_print_what_it_likes_in_a_bare_locale(tmp_path):
    """What it prints goes to the log of a worker; it is no error of the implementation, nor of what prints its row."""
    (tmp_path / "loud.py").write_text(
        "from moe_routing_bench.benches.plugins import Plugin\n"
        "from moe_routing_kernels.pack import torch_pack\n\n"
        'LOUD = Plugin(bench="pack", name="loud")\n\n\n'
        "def bind(problem, **operands):\n"
        '    print("größe-日本", flush=True)\n'
        "    return torch_pack.bind(problem, **operands)\n",
        encoding="utf-8",
    )
    job = Job(
        cell_of("pack", tokens=8, hidden=32, experts=4, top_k=2), ("loud",), Settings(**SMALL), plugins=("loud:LOUD",)
    )
    done = subprocess.run(
        [sys.executable, "-m", "moe_routing_bench.measure.supervisor", "rows.parquet", job.spec],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": f"{tmp_path}:{ROOT / 'src'}", "MOE_ROUTING_BENCH_DEVICE": "cpu"} | BARE,
        capture_output=True,
        check=False,
    )
    assert done.returncode == 0 and b"pack loud: ok" in done.stdout, done.stdout + done.stderr
    assert b"?" in done.stdout
    (row,) = records.read(tmp_path / "rows.parquet").to_pylist()
    assert row["status"] == "ok"


def test_a_command_where_output_is_strict_ascii(folder):
    """In a process of its own: what it writes is UTF-8, what it prints is replaced."""
    done = subprocess.run(
        [sys.executable, "-m", "moe_routing_bench.cli", "kernel", "pack", "own_pack.py"],
        cwd=folder,
        env=os.environ | {"PYTHONPATH": str(ROOT / "src"), "PYTHONIOENCODING": "ascii:strict"},
        capture_output=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert ast.parse((folder / "own_pack.py").read_text(encoding="utf-8"))


def calls(tree):
    """Every call of a file with the name that is called, the object that it is an attribute of, and its keywords."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            called = node.func
            name = (
                called.id if isinstance(called, ast.Name) else called.attr if isinstance(called, ast.Attribute) else ""
            )
            of = called.value.id if isinstance(called, ast.Attribute) and isinstance(called.value, ast.Name) else ""
            yield node, name, of, {word.arg: word.value for word in node.keywords}


def text_of(node):
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else ""


RUNS = ("run", "Popen", "check_output", "check_call", "call")  # of subprocess


def without_encoding(source):
    """Lines of calls that read or write text in the encoding of the locale."""
    for node, name, of, words in calls(ast.parse(source)):
        first = 0 if isinstance(node.func, ast.Attribute) else 1  # of the positional arguments, the mode
        if (
            name in ("open", "fdopen", "NamedTemporaryFile", "SpooledTemporaryFile", "TemporaryFile")
            and (of, name) not in OTHERS
        ):
            modes = [
                text_of(one)
                for one in [*node.args[first if name == "open" else of == "os" : 2], words.get("mode")]
                if one
            ]
            binary = any("b" in mode for mode in modes) or ("Temporary" in name and not any(modes))
            found = not binary and "encoding" not in words
        elif name == "read_text":
            found = not node.args and "encoding" not in words
        elif name == "write_text" or name in ("TextIOWrapper", "FileHandler"):
            found = len(node.args) < 2 and "encoding" not in words
        else:
            asked = [words[option] for option in ("text", "universal_newlines") if option in words]
            flags = [option for option in asked if isinstance(option, ast.Constant) and option.value is True]
            found = bool(flags or (asked and name in RUNS)) and "encoding" not in words
        if found:
            yield node.lineno


OTHERS = {("os", "open"), ("tarfile", "open"), ("Image", "open")}
SOURCES = sorted([*PACKAGE.rglob("*.py"), *(ROOT / "workflow/scripts").glob("*.py")])


@pytest.mark.parametrize(
    ("line", "found"),
    [
        ("open(path)", True),
        ("open(path, 'w')", True),
        ("open(path, 'rb')", False),
        ("open(path, mode='wb')", False),
        ("open(path, encoding='utf-8')", False),
        ("path.open()", True),
        ("path.open('w')", True),
        ("path.open('xb')", False),
        ("path.open('w', encoding='utf-8')", False),
        ("path.read_text()", True),
        ("path.read_text('utf-8')", False),
        ("path.read_text(encoding='utf-8')", False),
        ("path.write_text(text)", True),
        ("path.write_text(text, 'utf-8')", False),
        ("(folder / name).write_text(text)", True),
        ("(folder / name).open()", True),
        ("(folder / name).open('rb')", False),
        ("os.fdopen(n, 'w')", True),
        ("os.fdopen(n, 'rb')", False),
        ("os.open(path, 0)", False),
        ("tempfile.TemporaryFile()", False),
        ("tempfile.NamedTemporaryFile('w')", True),
        ("subprocess.run(words, text=True)", True),
        ("subprocess.run(words, text=True, encoding='utf-8')", False),
        ("subprocess.run(words)", False),
        ("io.TextIOWrapper(raw)", True),
    ],
)
def test_text_in_the_encoding_of_the_locale_is_found(line, found):
    assert bool(list(without_encoding(line))) == found


def test_every_file_of_text_has_an_encoding():
    found = [f"{path}:{line}" for path in SOURCES for line in without_encoding(path.read_text(encoding="utf-8"))]
    assert not found and len(SOURCES) > 300
