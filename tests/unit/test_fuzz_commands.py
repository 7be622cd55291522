"""Random command lines: every command and option of the parser, with good, odd and hostile values. None ends in a traceback, takes long,
or prints more than a line of printable letters when it is refused.

``COMMANDS=10000 pytest tests/unit/test_fuzz_commands.py`` tries as many. A command that would begin to work is stopped there.
"""

import importlib
import io
import json
import os
import random
import resource
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import yaml

from moe_routing_bench import streams
from moe_routing_bench.benches.registry import BENCHES
from moe_routing_bench.cli import main as cli
from moe_routing_bench.cli.commands import Loaded
from moe_routing_bench.config.axes import AXES
from moe_routing_bench.measure import gpus
from trace_files import parquet

ROOT = Path(__file__).parents[2]
COUNT = int(os.environ.get("COMMANDS", "240"))
WORK = {
    *(f"moe_routing_bench.{name}" for name in ("measure.supervisor", "measure.profiling", "measure.accuracy")),
    *(f"moe_routing_bench.{name}" for name in ("report.render", "report.site", "figures.paper")),
    "moe_routing_bench.quality.corpus_preparation",
    *("moe_routing_kernels.ops", "moe_routing_kernels.cute.cache"),
}
SMALL = {"grid": [{"benches": ["pack"], "tokens": [64], "hidden": [64], "experts": [32], "top_k": [2]}]}
GOOD = [
    "1",
    "2",
    "64",
    "0.5",
    "64,128",
    "cpu",
    "nvidia-h200",
    "none",
    "config/config.yaml",
    "good.parquet",
    "config.json",
    "out.json",
    "out.parquet",
    "own.py",
    "sm_90a",
    "bf16",
    "a=1",
    "dim=64",
    "passes",
    "3%",
]
GOOD += [*BENCHES, *(choice for axis in AXES.values() for choice in axis.choices[:3])]
ODD = [
    "",
    " ",
    "0",
    "-1",
    "007",
    "1e9",
    "1e400",
    "64,64",
    ",",
    "nan",
    "inf",
    "٣",
    "１",
    "1_0",
    "0x1",
    "null",
    "true",
    "*",
    "?",
    "~",
    "-",
    "--",
    "=",
    "a=",
    "=b",
    "..",
    "/",
    "/dev/null",
    "/dev/zero",
    "/proc/self/mem",
    "folder",
    "pipe",
    "link",
    "x" * 300,
    "é",
    "日本",
    "[]",
    "{}",
    "HEAD:cpu",
    ":",
    "a:b:c",
    "%",
    "9" * 400,
    "[" * 50,
    "folder.parquet",
    "empty.parquet",
    "cut.parquet",
]
HOSTILE = [
    "\x1b[2J",
    "\x1b]0;t\x07",
    "a\nb",
    "a\rb",
    "\x9b1m",
    "\u202eabc",
    "\u2028",
    "\ufeff",
    "\udcff",
    "\0",
    "a\0b",
    "x" * 100_000,
    "{x}",
    "{0.__class__}",
    "%s%n",
    "$(id)",
    "`id`",
    "; id",
    "--output=x",
    "--output=x:y",
    "-c",
    "--force",
    "../" * 200,
    "\U000e0041",
    "\x7f",
    "9" * 10_000,
    "-" * 5000,
]
TEXTS = [
    json.dumps(SMALL),
    "{",
    "[]",
    "{}",
    "null",
    '{"grid": 1}',
    '{"grid": [], "run": "\\u001b"}',
    json.dumps(SMALL | {"seed": 1.5}),
    "[" * 100_000,
    "1" * 5000,
    json.dumps(SMALL | {"run": "../x"}),
    "NaN",
    '{"a": ' * 2000,
]


class Worked(BaseException):
    """A command would begin to measure, prepare texts, train, compile or draw."""


def stop(*arguments: Any, **options: Any) -> None:
    raise Worked


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory with some of what values name; nothing that takes long is begun in it."""
    monkeypatch.chdir(tmp_path)
    for name in ("MOE_ROUTING_BENCH_DEVICE", "MOE_ROUTING_BENCH_COMMIT", "PATH", "OMP_NUM_THREADS"):
        monkeypatch.setenv(name, os.environ.get(name, ""))
    Path("config").mkdir()
    Path("config/config.yaml").write_text(yaml.safe_dump(SMALL))
    Path("config.json").write_text('{"model_type": "mixtral", "num_local_experts": 8, "hidden_size": 64}')
    Path("good.parquet").write_bytes(parquet([[1, 2], [3, 4]] * 40))
    Path("cut.parquet").write_bytes(Path("good.parquet").read_bytes()[:-30])
    Path("empty.parquet").touch()
    Path("folder").mkdir()
    Path("folder.parquet").mkdir()
    os.mkfifo("pipe")
    Path("link").symlink_to("link")
    assert list(Loaded().values())  # imported before imports are watched
    load = importlib.import_module
    monkeypatch.setattr(importlib, "import_module", lambda name, *rest: stop() if name in WORK else load(name, *rest))
    monkeypatch.setattr(gpus, "reserved", stop)
    monkeypatch.setattr(
        subprocess, "Popen", type("Popen", (subprocess.Popen,), {"__init__": _only_git(subprocess.Popen)})
    )
    return tmp_path


def _only_git(popen: type) -> Any:
    """How a process is made: git alone is."""

    def made(self: Any, args: Any, *rest: Any, **options: Any) -> None:
        if args[0] != "git":
            raise Worked
        popen.__init__(self, args, *rest, **options)  # type: ignore

    return made


def value(chance: random.Random, parameter: Any) -> str:
    """A value of a parameter: most of them good."""
    if parameter.name in ("config_json", "spec") and chance.random() < 0.8:
        return chance.choice(TEXTS)
    axis = AXES.get(parameter.name)
    if axis and axis.choices and chance.random() < 0.5:
        return chance.choice(axis.choices)
    return chance.choice(chance.choices([GOOD, ODD, HOSTILE], [8, 2, 1])[0])


def drawn(chance: random.Random, commands: Loaded) -> list[str]:
    """A command line."""
    name = chance.choice(list(commands))
    words, few = [], chance.choice([1, 2, 3, 6])
    for parameter in commands[name].params:
        if parameter.param_type_name == "argument":
            words += [[value(chance, parameter)] for _ in range(chance.choice([1, 1, 1, 1, 0, 2]))]
        elif parameter.required or chance.random() < few / len(commands[name].params):
            flag = getattr(parameter, "is_flag", False)
            words += [[parameter.opts[0], *([] if flag else [value(chance, parameter)])]]
    chance.shuffle(words)
    line = [name, *(word for part in words for word in part)]
    match chance.randrange(12):
        case 0:
            line.insert(chance.randrange(len(line) + 1), chance.choice([*ODD, *HOSTILE]))
        case 1:
            del line[chance.randrange(len(line))]
        case 2:
            line.append(chance.choice(line))
    return line


def ended(line: list[str], patch: pytest.MonkeyPatch) -> tuple[int | None, str, str]:
    """The exit status of a command, None where it began to work, and what it printed."""
    out, err = (streams.Plain(io.BytesIO(), "utf-8", "replace", write_through=True) for _ in range(2))
    patch.setattr(sys, "argv", ["moe-routing-bench", *line])
    patch.setattr(sys, "stdout", out)
    patch.setattr(sys, "stderr", err)
    status: int | None = 0
    try:
        cli.main()
    except Worked:
        status = None
    except SystemExit as error:
        status = error.code or 0  # type: ignore
    return status, *(stream.buffer.getvalue().decode() for stream in (out, err))  # type: ignore


@pytest.mark.fault("random command line")
@pytest.mark.parametrize("part", range(2))
def test_random_command_lines(part: int, folder: Path) -> None:
    chance, commands, statuses = random.Random(part), Loaded(), []
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for number in range(COUNT // 2):
        line = drawn(chance, commands)
        begin = time.process_time()
        with pytest.MonkeyPatch.context() as patch:
            try:
                status, out, err = ended(line, patch)
            except Exception as error:
                raise AssertionError(
                    f"{ascii(line)[:2000]}: {type(error).__name__}: {ascii(str(error))[:300]}"
                ) from error
        taken = time.process_time() - begin
        said = f"{ascii(line)[:2000]}: {status} {err[:1000]!r}"
        assert taken < 5, f"{taken:.1f} s: {said}"
        assert not [letter for letter in out + err if not letter.isprintable() and letter != "\n"], said
        assert status in (0, 1, 2, None), said
        if status == 2 and line:  # without any, the help is printed
            assert err.count("error: ") >= 1 and len(err.splitlines()[-1]) <= 500, said
            assert not out and err.startswith(("error: ", "warning: ")), said
        statuses.append(status)
        if number % 50 == 49:
            tidy(folder)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 2**20
    assert len(statuses) // 2 < statuses.count(2) < len(statuses), "some are accepted"


def tidy(folder: Path) -> None:
    """Remove what commands have written."""
    kept = {
        "config",
        "config.json",
        "good.parquet",
        "cut.parquet",
        "empty.parquet",
        "folder",
        "folder.parquet",
        "pipe",
        "link",
    }
    for path in folder.iterdir():
        if path.name not in kept:
            shutil.rmtree(path) if path.is_dir() else path.unlink()
