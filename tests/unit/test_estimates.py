"""What `measure` says of a cell before it starts: the estimate, against stored measurements, and what it warns of."""

import dataclasses
import math
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pandas as pd
import pytest

from moe_routing_bench.benches.registry import BENCHES
from moe_routing_bench.cli import doctor, estimates
from moe_routing_bench.cli import main as cli
from moe_routing_bench.config import axes, by_hand
from moe_routing_bench.grid.cell import Cell, Job, Settings
from moe_routing_bench.measure import supervisor
from moe_routing_bench.store import platforms, records
from moe_routing_kernels.errors import UserError

ROOT = Path(__file__).parents[2]
STORED = sorted((ROOT / "results").glob("nvidia-h200*/measurements.parquet"))


def job_of(bench="layer", names=("torch_loop",), settings=None, **values) -> Job:
    (job,) = by_hand.jobs(bench, list(names), values, settings or {}, [], {})
    return job


def stored_cells():
    """The job of every cell of the published runs, with its implementations that are ok, and how long it took."""
    for path in STORED:
        table = records.read(path).to_pandas()
        for (bench, key), rows in table[table["status"] == "ok"].groupby(["bench", "cell"]):
            first = rows.iloc[0]
            values = {
                one.name: None if pd.isna(first[one.name]) else one.kind(first[one.name])
                for one in axes.of(BENCHES[bench].axes)
            }
            known = [one.name for one in BENCHES[bench].implementations]
            names = tuple(name for name in rows["implementation"] if name in known)
            yield Job(Cell(bench, key, tuple(values.items())), names, Settings()), rows["measure_seconds"].max()


@pytest.mark.slow
def test_the_estimate_is_near_what_stored_cells_took_on_a_gpu(monkeypatch) -> None:
    """For 19 in 20 within the factor that is said; the others compiled kernels first, which takes as long as it takes."""
    monkeypatch.setattr(platforms, "missing", lambda *_: None)
    start = estimates._GPU.start - 3  # what a row does not count: a process and its imports
    ratios = pd.Series(
        [(estimates.estimate(job, "nvidia-h200").seconds - start) / taken for job, taken in stored_cells()]
    )
    assert len(ratios) > 500
    assert ratios.between(1 / estimates.WITHIN, estimates.WITHIN).mean() > 0.95
    assert 0.5 < math.exp(ratios.map(math.log).mean()) < 2, "neither too long nor too short in the mean"


@pytest.mark.parametrize("axis", ["tokens", "experts", "hidden", "intermediate"])
def test_what_is_said_to_take_less_does(axis) -> None:
    large = {"tokens": 1024, "experts": 64, "hidden": 1024, "intermediate": 1024}
    whole, less = (estimates.estimate(job_of(**large | part), platforms.CPU) for part in ({}, {axis: large[axis] // 4}))
    assert less.seconds < whole.seconds and less.memory < whole.memory and less.step < whole.step


def test_fewer_implementations_take_less_and_those_that_cannot_run_take_nothing() -> None:
    one, two, more = (
        estimates.estimate(job_of(names=names), platforms.CPU)
        for names in (["torch_loop"], ["torch_loop", "torch_grouped_mm"], ["torch_loop", "cute", "triton"])
    )
    assert one.seconds == more.seconds < two.seconds and (one.implementations, two.implementations) == (1, 2)
    assert one.step == two.step, "the implementations take their steps one after the other"


@pytest.mark.parametrize(("tokens", "read"), [(1, 2), (16, 32), (1024, 64)])
def test_only_experts_that_a_token_chose_are_read(tokens: int, read: int) -> None:
    sizes = estimates.sizes(job_of(tokens=tokens, top_k=2, experts=64, hidden=64, intermediate=64).cell)
    assert (sizes.read, sizes.weights) == (read * sizes.expert, 64 * sizes.expert)


def test_ranks_divide_the_experts() -> None:
    cell = job_of(tokens=1024, top_k=2, experts=64, hidden=64, intermediate=64).cell
    whole, half = (estimates.sizes(replace(cell, values=(*cell.values, ("ep", ranks)))) for ranks in (1, 2))
    assert (half.weights, half.read, half.expert) == (whole.weights / 2, whole.read / 2, whole.expert)


def test_the_sizes_of_a_layer_are_those_of_its_axes() -> None:
    """Operations, and bytes in bf16 with weights of int4, of three products per expert; what is shared is read by every token."""
    values = {"tokens": 16, "hidden": 64, "intermediate": 96, "experts": 40, "top_k": 2, "shared_intermediate": 32}
    found = estimates.sizes(job_of(**values).cell)
    expert, shared = 3 * 64 * 96, 3 * 64 * 32
    assert found == estimates.Sizes(
        flops=2 * 16 * (2 * expert + shared),
        weights=2 * (40 * expert + shared),
        read=2 * (32 * expert + shared),
        expert=2 * expert,
        moved=2 * (2 * 64 * (16 + 32) + 16 * 40) + 16 * 32,
    )
    half = estimates.sizes(job_of(**values, weights="int4_g32").cell)
    assert half.expert == expert / 2 and half.weights == 40 * expert / 2 + 2 * shared
    two = estimates.sizes(job_of(**values | {"activation": "relu2"}).cell)
    assert (two.expert, two.flops) == (2 * expert * 2 / 3, found.flops * 2 / 3)


def test_a_training_step_takes_three_times_the_operations_and_moves_gradients() -> None:
    values = {"tokens": 16, "hidden": 64, "intermediate": 96, "experts": 40, "top_k": 2}
    layer, step = (estimates.sizes(job_of(bench, **values).cell) for bench in ("layer", "training"))
    assert step.flops == 3 * layer.flops and step.moved == layer.moved + layer.weights


def test_a_router_has_scores_of_all_experts_and_no_rows() -> None:
    found = estimates.sizes(job_of("router", ["torch"], tokens=16, hidden=64, experts=40, top_k=2).cell)
    assert (found.flops, found.weights, found.expert) == (2 * 16 * 64 * 40, 0, 0)
    assert found.moved == 2 * (2 * 64 * 16 + 16 * 40) + 16 * 32


NO_TIME = {"flops": math.inf, "wide_flops": math.inf, "bytes": math.inf, "checked": 0.0, "drawn": 0.0}


@pytest.fixture
def taken(monkeypatch):
    """The estimate of two implementations of a layer, one of them with a twin, at rates of which all but some take no time."""
    monkeypatch.setattr(platforms, "missing", lambda *_: None)
    values = {"tokens": 16, "hidden": 64, "intermediate": 96, "experts": 40, "top_k": 2}

    def found(platform="nvidia-h200", names=("cute", "torch_loop"), settings=None, **rates):
        known = NO_TIME | {"start": 0.0, "each": 0.0, "share": 0.25} | rates
        monkeypatch.setattr(estimates, "_GPU", estimates.Rates(**known))
        monkeypatch.setattr(estimates, "_cpu", lambda dtype, threads: estimates.Rates(**known))
        least = {"max_seconds": 1e-9, "max_blocks": 40} | (settings or {})
        return estimates.estimate(replace(job_of(names=names, **values, settings=least), twins=("cute",)), platform)

    return found


def test_each_rate_has_its_share_of_the_seconds(taken) -> None:
    """Three entries make 70 calls each until they are checked, and three in the samples; a reference is drawn five times."""
    size = taken().sizes
    calls = 3 * (70 + 3)
    for rates, seconds, step in (
        ({"start": 7.0}, 7.0, 0.0),
        ({"each": 5.0}, 2 * 5.0, 0.0),
        ({"flops": 3.0}, calls * size.flops / 3, 30 * size.flops / 3),
        ({"wide_flops": 3.0}, 5 * size.flops / 3, 5 * size.flops / 3),
        ({"checked": 3.0}, 2 * 3 * size.weights, 0.25 * 3 * size.weights),
        ({"drawn": 3.0}, 3 * 40 * 64 * 96 * 3, 3 * 40 * 64 * 96 * 3),
        (
            {"bytes": 3.0},
            (calls * (size.read + size.moved) + 5 * size.moved) / 3,
            30 * (size.read + size.moved) / 3,
        ),
    ):
        found = taken(**rates)
        blocks = {"flops": 1e12, "bytes": 1e12}  # many, so that three calls of each are fewer
        if set(rates) & set(blocks):
            found = taken(**rates, settings={"max_blocks": 1000})
        assert found.seconds == pytest.approx(seconds, rel=1e-6, abs=1e-6), rates
        assert found.step == pytest.approx(step, rel=1e-6), rates


def test_samples_take_the_seconds_that_are_asked_for_or_all_blocks(taken) -> None:
    """Of three entries 40 blocks, each of three samples of 4 ms."""
    assert taken(settings={"max_seconds": 1.25}).seconds == 1.25
    assert taken(settings={"max_seconds": 99.0}).seconds == pytest.approx(3 * 40 * 3 * 0.004)


def test_long_turns_and_compilers_take_their_seconds(taken, monkeypatch) -> None:
    """Long turns on a GPU, from calls of a certain size; compilers on a CPU, of the implementations that need one."""
    few = taken().seconds
    monkeypatch.setattr(estimates, "_LIMITED", taken().sizes.flops)
    assert taken(settings={"turn_seconds": 1.5}).seconds - few == pytest.approx(2 * (2 * 1.5 + 2.4))
    names = [one.name for one in BENCHES["layer"].implementations if "compiler" in one.requires]
    assert names and taken("cpu", [*names, "cute"]).seconds == pytest.approx(20 * len(names))


def test_memory_is_of_weights_and_sets_and_what_is_copied(taken) -> None:
    """Three sets at least; five draws of three more, the copies of one implementation, and the process of a CPU."""
    found, cpu = taken(), taken("cpu")
    size = found.sizes
    assert found.least == cpu.least == size.weights + 3 * size.moved
    assert found.memory == found.least + 15 * size.moved and cpu.memory == found.memory + 2**30
    copies = taken(names=("cute", "transformers_batched_mm"), bytes=3.0)
    assert copies.memory == found.memory + 16 * 2 * size.expert
    assert copies.step == pytest.approx(30 * (size.read + size.moved + 2 * 16 * 2 * size.expert) / 3)


def test_what_the_processor_lacks_is_slow(monkeypatch) -> None:
    """Operations a second of a thread, by what its cores have for the format."""
    for dtype, flags, rate in (
        ("fp32", "", 12e9),
        ("fp32", "avx512f", 25e9),
        ("bf16", "", 2e9),
        ("bf16", "avx512f", 10e9),
        ("bf16", "avx512f avx512_bf16", 50e9),
        ("bf16", "avx512f amx_bf16 avx512_bf16", 150e9),
        ("fp16", "avx512f", 1e9),
        ("fp16", "asimdhp", 50e9),
    ):
        monkeypatch.setattr(doctor, "cpu_flags", lambda flags=flags: set(flags.split()))
        found = estimates._cpu(dtype, 3)
        wide = 25e9 if "avx512f" in flags else 12e9
        assert (found.flops, found.wide_flops, found.bytes) == (3 * rate, 2 * 3 * wide, 2.5e9), (dtype, flags)


def test_a_limit_is_in_whole_minutes_and_none_that_is_refused() -> None:
    """Four times the step, which may be wrong by as much, and a day at most."""
    assert [estimates._longer(step) for step in (1.0, 15.0, 15.1, 1e9)] == [60, 60, 120, 24 * 3600]


def test_sizes_have_two_digits_below_ten() -> None:
    assert [estimates._gb(size) for size in (0.25e9, 2.34e9, 9.96e9, 10e9, 141.4e9)] == [
        "0.25 GB",
        "2.3 GB",
        "10 GB",
        "10 GB",
        "141 GB",
    ]


def test_a_twin_takes_blocks_of_its_own_and_long_calls_take_longer_than_is_asked() -> None:
    """Three calls of each, whatever the limit in seconds; where the blocks are few, these."""

    def seconds(blocks: int, twin: bool) -> float:
        settings = {"max_blocks": blocks, "min_blocks": 3, "max_seconds": 100.0}
        job = job_of(settings=settings, tokens=64, experts=8, top_k=2)
        return estimates.estimate(replace(job, twins=job.implementations * twin), platforms.CPU).seconds

    one, two = (seconds(6, twin) - seconds(3, twin) for twin in (False, True))
    assert one > 0 and two == pytest.approx(2 * one)
    large = {"tokens": 2**16, "experts": 64, "hidden": 4096, "intermediate": 4096, "top_k": 8}
    short, long = (
        estimates.estimate(job_of(settings={"max_seconds": limit}, **large), platforms.CPU).seconds
        for limit in (0.1, 1.0)
    )
    assert short == long
    job = job_of(**large)
    alone, twice = (
        estimates.estimate(replace(job, twins=job.implementations * n), platforms.CPU).seconds for n in (0, 1)
    )
    assert 1.7 * alone < twice < 2 * alone, "most of it is calls, but what is drawn is drawn once"


def test_weights_that_are_copied_for_every_assignment_count() -> None:
    """What a newcomer met: E=96 on a CPU, whose default includes such an implementation."""
    values = {"experts": 96, "tokens": 1024, "top_k": 2}
    plain, copied = (
        estimates.estimate(job_of(names=[name], **values), platforms.CPU)
        for name in ("torch_loop", "transformers_batched_mm")
    )
    assert copied.memory - plain.memory == 1024 * 2 * 3 * 1024 * 1024 * 2
    assert copied.step > Settings.timeout > plain.step


@pytest.mark.parametrize(
    ("dtype", "flags", "faster"),
    [
        ("bf16", "avx512f avx512_bf16", True),
        ("bf16", "avx512f amx_bf16", True),
        ("bf16", "avx2", False),
        ("fp16", "avx512_fp16", True),
        ("fp16", "avx512f avx512_bf16", False),
        ("fp32", "avx512f", True),
        ("fp32", "avx2", False),
    ],
)
def test_a_cpu_is_as_fast_as_its_instructions(monkeypatch, tmp_path, dtype, flags, faster) -> None:
    """A format that a CPU has no instruction for is computed slowly; more threads are faster."""
    source = tmp_path / "cpuinfo"
    source.write_text(f"processor\t: 0\nflags\t\t: fpu {flags}\nbugs\t: x\nflags\t\t: other\n")
    found = doctor.cpu_flags(source)
    assert found == {"fpu", *flags.split()} and not doctor.cpu_flags(tmp_path / "none")
    monkeypatch.setattr(doctor, "cpu_flags", lambda: found)
    rates = estimates._cpu(dtype, 1)
    assert (rates.flops >= 25e9) == faster and estimates._cpu(dtype, 4).flops == 4 * rates.flops


def test_the_memory_of_a_control_group_counts(monkeypatch) -> None:
    """Of the machine and the group the less; a group without a limit says so in a word."""
    numbers = {"memory.max": 5_000, "memory.current": 1_000}
    monkeypatch.setattr(doctor, "_number", lambda path: numbers.get(path.name))
    monkeypatch.setattr(doctor, "_numbers", lambda _: {"MemAvailable:": 9})
    assert doctor.available(platforms.CPU) == 4_000
    numbers["memory.max"] = None
    assert doctor.available(platforms.CPU) == 9 * 1024
    monkeypatch.setattr(doctor, "_numbers", lambda _: {})
    assert doctor.available(platforms.CPU) == math.inf
    monkeypatch.undo()
    assert 2**20 < doctor.available(platforms.CPU) <= 2**50


@pytest.mark.parametrize("free", ["plenty", "scarce", "too little"])
def test_memory_that_does_not_suffice_is_said_before_anything_is_measured(capsys, monkeypatch, free) -> None:
    """Refused where weights and inputs alone do not fit, as no run could help; a warning where all of it may not."""
    job = job_of(experts=64)
    found = estimates.estimate(job, platforms.CPU)
    amounts = {"plenty": found.memory, "scarce": (found.least + found.memory) / 2, "too little": 0.99 * found.least}
    monkeypatch.setattr(doctor, "available", lambda _: amounts[free])
    if free == "too little":
        with pytest.raises(
            UserError,
            match=r"memory for T1024.*allowed: at least .* GB.*smaller --tokens, --experts, --hidden, --intermediate$",
        ):
            estimates.announce([job], platforms.CPU)
    else:
        estimates.announce([job], platforms.CPU)
        assert ("warning" in capsys.readouterr().err) == (free == "scarce")


@pytest.mark.parametrize("timeout", [120, 86_400])
def test_a_step_that_outlasts_the_limit_is_said_with_one_that_is_long_enough(capsys, monkeypatch, timeout) -> None:
    monkeypatch.setattr(doctor, "available", lambda _: math.inf)
    job = job_of(experts=96, names=["transformers_batched_mm"], settings={"timeout": timeout})
    estimates.announce([job], platforms.CPU)
    said = capsys.readouterr().err
    if timeout == 120:
        _, advice = said.split("--timeout ")
        assert int(advice.partition(",")[0]) >= 4 * estimates.estimate(job, platforms.CPU).step > 120
    else:
        assert "--timeout" not in said


@pytest.mark.parametrize(("share", "warned"), [(0.4, False), (0.6, True), (1.1, True)])
def test_a_step_of_more_than_half_of_the_limit_is_warned_of(capsys, monkeypatch, share, warned) -> None:
    """The estimate may be wrong: a step of six tenths of the limit may outlast it. Of several cells the longest step counts."""
    monkeypatch.setattr(doctor, "available", lambda _: math.inf)
    jobs = [job_of(tokens=tokens) for tokens in (64, 1024)]
    limit = jobs[0].settings.timeout
    found = {job.cell.key: estimates.estimate(job, platforms.CPU) for job in jobs}
    steps = dict(zip(found, (share * limit, 0.1 * limit), strict=True))
    monkeypatch.setattr(
        estimates, "estimate", lambda job, _: dataclasses.replace(found[job.cell.key], step=steps[job.cell.key])
    )
    estimates.announce(jobs, platforms.CPU)
    said = capsys.readouterr().err
    assert ("may say nothing for" in said) == warned
    if warned:
        assert int(said.split("--timeout ")[1].partition(",")[0]) == 60 * math.ceil(4 * share * limit / 60)


def test_the_advice_is_a_limit_that_is_allowed(capsys, monkeypatch) -> None:
    monkeypatch.setattr(doctor, "available", lambda _: math.inf)
    estimates.announce([job_of(experts=60_000, hidden=8192)], platforms.CPU)
    advice = capsys.readouterr().err.split("--timeout ")[1].partition(",")[0]
    assert job_of(settings={"timeout": float(advice)}).settings.timeout == float(advice)


@pytest.mark.parametrize("bench", BENCHES)
def test_every_bench_has_an_estimate(capsys, monkeypatch, bench) -> None:
    """Whatever axes it reads."""
    monkeypatch.setattr(doctor, "available", lambda _: math.inf)
    values = {"shared_intermediate": 64} if bench == "shared_experts" else {}
    for job in by_hand.jobs(bench, None, {"tokens": 64} | values, {}, [], {}):
        for platform in ("cpu", "nvidia-h200"):
            estimates.announce([job], platform)
            found = estimates.estimate(job, platform)
            assert 0 < found.seconds < 10_000 and found.least < found.memory < 100e9
    assert capsys.readouterr().err.count("smaller --tokens") >= 2


def test_the_largest_of_several_cells_is_refused(monkeypatch) -> None:
    """Also where another may take more memory in all, for what an implementation copies."""
    jobs = by_hand.jobs("layer", ["transformers_batched_mm"], {"tokens": [4096], "experts": [8]}, {}, [], {})
    jobs += by_hand.jobs("layer", ["transformers_batched_mm"], {"tokens": [1], "experts": [512]}, {}, [], {})
    few, many = (estimates.estimate(job, platforms.CPU) for job in jobs)
    assert few.memory > many.memory and few.least < many.least
    monkeypatch.setattr(doctor, "available", lambda _: (few.least + many.least) / 2)
    with pytest.raises(UserError, match=r"memory for T1-.*E512"):
        estimates.announce(jobs, platforms.CPU)


def test_several_cells_are_one_estimate(capsys, monkeypatch) -> None:
    monkeypatch.setattr(doctor, "available", lambda _: math.inf)
    jobs = by_hand.jobs("layer", ["torch_loop"], {"tokens": [64, 1024]}, {}, [], {})
    estimates.announce(jobs, platforms.CPU)
    (line,) = capsys.readouterr().err.splitlines()
    total = sum(estimates.estimate(job, platforms.CPU).seconds for job in jobs)
    assert f": {total:.0f} s for 2 cells, " in line and "12.9 GFLOP a call" in line and "GFLOP/s" in line


@pytest.fixture
def call(monkeypatch, capsys, tmp_path):
    """Run a command; return its exit status, what it said, and the jobs that it handed to the supervisor."""
    (tmp_path / "config").symlink_to(ROOT / "config")
    monkeypatch.chdir(tmp_path)
    jobs = []

    def measure(job, *_):
        jobs.append(job)
        return [{"implementation": "torch", "status": "ok"}]

    monkeypatch.setattr(supervisor, "measure", measure)

    def run(*arguments):
        monkeypatch.setattr(sys, "argv", ["moe-routing-bench", *arguments])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        return ended.value.code or 0, capsys.readouterr(), jobs

    return run


def test_measure_estimates_before_it_starts(call) -> None:
    code, said, jobs = call("measure", "layer", "--model", "olmoe-1b-7b", "--tokens", "64", "--timeout", "7.5")
    (job,) = jobs
    lines = said.err.splitlines()
    assert code == 0 and job.settings.timeout == 7.5
    first = next(i for i, line in enumerate(lines) if line.startswith("estimate"))
    assert first < next(i for i, line in enumerate(lines) if line.startswith("cell 1 of 1"))
    assert "smaller --model, --tokens take less" in lines[first], "what a model sets is no option beside it"


def test_measure_refuses_what_cannot_fit(call, monkeypatch) -> None:
    monkeypatch.setattr(doctor, "available", lambda _: 1e9)
    code, said, jobs = call("measure", "layer", "--experts", "9999", "--implementations", "torch_loop")
    assert code == 2 and not jobs and said.err.splitlines()[-1].startswith("error: memory for T1024-H1024-I1024-E9999")


@pytest.mark.parametrize("value", ["0", "-1", "inf", "nan"])
def test_a_limit_that_is_none_is_refused(call, value) -> None:
    code, said, jobs = call("measure", "gate", "--timeout", value)
    assert code == 2 and not jobs and said.err.startswith("error: --timeout: got") and said.err.count("\n") == 1


def test_estimates_need_no_torch() -> None:
    script = "import sys; from moe_routing_bench.cli import estimates; assert 'torch' not in sys.modules"
    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == 0
