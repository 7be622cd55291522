"""Nonsense that was, or might be, taken for something: each is refused in one line, and nothing is written."""

import os
import sys
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml

from moe_routing_bench.cli import main as cli
from moe_routing_bench.config import load, presets
from moe_routing_bench.config.expand import expand

ROOT = Path(__file__).parents[2]
MODELS = presets.load(ROOT / "config/models.yaml")
CONFIG = "grid:\n- benches: [pack]\n  tokens: [64]\n  hidden: [64]\n  experts: [32]\n  top_k: [2]\nseed: 17\n"
# A config with one value in place of another
VALUES = {
    "octal": ("seed: 17", "seed: 017"),
    "hours and minutes": ("seed: 17", "seed: 1:30"),
    "digits in groups": ("[64]\n  hidden", "[1_000]\n  hidden"),
    "hexadecimal": ("seed: 17", "seed: 0x10"),
    "binary": ("seed: 17", "seed: 0b11"),
    "infinite": ("top_k: [2]", "top_k: [2]\n  skew: [.inf]"),
    "no number": ("top_k: [2]", "top_k: [2]\n  skew: [.nan]"),
    "a date": ("top_k: [2]", "top_k: [2]\n  phase: 2026-11-28"),
    "yes": ("seed: 17", "seed: yes"),
    "off": ("benches: [pack]", "benches: [off]"),
    "a truth value as a number": ("seed: 17", "seed: true"),
    "a fraction as a count": ("top_k: [2]", "top_k: [2.0]"),
    "a text as a number": ("top_k: [2]", "top_k: ['2']"),
    "digits of another script": ("top_k: [2]", "top_k: [٢]"),
    "a power": ("tokens: [64]", "tokens: [1e3]"),
    "a key of numbers": ("seed: 17", "017: 17"),
    "twice": ("tokens: [64]", "tokens: [64, 64]"),
    "nothing": ("tokens: [64]", "tokens: []"),
    "null": ("tokens: [64]", "tokens: ~"),
    "in each other": ("tokens: [64]", "tokens: [[64]]"),
    "negative": ("tokens: [64]", "tokens: [-64]"),
    "more chosen than there are": ("top_k: [2]", "top_k: [33]"),
    "a tag": ("seed: 17", "seed: !!python/object/apply:os.getcwd []"),
    "a misspelling": ("hidden:", "hiden:"),
    "a brace in the name of a trace": ("top_k: [2]", "top_k: [2]\n  sampler: [trace]\n  trace: 'a{x}.parquet'"),
    "a line's end in the name of a trace": ("top_k: [2]", 'top_k: [2]\n  sampler: [trace]\n  trace: "a\\nb.parquet"'),
    "a dash before the name of a trace": ("top_k: [2]", "top_k: [2]\n  sampler: [trace]\n  trace: -rf.parquet"),
    "a run above": ("grid:", "run: ../x\ngrid:"),
    "a run with an escape": ("grid:", 'run: "a\\e[1m"\ngrid:'),
    "a share of nothing": ("grid:", "share: 0/0\ngrid:"),
    "a corpus that is a process": (
        "grid:",
        "quality:\n- {label: a, router: [softk], seed: [1], corpora: {/proc/self: all}, lr: 0.001, steps: 20}\ngrid:",
    ),
    "a label of two lines": (
        "grid:",
        'quality:\n- {label: "a\\nb", router: [softk], seed: [1], corpora: {stdlib: all}}\ngrid:',
    ),
}
ESC = "\x1b[31m"
LINES = {
    "digits of mathematics": ["trace", "good.csv", "--top-k", "𝟙"],
    "wide digits": ["measure", "gate", "--tokens", "６４"],
    "digits in groups": ["measure", "gate", "--tokens", "1_000"],
    "hexadecimal": ["measure", "gate", "--seed", "0x10"],
    "blanks around a number": ["measure", "gate", "--seed", " 17 "],
    "infinite": ["measure", "gate", "--timeout", "inf"],
    "no number": ["measure", "gate", "--max-seconds", "nan"],
    "a file of models that is none": ["measure", "gate", "--models", "2"],
    "a pattern of the shell": ["measure", "gate", "--out", "*"],
    "another pattern": ["trace", "good.csv", "--out", "a?.parquet"],
    "an empty output": ["measure", "gate", "--out", ""],
    "an empty run": ["status", "--run", ""],
    "an empty bench": ["measure", ""],
    "an escape in a bench": ["measure", ESC],
    "an escape in an option": ["measure", "gate", f"--{ESC}"],
    "an escape in a command": [ESC],
    "an escape in an output": ["measure", "gate", "--out", f"{ESC}.json"],
    "two lines": ["status", "--platform", "cpu\nerror: all is well"],
    "a direction of letters": ["figure", "--name", "a\u202eb"],
    "an option of git": ["compare", "--", "--output=out:cpu", "cpu"],
    "an option of git as a commit": ["compare", "--", "cpu", "-p:cpu"],
    "a path as a platform": ["status", "--platform", "../../etc"],
    "a percentage of another script": ["compare", "cpu", "cpu", "--fail-if-slower", "٣%"],
    "a module of another script": ["kernel", "pack", "é.py"],
    "a plugin with a path": ["list", "--plugin", "../x"],
    "a plugin of another script": ["list", "--plugin", "é:x"],
    "a name of a preset with a slash": ["preset", "config.json", "--name", "../x"],
    "a name of a preset of two lines": ["preset", "config.json", "--name", "a\nb: 1"],
    "an override of another base": ["train", "softk", "--set", "dim=0100"],
    "a text of a megabyte": ["measure", "x" * 10**5],
}
FILES = {
    "a device as models": ["measure", "gate", "--models", "zero.yaml"],
    "a pipe as a config": ["status", "--config", "pipe.yaml"],
    "a device as config.json": ["preset", "zero.json"],
    "ids that count from nowhere": ["trace", "negative.csv"],
    "ids that are twice": ["trace", "twice.parquet"],
    "names of columns that are an escape": ["trace", "escape.csv"],
    "a table of half a footer": ["compare", "half.parquet", "half.parquet"],
    "rows of another kind": ["report", "--rows", "good.csv", "--out", "report"],
    "a claim without a figure": ["claims", "--platform", "cpu", "--file", "claims.yaml"],
    "a folder as rows": ["report", "--rows", "folder.csv", "--out", "report"],
}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory with a config and odd files."""
    monkeypatch.chdir(tmp_path)
    Path("config").mkdir()
    Path("config/config.yaml").write_text(CONFIG)
    Path("config.json").write_text(
        '{"model_type": "mixtral", "num_local_experts": 8, "num_experts_per_tok": 2, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1}'
    )
    ids = np.argsort(np.random.default_rng(0).random((64, 32)))[:, :2]
    Path("good.csv").write_text("".join(f"{a},{b}\n" for a, b in ids))
    Path("negative.csv").write_text("-1,2\n" * 9)
    Path("escape.csv").write_text(f"{ESC},b\n1,2\n")
    pq.write_table(pa.table({"expert_ids": [[1, 1]] * 64}), "twice.parquet")
    for name in ("a{x}", "a\nb", "-rf"):
        pq.write_table(pa.table({"expert_ids": ids.tolist()}), f"{name}.parquet")
    Path("half.parquet").write_bytes(Path("twice.parquet").read_bytes()[:-20])
    Path("claims.yaml").write_text("claims:\n- {id: a, who: b}\n")
    Path("folder.csv").mkdir()
    for name in ("zero.yaml", "zero.json"):
        Path(name).symlink_to("/dev/zero")
    os.mkfifo("pipe.yaml")
    return tmp_path


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.fault("nonsense in a config")) for name in VALUES]
)
def test_a_config(name: str, folder: Path) -> None:
    good, odd = VALUES[name]
    path = Path("config/odd.yaml")
    assert good in CONFIG and expand(load.load("config/config.yaml"), MODELS)
    path.write_text(CONFIG.replace(good, odd, 1))
    refused(["status", "--config", str(path)], folder)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.fault("nonsense on a command line")) for name in LINES]
)
def test_a_command_line(name: str, folder: Path) -> None:
    refused(LINES[name], folder)


@pytest.mark.parametrize("name", [pytest.param(name, marks=pytest.mark.fault("nonsense in a file")) for name in FILES])
def test_a_file(name: str, folder: Path) -> None:
    refused(FILES[name], folder)


def refused(arguments: list[str], folder: Path) -> None:
    """Run a command: one line of printable letters on stderr, exit status 2, and no new file."""
    before = sorted(folder.rglob("*"))
    out, err = Printed(), Printed()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["moe-routing-bench", *arguments])
        patch.setattr(sys, "stdout", out)
        patch.setattr(sys, "stderr", err)
        with pytest.raises(SystemExit) as ended:
            cli.main()
    assert ended.value.code == 2 and not out.text, (out.text, err.text)
    line = err.text.removesuffix("\n")
    assert line.startswith("error: ") and line.isprintable() and len(line) <= 500, err.text
    assert sorted(folder.rglob("*")) == before


class Printed:
    """A stream in memory, which no filter is around."""

    def __init__(self) -> None:
        self.text = ""

    def write(self, text: str) -> int:
        self.text += text
        return len(text)

    def flush(self) -> None:
        pass


def test_there_are_sixty() -> None:
    assert len(VALUES) + len(LINES) + len(FILES) >= 60


@pytest.mark.parametrize("text", ["17", "-3", "+4", "1.5", "1.5e+3", "true", "'017'", "'yes'", "null", '"1:30"'])
def test_what_reads_as_it_looks_is_taken(text: str) -> None:
    assert load.parse_yaml(f"a: {text}") == yaml.safe_load(f"a: {text}")
