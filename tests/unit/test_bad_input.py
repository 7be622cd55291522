"""Bad input, through the entry points that a user meets: one clear line, an exit status, and nothing measured is lost.

Each row of a table below is one bad input with the words that its message must hold: what, got, allowed or the hint.
"""

import io
import json
import math
import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml

import forks
from moe_routing_bench.cli import main as cli
from moe_routing_bench.config import load as config
from moe_routing_bench.config.expand import expand
from moe_routing_bench.measure import supervisor
from moe_routing_bench.store import paths, records, rows
from moe_routing_bench.store.parquet import read_table

ROOT = Path(__file__).parents[2]
ENTRY = {"benches": ["pack"], "tokens": [64], "hidden": [16], "experts": [8], "top_k": [2]}
LAYER = {"benches": ["layer"], "intermediate": [16]}
GOOD = {"grid": [{**ENTRY, "implementations": ["torch"], "tokens": [64, 128]}]}


def entry(**change):
    """A config of one entry, good but for `change`; a None takes the key away."""
    return {"grid": [{name: value for name, value in {**ENTRY, **change}.items() if value is not None}]}


def measure(**change):
    return {**entry(), "measure": change}


def trace(name, **change):
    return entry(sampler=["trace"], trace=f"traces/{name}.parquet", **change)


CONFIGS = {
    # keys
    "unknown key": ({**entry(), "sed": 1}, "config key: got 'sed'", "did you mean 'seed'?"),
    "unknown key that is no text": ({**entry(), 7: 1}, "config key: got 7"),
    "unknown grid key": (entry(top_ks=[1]), "config.grid[0] key: got 'top_ks'", "did you mean 'top_k'?"),
    "unknown measure key": (measure(max_second=1), "config.measure key", "did you mean 'max_seconds'?"),
    "no grid": ({"seed": 1}, "no 'grid'"),
    "no benches": (entry(benches=None), "no 'benches'"),
    "no tokens": (entry(tokens=None), "grid entry for bench pack", "no tokens"),
    # misspelt values
    "misspelt bench": (entry(benches=["pakc"]), "config.grid[0].benches[0]: got 'pakc'", "did you mean 'pack'?"),
    "misspelt implementation": (entry(implementations=["tritn"]), "'tritn'", "did you mean 'triton'?"),
    "misspelt dtype": (entry(dtype=["bf61"]), ".dtype[0]: got 'bf61'", "did you mean 'bf16'?"),
    "dtype in capitals": (entry(dtype=["FP32"]), ".dtype[0]: got 'FP32'", "allowed: bf16, fp16, fp32"),
    "fp8 where nothing quantises": (entry(dtype=["fp8_row"]), ".dtype[0]: got 'fp8_row'", "allowed: bf16, fp16, fp32"),
    "misspelt layout": (entry(layout=["paded"]), ".layout[0]: got 'paded'", "did you mean 'padded'?"),
    "misspelt layout, unused": (entry(**LAYER, layout=["paded"]), ".layout[0]: got 'paded'", "did you mean 'padded'?"),
    "misspelt sampler": (entry(sampler=["exakt"]), ".sampler[0]: got 'exakt'", "did you mean 'exact'?"),
    "misspelt router": (entry(**LAYER, router=["deepseek-v3"]), "did you mean 'deepseek_v3'?"),
    "misspelt phase": (entry(phase="prefil"), "config.grid[0].phase: got 'prefil'", "did you mean 'prefill'?"),
    "misspelt device": ({**entry(), "device": "cuda"}, "config.device: got 'cuda'", "auto"),
    "misspelt model": (
        {"grid": [{"benches": ["gate"], "tokens": [1], "model": ["deepseek-v33"]}]},
        "did you mean 'deepseek-v3'?",
    ),
    "unsupported model": (
        {"grid": [{"benches": ["gate"], "tokens": [1], "model": ["kimi-k3"]}]},
        "'kimi-k3'",
        "a preset that can be measured",
        "latent MoE",
    ),
    "model and its axis": (entry(**LAYER, model=["mixtral-8x7b"]), "nothing in addition to model", "a model sets it"),
    "implementation of no bench": (entry(implementations=["torch_bmm"]), "grid: got 'no cell'", "implementations"),
    # types
    "grid is a mapping": ({"grid": ENTRY}, "config.grid: got {", "a list of entries"),
    "entry is text": ({"grid": ["pack"]}, "config.grid[0]: got 'pack'", "a mapping"),
    "measure is a list": ({**entry(), "measure": [1]}, "config.measure: got [1]", "a mapping"),
    "number for a list": (entry(experts=8), "config.grid[0].experts: got 8", "write [8]"),
    "text for a number": (
        entry(tokens=["many"]),
        "config.grid[0].tokens[0]: got 'many'",
        "an integer from 1 to 2147483647",
    ),
    "tokens 64.0": (entry(tokens=[64.0]), "config.grid[0].tokens[0]: got 64.0", "an integer"),
    "true for a number": (entry(top_k=[True]), "config.grid[0].top_k[0]: got True", "an integer"),
    "list in a list": (entry(hidden=[[16]]), "config.grid[0].hidden[0]: got [16]"),
    "seed 1.0": ({**entry(), "seed": 1.0}, "config.seed: got 1.0", "an integer"),
    "seed of 70 bits": ({**entry(), "seed": 2**70}, f"config.seed: got {2**70}", "2147483647"),
    "seed below 0": ({**entry(), "seed": -1}, "config.seed: got -1"),
    # lists
    "empty grid": ({"grid": []}, "config.grid: got []"),
    "empty list": (entry(tokens=[]), "config.grid[0].tokens: got []", "a non-empty list"),
    "a value twice": (entry(tokens=[64, 64]), "config.grid[0].tokens", "64 is there twice"),
    "a factor twice": (entry(capacity_factor=[1, 1.0]), "config.grid[0].capacity_factor", "1.0 is there twice"),
    "a bench twice": (entry(benches=["pack", "pack"]), "config.grid[0].benches", "'pack' is there twice"),
    # ranges
    "tokens 0": (entry(tokens=[0]), "config.grid[0].tokens[0]: got 0", "from 1 to"),
    "hidden below 0": (entry(hidden=[-16]), "config.grid[0].hidden[0]: got -16", "from 1 to"),
    "experts 0": (entry(experts=[0]), "config.grid[0].experts[0]: got 0", "from 1 to"),
    "top_k 0": (entry(top_k=[0]), "config.grid[0].top_k[0]: got 0", "from 1 to"),
    "intermediate 0": (entry(benches=["layer"], intermediate=[0]), "config.grid[0].intermediate[0]: got 0"),
    "top_k above experts": (entry(top_k=[9]), "top_k: got 9", "1 to experts=8"),
    "rows above int32": (entry(tokens=[2**30]), "grid: got '2147483648 rows'", "at most 2130706432"),
    "capacity factor 0": (entry(capacity_factor=[0]), "capacity_factor[0]: got 0", "a number above 0"),
    "capacity factor below 0": (entry(capacity_factor=[-1.25]), "capacity_factor[0]: got -1.25"),
    "capacity factor nan": (entry(capacity_factor=[math.nan]), "'.nan' in line 5 is another number"),
    "capacity factor inf": (entry(capacity_factor=[math.inf]), "'.inf' in line 5 is another number"),
    "capacity factor null": (entry(capacity_factor=[None]), "capacity_factor[0]: got None", "or none"),
    "padded without capacity": (entry(layout=["padded"]), "layout: got 'padded'", "without a capacity_factor"),
    "experts of a billion": (entry(experts=[10**9]), "config.grid[0].experts[0]: got 1000000000", "from 1 to 65536"),
    "hidden of 100 bits": (
        entry(hidden=[10**30]),
        "hidden[0]: got 1000000000000000000000000000000",
        "from 1 to 1048576",
    ),
    "a hundred thousand digits": (entry(hidden=[10**4000]), "config.grid[0].hidden[0]: got 1000", "..."),
    "a name of a megabyte": (entry(benches=["x" * 10**6]), "config.grid[0].benches[0]: got 'xxx", " … ", "pack"),
    "a model of a megabyte": (
        {"grid": [{"benches": ["gate"], "tokens": [1], "model": ["x" * 10**6]}]},
        "grid model: got 'xxx",
        " … ",
    ),
    "a text of a megabyte for a list": (
        entry(tokens="x" * 10**6),
        "config.grid[0].tokens: got 'xxx",
        "a non-empty list",
    ),
    "a million cells": (
        entry(benches=["gate"], hidden=None, tokens=[*range(64, 564)], experts=[*range(8, 508)], top_k=[1, 2, 3, 4]),
        "got '1000000 cells of gate'",
        "at most 50000",
    ),
    "two entries of too many cells": (
        {
            "grid": [
                entry(benches=["gate"], hidden=None, tokens=[*range(64, 284)], experts=[*range(first, first + 120)])[
                    "grid"
                ][0]
                for first in (8, 200)
            ]
        },
        "got 'more than 50000 cells'",
        "several configs",
    ),
    "a timeout of months": (measure(timeout=1e7), "config.measure.timeout: got 10000000.0", "at most 86400"),
    "a billion seeds": (measure(check_seeds=10**9), "config.measure.check_seeds: got 1000000000", "from 1 to 1000"),
    "timeout nan": (measure(timeout=math.nan), "'.nan' in line"),
    "max_seconds inf": (measure(max_seconds=math.inf), "'.inf' in line"),
    "min_blocks 0": (measure(min_blocks=0), "config.measure.min_blocks: got 0"),
    "max_blocks below min_blocks": (measure(max_blocks=2), "measure.max_blocks: got 2", "at least min_blocks=20"),
    # skew and routers
    "skew below 0": (entry(skew=[-0.1]), "config.grid[0].skew[0]: got -0.1"),
    "skew nan": (entry(skew=[math.nan]), "'.nan' in line"),
    "skew above the ceiling": (
        entry(skew=[1.72]),
        "skew: got 1.72",
        "0 to 1.7 ",
        "CV is below sqrt(experts/top_k - 1)",
    ),
    "skew of one expert": (entry(experts=[1], top_k=[1], skew=[0.1]), "skew: got 0.1", "experts=1"),
    "skew below the noise": (entry(skew=[0.1], sampler=["plackett_luce"]), "skew: got 0.1", "0.217 to 1.7"),
    "experts not in groups": (entry(**LAYER, router=["deepseek_v3"], experts=[20]), "a multiple of its 8 groups"),
    "groups of one expert": (
        entry(**LAYER, router=["deepseek_v3"]),
        "experts for router deepseek_v3: got 8",
        "two per group",
    ),
    "top_k above kept groups": (
        entry(**LAYER, router=["deepseek_v2"], experts=[16], top_k=[7]),
        "at most 6: 3 of 8 groups",
    ),
    # traces
    "trace missing": (trace("absent"), "trace: got 'traces/absent.parquet'", "No such file"),
    "trace with a name of a megabyte": (
        entry(sampler=["trace"], trace="x" * 10**6),
        "trace: got 'xxx",
        "File name too long",
    ),
    "trace with a null in its name": (entry(sampler=["trace"], trace="a\0b"), "trace: got 'a\\x00b'", "null"),
    "trace without a path": (entry(sampler=["trace"]), "sampler: got 'trace'", "add the path"),
    "trace not asked for": (entry(trace="traces/short.parquet"), "only with sampler: [trace]"),
    "trace is a folder": (entry(sampler=["trace"], trace="traces"), "trace: got 'traces'"),
    "trace is garbage": (trace("garbage"), "trace: got 'traces/garbage.parquet'", "no Parquet file"),
    "trace is empty": (trace("empty"), "trace: got 'traces/empty.parquet'", "0 bytes"),
    "trace of another column": (trace("column"), "no such column", "'expert_ids'"),
    "trace of numbers": (trace("numbers"), "trace: got 'int64 in", "lists of integers"),
    "trace of fractions": (trace("fractions"), "double", "lists of integers"),
    "trace too short": (trace("short"), "trace: got '3 rows", "at least tokens=64"),
    "trace of another k": (trace("three"), "rows of other lengths", "top_k=2"),
    "trace with nulls": (trace("null"), "rows of other lengths"),
    "trace id too large": (trace("range"), "ids 0 to 8", "0 to 7"),
    "trace id below 0": (trace("negative"), "ids -1 to 2", "0 to 7"),
    "trace id of 40 bits": (trace("wide"), f"ids 0 to {2**40}", "0 to 7"),
    "trace with an expert twice": (trace("twice"), "a row that holds an expert twice"),
}
TRACES = {
    "short": [[0, 1]] * 3,
    "three": [[0, 1, 2]] * 64,
    "range": [[0, 8]] * 64,
    "negative": [[-1, 2]] * 64,
    "twice": [[0, 1]] * 63 + [[3, 3]],
    "numbers": [1] * 64,
    "fractions": [[0.5, 1.0]] * 64,
    "wide": [[0, 2**40]] * 64,
    "null": [[0, 1]] * 63 + [[0, None]],
}

MEASURE = {
    "bench": (["gat"], "bench: got 'gat'", "did you mean 'gate'?"),
    "implementation": (["pack", "--implementations", "torch,qack"], "error: --implementations: got 'qack'"),
    "no implementation": (["pack", "--implementations", ""], "error: --implementations: got ''", "not empty"),
    "implementation twice": (["pack", "--implementations", "torch,torch"], "'torch' is there twice"),
    "mode": (["pack", "--mode", "hot"], "error: --mode: got 'hot'", "warm, cold"),
    "tokens": (["pack", "--tokens", "-1"], "error: --tokens: got -1", "from 1 to"),
    "top_k": (["pack", "--top-k", "9"], "error: --top-k: got 9", "1 to experts=8"),
    "capacity factor nan": (["pack", "--capacity-factor", "nan"], "error: --capacity-factor: got 'nan'"),
    "capacity factor text": (["pack", "--capacity-factor", "lots"], "--capacity-factor: got 'lots'", "or none"),
    "skew": (["pack", "--skew", "9"], "error: --skew: got 9.0", "0 to 1.7 "),
    "time without end": (["pack", "--max-seconds", "inf"], "error: --max-seconds: got 'inf'"),
    "model and a size": (
        ["layer", "--model", "dbrx", "--hidden", "8"],
        "error: --hidden: got [8]",
        "nothing in addition to model",
    ),
    "model": (["layer", "--model", "dbrxx"], "error: --model: got 'dbrxx'", "did you mean 'dbrx'?"),
    "trace not asked for": (
        ["pack", "--trace", "t", "--sampler", "exact"],
        "error: --trace: got 't'",
        "only with sampler: [trace]",
    ),
    "seed": (["gate", "--seed", "-1"], "error: --seed: got -1"),
    "profile below a file": (["gate", "--profile", "notes.txt/x"], "output: got 'notes.txt/x"),
    "out is a folder": (["gate", "--out", "traces"], "output: got 'traces'", "Is a directory"),
    "out below a file": (["gate", "--out", "notes.txt/x.parquet"], "output: got 'notes.txt/x.parquet'"),
}
OTHERS = {
    "config missing": (["status", "--config", "absent.yaml"], "'absent.yaml'", "No such file"),
    "config is a folder": (["status", "--config", "traces"], "'traces'", "it is a folder"),
    "config is not UTF-8": (["collect", "--config", "traces/latin.yaml"], "not UTF-8"),
    "corpora is a text": (
        ["train", "--set", "corpora=stdlib"],
        "corpora: got 'stdlib'",
        "a mapping from a name to an integer, or none",
    ),
    "bytes are a text": (
        ["train", "--set", "corpora={stdlib: x}"],
        "corpora: got {'stdlib': 'x'}",
        "a mapping from a name to an integer",
    ),
    "a corpus is not there": (["train", "--set", "corpora={nowhere: 5}"], "corpus: got 'nowhere'", "stdlib"),
    "--set is no YAML": (["train", "--set", "corpora={"], "--set corpora: got '{'", "a YAML value"),
    "config is bad YAML": (["prune", "--remove", "--config", "traces/bad.yaml"], "valid YAML"),
    "config is a list": (["prune", "--remove", "--config", "traces/list.yaml"], "got 'list'", "a mapping"),
    "a key twice": (["status", "--config", "traces/key.yaml"], "'tokens' is there twice, in lines 3 and 4"),
    "a list in itself": (["status", "--config", "traces/itself.yaml"], "*a is within itself, in line 1"),
    "aliases of aliases": (["status", "--config", "traces/aliases.yaml"], "more than 100000 values, in line 6"),
    "a thousand lists in each other": (
        ["status", "--config", "traces/deep.yaml"],
        "more than 12 lists and mappings in each other, in line 1",
    ),
    "JSON cut off": (["collect", "--config-json", '{"grid": ['], "--config-json", "Expecting value"),
    "JSON is a list": (["status", "--config-json", "[]"], "--config-json: got '[]'", "a JSON object"),
    "JSON is empty": (["prune", "--remove", "--config-json", ""], "--config-json: got ''", "one JSON text"),
    "JSON and a file": (["prune", "--config-json", "{}", "--config", "c.yaml"], "together with --config"),
    "JSON of training runs cut off": (["collect-quality", "--config-json", "{"], "--config-json", "Expecting"),
    "JSON of adaptations is a list": (
        ["collect-perft", "--config-json", "[]"],
        "--config-json: got '[]'",
        "a JSON object",
    ),
    "JSON of training runs is empty": (
        ["collect-quality", "--config-json", ""],
        "--config-json: got ''",
        "one JSON text",
    ),
    "platform of training runs is a path": (["rank", "--platform", "../cpu"], "platform: got '../cpu'"),
    "platform in capitals": (["status", "--platform", "NVIDIA H200"], "did you mean 'nvidia-h200'?"),
    "platform is a path": (["prune", "--remove", "--platform", "../cpu"], "platform: got '../cpu'"),
    "figures of no results": (
        ["figure", "--platform", "none"],
        "'results/none/measurements.parquet'",
        "run `snakemake`",
    ),
    "report of no results": (
        ["report", "--platform", "none"],
        "'results/none/measurements.parquet'",
        "run `snakemake`",
    ),
    "collect of no results": (
        ["collect", "--platform", "none", "--config", "good.yaml"],
        "cell files: got '2 of 2 missing, such as results/none/cells/pack/",
        "run `snakemake`",
    ),
    "measure again of no results": (["measure-again", "--platform", "none", "--config", "good.yaml"], "2 of 2 missing"),
    "site of no report": (["site", "--out", "traces/site"], "reports: got 'none in reports/'"),
    "an architecture that the compiler lacks": (
        ["compile", "--arch", "sm_999", "--config", "good.yaml"],
        "--arch: got 'sm_999'",
        "sm_90a",
    ),
    "size of a cell of accuracy": (["accuracy", "--tokens", "0"], "error: --tokens: got 0"),
    "spec of a run cut off": (["train", "--spec", "{"], "--spec: got '{'", "a training run as one JSON text"),
    "spec of a run without fields": (["train", "--spec", "{}"], "--spec: got '{}'"),
    "spec of an adaptation is a list": (
        ["adapt", "good.yaml", "--spec", "[]"],
        "--spec: got '[]'",
        "an adaptation as one JSON text",
    ),
    "unknown figure": (
        ["figure", "--platform", "cpu", "--name", "speed"],
        "figure: got 'speed'",
        "did you mean 'speedup'?",
    ),
    "report before figures": (["report", "--platform", "cpu"], "missing", "moe-routing-bench figure --platform cpu"),
    "collect into a folder": (
        ["collect", "--platform", "cpu", "--config", "good.yaml", "--out", "traces"],
        "Is a directory",
    ),
    "figures below a file": (
        ["figure", "--platform", "cpu.taken", "--name", "speedup"],
        "output: got 'reports/cpu.taken/figures/speedup.svg'",
    ),
}


def _parquet(table):
    sink = io.BytesIO()
    pq.write_table(table, sink)
    return sink.getvalue()


def _set(table, name, value, kind):
    return table.set_column(table.column_names.index(name), name, pa.array([value] * len(table), kind))


def _version(table, value, kind=None):
    return _parquet(_set(table, "schema_version", value, kind or pa.int32()))


DAMAGE = {
    "garbage": (lambda t: b"junk" * 99, "no Parquet file"),
    "empty file": (lambda t: b"", "0 bytes"),
    "cut in half": (lambda t: _parquet(t)[: len(_parquet(t)) // 2], "no Parquet file"),
    "cut at its start": (lambda t: b"PAR1" + _parquet(t)[len(_parquet(t)) // 2 :], "readable Parquet"),
    "older schema": (lambda t: _version(t, 0), "schema_version: got 0", f"allowed: {rows.SCHEMA_VERSION}"),
    "newer schema": (lambda t: _version(t, 99), "schema_version: got 99", f"allowed: {rows.SCHEMA_VERSION}"),
    "version is text": (lambda t: _version(t, "2", pa.string()), "schema_version: got '2'"),
    "version of some rows": (
        lambda t: _parquet(pa.concat_tables([t, _set(t, "schema_version", 98, pa.int32())])),
        "got 98",
    ),
    "no version": (lambda t: _parquet(t.drop(["schema_version"])), "schema_version: got None"),
    "column missing": (lambda t: _parquet(t.drop(["median_us"])), "1 absent, unknown or of another type: median_us"),
    "column unknown": (lambda t: _parquet(t.append_column("speed", pa.array([1] * len(t)))), "another type: speed"),
    "column of text": (lambda t: _parquet(_set(t, "median_us", "fast", pa.string())), "another type: median_us"),
    "no rows": (lambda t: _parquet(t.slice(0, 0)), "no rows"),
}


def _of_spec(table, spec=None):
    kept = {name: value for name, value in table.schema.metadata.items() if name != rows.SPEC}
    return _parquet(table.replace_schema_metadata(kept if spec is None else kept | {rows.SPEC: spec}))


STALE = {
    "another spec": (lambda t: _of_spec(t, b"{}"), "was measured for"),
    "no spec": (_of_spec, "was measured for"),
    "spec is no text": (lambda t: _of_spec(t, b"\xff"), "was measured for"),
    "another implementation": (
        lambda t: _parquet(_set(t, "implementation", "cute", pa.string())),
        "['cute'], asked were ['torch']",
    ),
}


def cases(table):
    return [pytest.param(given, words, id=name) for name, (given, *words) in table.items()]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A working directory with two measured cells, their collected rows, and every bad file."""
    here = tmp_path_factory.mktemp("bench")
    (here / "config").symlink_to(ROOT / "config")
    (here / "good.yaml").write_text(yaml.safe_dump(GOOD))
    (here / "notes.txt").write_text("not a folder")
    for path, job in paths.cell_files("cpu", expand(config.load(GOOD), {})).items():
        row = {"schema_version": rows.SCHEMA_VERSION, "bench": "pack", "cell": job.cell.key, "cell_hash": job.hash}
        row |= {"implementation": "torch", "status": "ok", "median_us": 1.0, "measure_seconds": 2.0, "platform": "cpu"}
        row |= dict(job.cell.values) | dict.fromkeys(("started_at", "ended_at"), "2026-11-21T06:55:00+00:00")
        rows.write(here / path, [row], job.spec)
        rows.write(here / paths.measurements("cpu"), [row], job.spec)
        rows.write(here / paths.measurements("cpu.taken"), [row], job.spec)
    (here / "reports").mkdir()
    (here / "reports/cpu.taken").write_text("not a folder")
    traces = here / "traces"
    traces.mkdir()
    for name, lists in TRACES.items():
        pq.write_table(pa.table({"expert_ids": lists}), traces / f"{name}.parquet")
    pq.write_table(pa.table({"ids": TRACES["short"]}), traces / "column.parquet")
    (traces / "garbage.parquet").write_bytes(b"junk" * 99)
    (traces / "empty.parquet").touch()
    (traces / "latin.yaml").write_bytes(b"seed: \xe9\n")
    (traces / "bad.yaml").write_text("grid: [\n")
    (traces / "list.yaml").write_text("- grid\n")
    (traces / "key.yaml").write_text("grid:\n  - benches: [gate]\n    tokens: [64]\n    tokens: [128]\n")
    (traces / "itself.yaml").write_text("grid: &a [*a]\n")
    levels = [f"k{i + 1}: &a{i + 1} [{', '.join([f'*a{i}'] * 9)}]" for i in range(6)]
    (traces / "aliases.yaml").write_text("\n".join(["k0: &a0 [1, 1, 1]", *levels, ""]))
    (traces / "deep.yaml").write_text("grid: " + "[" * 1000 + "]" * 1000)
    return here


def contents(folder):
    """Every file below `folder` with its bytes."""
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file() and "config" not in path.parts}


@pytest.fixture
def refuse(folder, monkeypatch, capsys):
    """Run a command in the folder: it must fail with one line that holds `words`, and change no file."""
    monkeypatch.chdir(folder)
    monkeypatch.setattr(supervisor, "measure", lambda *_: pytest.fail("it was measured"))

    def run(arguments, words):
        before = contents(folder)
        monkeypatch.setattr(sys, "argv", ["moe-routing-bench", *arguments])
        with pytest.raises(SystemExit) as caught:
            cli.main()
        out, error = capsys.readouterr()
        assert (caught.value.code, out) == (2, "")
        assert error.startswith("error: ") and error.count("\n") == 1 and len(error) <= 500
        assert not [word for word in words if word not in error], error
        assert contents(folder) == before

    return run


def test_the_good_input_is_accepted(folder, monkeypatch):
    monkeypatch.chdir(folder)
    assert len(expand(config.load(folder / "good.yaml"), {})) == 2
    assert len(expand(config.load(entry()), {})) == 1
    assert len(expand(config.load(trace("short", tokens=[3])), {})) == 1
    assert len(records.read(paths.measurements("cpu"))) == 1


@pytest.mark.parametrize(("given", "words"), cases(CONFIGS))
def test_config(refuse, tmp_path, given, words):
    path = tmp_path / "bad.yaml"
    path.write_text(yaml.dump(given, Dumper=yaml.CSafeDumper))  # some are a megabyte
    refuse(["status", "--config", str(path)], words)


@pytest.mark.parametrize(("given", "words"), cases(MEASURE))
def test_measure(refuse, given, words):
    refuse(["measure", *given], words)


@pytest.mark.parametrize(("given", "words"), cases(OTHERS))
def test_command(refuse, given, words):
    refuse(given, words)


@pytest.mark.parametrize(("given", "words"), cases(DAMAGE))
def test_damaged_measurements(refuse, folder, given, words):
    path = folder / paths.measurements("cpu.damaged")
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(given(read_table(folder / paths.measurements("cpu"))))
    for command in ("figure", "report"):
        refuse([command, "--platform", "cpu.damaged"], [str(paths.measurements("cpu.damaged")), *words])


@pytest.mark.parametrize(("given", "words"), cases(DAMAGE | STALE))
def test_damaged_cell(refuse, folder, given, words):
    first, second = (path for path in sorted((folder / "results/cpu/cells/pack").iterdir()))
    damaged = folder / "results/cpu.damaged/cells/pack"
    damaged.mkdir(parents=True, exist_ok=True)
    (damaged / first.name).write_bytes(first.read_bytes())
    (damaged / second.name).write_bytes(given(read_table(second)))
    refuse(
        ["collect", "--platform", "cpu.damaged", "--config", "good.yaml"], ["1 that do not fit", second.name, *words]
    )


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        pytest.param(["mesure", "pack"], "Did you mean 'measure'", id="unknown command"),
        pytest.param(["--"], "Missing command", id="no command"),
        pytest.param(["measure"], "Missing argument", id="no bench"),
        pytest.param(["measure", "pack", "--seed", "many"], "--seed: got 'many'", id="text for a number"),
        pytest.param(["measure", "pack", "--token", "64"], "No such option: --token", id="unknown option"),
    ],
)
def test_usage(folder, monkeypatch, capsys, arguments, words):
    """What the argument parser refuses, in one line."""
    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, "argv", ["moe-routing-bench", *arguments])
    with pytest.raises(SystemExit) as caught:
        cli.main()
    out, error = capsys.readouterr()
    assert (caught.value.code, out) == (2, "")
    assert error.startswith("error: ") and error.count("\n") == 1 and words in error


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        pytest.param(
            ["status", "--config-json", json.dumps(CONFIGS["top_k above experts"][0])], "top_k: got 9", id="top_k"
        ),
        pytest.param(["figure", "--platform", "none"], "run `snakemake`", id="no results"),
    ],
)
def test_command_in_a_process_of_its_own(folder, arguments, words):
    command = [sys.executable, "-m", "moe_routing_bench.cli", *arguments]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    assert done.returncode == 2 and done.stdout == "" and words in done.stderr
    assert done.stderr.startswith("error: ") and done.stderr.count("\n") == 1


@pytest.mark.parametrize(("taken", "said"), [(".snakemake", ".snakemake/locks/here"), ("results", "results/cpu")])
def test_snakemake_in_a_folder_that_cannot_be_written(tmp_path, taken, said):
    """Here because a file is in the way: root may write anywhere else."""
    (tmp_path / "config").symlink_to(ROOT / "config")
    (tmp_path / taken).touch()
    command = ["snakemake", "-n", "--cores", "1", "-s", ROOT / "Snakefile"]
    environment = forks.environment(ROOT / "src") | {"MOE_ROUTING_BENCH_DEVICE": "cpu"}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 1 and "Traceback" not in done.stdout + done.stderr
    assert (
        f"\nerror: output: got '{said}'; allowed: a file that can be written; hint: Not a directory\n"
        in done.stdout + done.stderr
    )


@pytest.mark.parametrize("name", ["unknown key", "a key twice", "top_k above experts", "trace with an expert twice"])
def test_snakemake(folder, tmp_path, name):
    """Which reads the file first, and takes the last of two equal keys."""
    given, *words = CONFIGS.get(name) or OTHERS[name]
    path = folder / given[-1] if name in OTHERS else tmp_path / "bad.yaml"
    if name in CONFIGS:
        path.write_text(yaml.safe_dump(given))
    before = contents(folder)
    command = ["snakemake", "-n", "--cores", "1", "-s", ROOT / "Snakefile", "--configfile", path]
    done = subprocess.run(command, cwd=folder, env=forks.environment(ROOT / "src"), capture_output=True, text=True)
    said = done.stdout + done.stderr  # of a dry run, Snakemake writes its log to stdout
    (line,) = [line for line in said.splitlines() if line.startswith("error: ")]
    assert done.returncode == 1 and all(word in line for word in words) and "Traceback" not in said
    assert {path: data for path, data in contents(folder).items() if ".snakemake" not in path.parts} == before
