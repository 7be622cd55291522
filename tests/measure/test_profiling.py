"""Operator profiles of a layer's implementations: what is printed, what is kept, and what becomes of one that cannot run."""

import contextlib
import csv
import json
import os
import shlex
from types import SimpleNamespace

import pytest
from typer.testing import CliRunner

from moe_routing_bench.benches.bench import Bench
from moe_routing_bench.cli.main import app
from moe_routing_bench.config.expand import cell_of
from moe_routing_bench.grid.cell import Job, Settings
from moe_routing_bench.measure import profiling
from moe_routing_bench.store import platforms

LAYER = {"tokens": 8, "hidden": 32, "intermediate": 16, "experts": 4, "top_k": 2, "dtype": "fp32"}
NAMES = ("torch_loop", "torch_gather_loop")


@pytest.fixture
def job() -> Job:
    return Job(cell_of("layer", **LAYER), NAMES, Settings())


def test_a_profile_has_every_product_of_one_call_and_a_trace_that_chrome_reads(job, tmp_path):
    folder = tmp_path / "new" / "folder"
    found = profiling.profile(job, NAMES, folder)
    assert (folder / "profile.json").read_text() == json.dumps(found, indent=1) + "\n"
    assert (found["bench"], found["cell"], found["axes"]) == ("layer", job.cell.key, dict(job.cell.values))
    assert (found["platform"], found["torch"]) == (platforms.current(), profiling.torch.__version__)
    for name, parts in found["implementations"].items():
        calls = {one["operator"]: one["calls"] for one in parts["operators"]}
        assert calls["aten::mm"] == 2 * 4, (
            "two products for each of four experts: one call, without those of the warm-up"
        )
        assert parts["self_cpu_us"] == pytest.approx(sum(one["self_cpu_us"] for one in parts["operators"]))
        events = json.loads((folder / f"{name}.json").read_text())["traceEvents"]
        assert sum(one.get("name") == "aten::mm" for one in events) == 8
    (difference,) = found["differences"]
    assert (difference["first"], difference["second"]) == NAMES and difference["max_diff"] < 1e-5


def test_one_that_raises_says_so_and_the_others_are_profiled(job, tmp_path, monkeypatch):
    bind = Bench.bind

    def broken(self, implementation, cell, tensors):
        if implementation == "torch_loop":
            raise RuntimeError("no such\nkernel" + 1000 * "!")
        return bind(self, implementation, cell, tensors)

    monkeypatch.setattr(type(profiling.bench_of(job)), "bind", broken)
    found = profiling.profile(job, NAMES, tmp_path)["implementations"]
    said = found["torch_loop"].pop("error")
    assert said.startswith("RuntimeError: no such kernel!") and len(said) == 300 and not found["torch_loop"]
    assert found["torch_gather_loop"]["operators"] and not (tmp_path / "torch_loop.json").exists()


def test_a_result_that_a_call_returns_is_the_one_that_is_compared(job, tmp_path, monkeypatch):
    """Whatever is in the outputs that were bound."""
    values = dict(zip(NAMES, (1.0, 3.5), strict=True))

    def bind(self, name, *_):
        return lambda: {"combined": profiling.torch.full((8, 32), values[name])}

    monkeypatch.setattr(type(profiling.bench_of(job)), "bind", bind)
    assert [one["max_diff"] for one in profiling.profile(job, NAMES, tmp_path)["differences"]] == [2.5]


def test_operators_and_kernels_are_told_apart():
    """Times on the device are counted once, as those of kernels."""
    times = ("self_cpu_time_total", "cpu_time_total", "self_device_time_total", "device_time_total", "count")
    columns = ("self_cpu_us", "cpu_total_us", "self_device_us", "device_total_us", "calls")
    found, want = [], []
    for first, (device, kind) in {1: ("CPU", "operator"), 10: ("CUDA", "kernel")}.items():
        event = SimpleNamespace(key="a", device_type=SimpleNamespace(name=device))
        for number, time in enumerate(times, first):
            setattr(event, time, number)
        found.append(profiling._operator(event))
        want.append({"operator": "a", "kind": kind} | {column: n for n, column in enumerate(columns, first)})
    assert found == want and profiling._totals(found) == {"self_cpu_us": 1 + 10, "self_device_us": 12}


def test_operators_are_in_the_order_of_their_own_time_on_the_device_then_on_the_host():
    times = {
        "idle": (0.0, 90.0),
        "short": (1.0, 500.0),
        "long": (7.0, 2.0),
        "busy": (0.0, 100.0),
        "as long": (7.0, 3.0),
    }
    found = [
        {"operator": name, "self_device_us": device, "self_cpu_us": host} for name, (device, host) in times.items()
    ]
    ordered = [one["operator"] for one in sorted(found, key=profiling._weight, reverse=True)]
    assert ordered == ["as long", "long", "short", "busy", "idle"]


def test_results_are_compared_in_pairs():
    torch = profiling.torch
    results = {"a": torch.tensor([1.0, 2.0]), "b": torch.tensor([1.0, 2.5]), "c": None, "d": torch.tensor([0.0, 2.0])}
    found = {(one["first"], one["second"]): one["max_diff"] for one in profiling._differences(results)}
    assert found == {("a", "b"): 0.5, ("a", "d"): 1.0, ("b", "d"): 1.0}


@pytest.mark.parametrize(("platform", "device"), [("cpu", "cpu"), ("nvidia-h200", "cuda")])
def test_inputs_are_where_the_platform_measures(job, platform, device, tmp_path, monkeypatch):
    asked, reserved = [], []
    monkeypatch.setattr(platforms, "current", lambda: platform)
    monkeypatch.setattr(profiling.gpus, "reserved", lambda **how: reserved.append(how) or contextlib.nullcontext())
    monkeypatch.setattr(profiling, "_inputs", lambda job, device: asked.append(device) or {})
    profiling.profile(job, (), tmp_path)
    profiling.call(job, ())
    assert asked == [device] * 2 and reserved == [{"alone": True, "family": job.cell.family}] * 2


@pytest.mark.parametrize("on_gpu", [False, True])
def test_kernels_are_looked_at_where_there_is_a_gpu(job, on_gpu, tmp_path, monkeypatch):
    asked = []

    def profile(activities):
        asked.extend(one.name for one in activities)
        raise RuntimeError("seen")

    monkeypatch.setattr(profiling.torch.cuda, "is_initialized", lambda: on_gpu)
    monkeypatch.setattr(profiling, "_wait", lambda on_gpu: None)
    monkeypatch.setattr(profiling.torch.profiler, "profile", profile)
    found = profiling.profile(job, NAMES[:1], tmp_path)["implementations"]
    assert found == {"torch_loop": {"error": "RuntimeError: seen"}} and asked == ["CPU"] + ["CUDA"] * on_gpu


def options(**values) -> list[str]:
    return [word for name, value in values.items() for word in (f"--{name.replace('_', '-')}", str(value))]


def test_measuring_a_cell_can_profile_it_and_a_stored_cell_can_be_profiled_later(tmp_path):
    asked = ["measure", "layer", *options(**LAYER, implementations="torch_loop,cute", max_seconds=0.05, min_blocks=1)]
    stored = tmp_path / "cell.parquet"
    done = CliRunner().invoke(app, [*asked, "--json", *options(profile=tmp_path / "first", out=stored)])
    assert done.exit_code == 0, done.output
    rows = {row["implementation"]: row["status"] for row in json.loads(done.stdout)}
    assert rows == {"torch_loop": "ok", "cute": "unsupported"}, "only JSON is on stdout"
    done = CliRunner().invoke(app, ["profile", str(stored), "--out", str(tmp_path / "second")])
    assert done.exit_code == 0 and "torch_loop: one call, self CPU" in done.stdout and "aten::mm" in done.stdout
    for folder in ("first", "second"):
        with (tmp_path / folder / "operators.csv").open() as file:
            lines = list(csv.DictReader(file))
        assert {line["implementation"] for line in lines} == {"torch_loop"}, "what has no time has no profile"
        assert {line["calls"] for line in lines if line["operator"] == "aten::mm"} == {"8"}


def test_another_profiler_is_told_to_look_at_one_call_of_each(tmp_path, monkeypatch):
    """The command line of ncu, where that is there; what follows its options is run here."""
    stored, record = tmp_path / "cell.parquet", tmp_path / "ranges"
    sizes = options(tokens=8, hidden=32, experts=4, top_k=2, max_seconds=0.05, min_blocks=1)
    assert (
        CliRunner()
        .invoke(app, ["measure", "pack", "--implementations", "torch,cute", *sizes, *options(out=stored)])
        .exit_code
        == 0
    )
    asked = ["profile", str(stored), "--force", *options(out=tmp_path / "found")]
    printed = CliRunner().invoke(app, asked).stdout
    assert "--nvtx" not in printed
    assert "torch: one call" in printed and "difference" not in printed, "there is no pair to compare"
    (tmp_path / "ncu").write_text("#!/bin/sh\n")
    (tmp_path / "ncu").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    done = CliRunner().invoke(app, asked)
    (line,) = [line for line in done.stdout.splitlines() if "--nvtx" in line]
    own, command = line.split(" moe-routing-bench ")
    assert own.startswith(
        f"{tmp_path}/ncu --set full --nvtx --nvtx-include torch/ --clock-control none "
    ) and own.endswith(f"--export {tmp_path}/found/torch")
    monkeypatch.setattr(profiling.nvtx, "annotate", lambda name: record.write_text(name) and contextlib.nullcontext())
    assert CliRunner().invoke(app, shlex.split(command)).exit_code == 0 and record.read_text() == "torch"


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        (["profile", "x.parquet"], "--out: got 'nothing'; allowed: a folder, or --calls-only"),
        (["measure", "layer", "--tokens", "8,16", "--profile", "x"], "--profile: got '2 cells'; allowed: one cell"),
    ],
)
def test_what_cannot_be_profiled_is_refused_before_it_is_measured(asked, said):
    done = CliRunner().invoke(app, asked)
    assert done.exit_code and said in str(done.exception)
