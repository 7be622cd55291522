"""The file of published rows that a wheel has: it says what the Parquet files say, is read without Arrow, and is refused where it is damaged."""

import gzip
import hashlib
import json
import shutil
import subprocess
import sys

import pytest
from test_questions import arguments

from moe_routing_bench.answers import stored
from moe_routing_bench.answers.ask import ask
from moe_routing_bench.benches.registry import BENCHES
from moe_routing_bench.packages import PACKAGE
from moe_routing_bench.store import project_files
from moe_routing_kernels.errors import UserError

ROOT = PACKAGE.parents[1]
FILE = ROOT / "results" / project_files.ROWS
QUESTIONS = (
    ["deepseek-v3", "--tokens", "64"],
    ["qwen3-30b-a3b", "--tokens", "1", "--weights", "int4"],
    ["deepseek-v3", "--ranks", "8"],
    ["olmoe-1b-7b", "--phase", "training"],
    ["qwen3-30b-a3b", "--bench", "routing", "--tokens", "4096"],
    ["mixtral-8x7b", "--tokens", "64", "--weights", "e4m3_block128"],
)


@pytest.fixture
def alone(tmp_path, monkeypatch):
    """A folder with this file and no Parquet, which is the working directory."""
    (tmp_path / "results").mkdir()
    shutil.copy(FILE, tmp_path / "results")
    monkeypatch.chdir(tmp_path)
    return tmp_path / "results" / project_files.ROWS


def test_it_says_what_the_stored_rows_say(tmp_path, monkeypatch):
    """Row by row. `python docs/generate.py` writes it again."""
    monkeypatch.chdir(ROOT)
    names = [name for several in stored.runs().values() for name in several]
    rows = {name: stored._rows(name, tuple(BENCHES)) for name in names}
    lost = {name: stored.accuracy((name,)) for name in names}
    commits = {name: sorted({row["git_sha"] for row in found}) for name, found in rows.items()}
    versions = {name: [stored.version(name, commit) for commit in commits[name]] for name in names}
    (tmp_path / "results").mkdir()
    shutil.copy(FILE, tmp_path / "results")
    monkeypatch.chdir(tmp_path)
    assert [name for several in stored.runs().values() for name in several] == names and len(names) > 10
    for name in names:
        assert stored._rows(name, tuple(BENCHES)) == rows[name] and rows[name]
        assert stored.accuracy((name,)) == lost[name]
        assert [stored.version(name, commit) for commit in commits[name]] == versions[name]
        assert stored.submitter(name) is None
    assert any(lost.values())
    for name, about in project_files.published_rows(FILE).items():
        parquet = ROOT / "results" / name / "measurements.parquet"
        assert about["parquet"] == hashlib.sha256(parquet.read_bytes()).hexdigest()
    assert FILE.stat().st_size < 1e6


def test_an_axis_that_is_newer_than_the_file_has_no_value_in_its_rows(alone, monkeypatch):
    """`ask` ended in KeyError after an axis had been added by the recipe."""
    monkeypatch.setattr(stored, "AXES", stored.AXES | {"temperature": None})
    monkeypatch.setattr(stored, "NEEDED", (*stored.NEEDED, "temperature"))
    stored._from_columns.cache_clear()
    name = next(name for several in stored.runs().values() for name in several)
    found = stored._rows(name, tuple(BENCHES))
    stored._from_columns.cache_clear()
    assert found and all(row["temperature"] is None and row["bench"] for row in found)


@pytest.mark.parametrize("words", QUESTIONS, ids=" ".join)
def test_answers_are_the_same(words, alone, monkeypatch):
    model, axes = arguments(words)
    found = ask(model, **axes)
    monkeypatch.chdir(ROOT)
    assert found == ask(model, **axes)


def test_an_answer_needs_neither_arrow_nor_numpy(alone):
    """As in an environment that has none of them; the command prints what it prints here."""
    program = """import sys
sys.modules |= dict.fromkeys(("numpy", "pyarrow", "pandas", "torch", "scipy", "matplotlib", "snakemake"))
from moe_routing_bench.cli.main import main
sys.argv = ["moe-routing-bench", "ask", "qwen3-30b-a3b", "--tokens", "64", "--json"]
main()"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == json.loads(json.dumps(ask("qwen3-30b-a3b", tokens=64)))


def test_parquet_files_of_a_folder_come_first(alone, monkeypatch):
    folder = alone.parent / "nvidia-h200.seed-004"
    shutil.copytree(ROOT / "results/nvidia-h200.seed-004", folder)
    assert stored.runs() == {"nvidia-h200": ["nvidia-h200.seed-004"]}


def test_a_run_that_it_has_not(alone):
    with pytest.raises(UserError, match=r"run: got 'nvidia-h200\.none'; allowed: nvidia-h100"):
        stored.cells(["nvidia-h200.none"], ("layer",))


@pytest.mark.parametrize(
    "change",
    [
        lambda data: data[:-9],
        lambda data: b"no gzip",
        lambda data: b"",
        lambda data: gzip.compress(b"[]"),
        lambda data: gzip.compress(b"{}"),
        lambda data: gzip.compress(b'{"form": 1'),
        lambda data: gzip.compress(bytes(2**26 + 2)),
        lambda data: data[:5000] + b"\x00\x00" + data[5002:],
    ],
    ids=["cut", "text", "empty", "list", "no runs", "no end", "too large", "altered"],
)
def test_a_damaged_file_is_refused_in_one_line(change, alone):
    alone.write_bytes(change(FILE.read_bytes()))
    with pytest.raises(UserError, match=r"published rows: got .*answers\.json\.gz.*install it again") as found:
        ask("qwen3-30b-a3b", tokens=64)
    assert "\n" not in str(found.value)


def test_a_file_of_another_form_is_refused(alone):
    alone.write_bytes(gzip.compress(json.dumps({"form": 2, "runs": {}}).encode()))
    with pytest.raises(UserError, match=r"form of .*got 2; allowed: 1"):
        ask("qwen3-30b-a3b", tokens=64)
