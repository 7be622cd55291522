"""The steps of commands between what they read and what they print, each on values that all differ: what is chosen, counted, handed on."""

import signal
import sys
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import pandas as pd
import pyarrow as pa
import pytest

from moe_routing_bench.benches.registry import BENCHES
from moe_routing_bench.cli import (
    accuracy,
    choices,
    claims,
    collect,
    compile,
    delivery,
    doctor,
    measure,
    options,
    published,
    report,
    rounds,
    status,
    train,
    watch,
)
from moe_routing_bench.cli import list as listed
from moe_routing_bench.comparison import runs as compared
from moe_routing_bench.config.axes import AXES
from moe_routing_bench.grid.cell import ISOLATE, Cell, Job, Settings
from moe_routing_bench.packages import PACKAGE
from moe_routing_bench.quality import corpus_packages, corpus_preparation, study_costs, texts
from moe_routing_bench.store import platforms
from moe_routing_kernels.errors import NoForm, UserError


def timed(name, us, status_="ok", **values):
    known = {"best_other": None, "best_speedup": None, "platform": "nvidia-h200", "block_medians_us": [us] * 8}
    known |= dict.fromkeys(("best_speedup_ci_low", "best_speedup_ci_high", "best_speedup_p"))
    return {"implementation": name, "median_us": us, "status": status_, **known, **values}


COMPILED = next(one.name for one in BENCHES["gate"].implementations if "compiler" in one.requires)


@pytest.mark.parametrize(
    ("times", "later"),
    [
        ({"torch": 9.0, "triton": 5.0, "quack": 7.0}, ["triton"]),
        ({"torch": 9.0, "triton": None, "quack": 7.0}, ["quack"]),
        ({"torch": 9.0, COMPILED: 5.0, "quack": 7.0}, ["torch"]),
        ({"torch": None, COMPILED: 5.0, "quack": 7.0}, [COMPILED]),
        ({"torch": None, "triton": None}, []),
    ],
)
def test_later_rounds_have_the_fastest_rival_that_is_right(times, later):
    """In place of one that has to be compiled the baseline, if that is right; what is edited is no rival."""
    rivals = rounds.Rivals(BENCHES["gate"], ["cute"], ["cute", *times])
    assert rivals.rivals == list(times)
    rows = {name: timed(name, us or 1.0, "ok" if us else "crashed") for name, us in times.items()}
    rivals.choose(rows | {"cute": timed("cute", 0.1)})
    assert rivals.rivals == later


def test_the_baseline_takes_part_where_a_rival_is_compiled():
    assert rounds.Rivals(BENCHES["gate"], ["cute"], ["cute", COMPILED]).rivals == [COMPILED, "torch"]
    assert rounds.Rivals(BENCHES["gate"], ["torch"], ["torch", COMPILED]).rivals == [COMPILED]
    assert rounds.Rivals(BENCHES["gate"], ["cute"], ["cute", "triton"]).rivals == ["triton"]


def test_what_a_round_says_against_the_best_other_and_the_last_version():
    rivals = rounds.Rivals(BENCHES["gate"], ["cute"], ["cute", "triton"])
    row = timed("cute", 5.0, best_other="triton", best_speedup=1.5, best_speedup_ci_low=1.4, best_speedup_ci_high=1.6)
    row |= {"best_speedup_p": 1e-9}
    assert list(rivals.said(row, {}, None)) == ["1.50x triton (faster)"]
    slow = row | {"best_speedup": 0.5, "best_speedup_ci_low": 0.4, "best_speedup_ci_high": 0.6}
    assert list(rivals.said(slow, {}, None)) == ["0.50x triton (slower)"]
    assert list(rivals.said(timed("cute", 5.0), {}, None)) == []


def test_a_compiled_rival_is_compared_by_way_of_the_baseline():
    """It took half of the baseline's time in the first round; now ours takes an eighth of that of a slower baseline."""
    rivals = rounds.Rivals(BENCHES["gate"], ["cute"], ["cute", COMPILED])
    rivals.choose({COMPILED: timed(COMPILED, 4.0), "torch": timed("torch", 8.0)})
    (said,) = rivals.said(timed("cute", 2.0), {"torch": timed("torch", 16.0)}, None)
    assert said.startswith(f"4.00x {COMPILED} (") and said.endswith("that of round 1, by way of torch)")


def test_a_version_is_not_judged_on_a_cpu(monkeypatch):
    found = SimpleNamespace(rows=pd.DataFrame([{"ratio": 1.25, "verdict": "faster"}]))
    given = []
    monkeypatch.setattr(
        compared, "compare", lambda *tables: given.append([one["median_us"][0] for one in tables]) or found
    )
    last, row = timed("cute", 5.0), timed("cute", 4.0)
    assert rounds._versions(last, row) == (1.25, "faster") and given == [[5.0, 4.0]]
    assert rounds._versions(last, row | {"platform": platforms.CPU})[1].startswith("not judged on a CPU")


def test_missing_ends_of_a_ratio_are_not_known():
    assert rounds._judged(1.5, None, None, None)[1] == "undecided"


def test_watched_files_outside_are_named_and_others_counted(tmp_path):
    own = [tmp_path / name for name in ("kernel.py", "__init__.py", "tile.py")]
    ours = [PACKAGE / "quantities.py", PACKAGE / "streams.py"]
    assert watch._names([*own, *ours]) == f"kernel.py, tile.py and 2 files of {PACKAGE.name}"
    assert watch._names(own) == "kernel.py, tile.py" and watch._names(ours[:1]) == "quantities.py"


def test_what_is_left_is_expected_to_take_as_long(monkeypatch):
    """After one of four cells in 10 s, 30 s; after two in 16 s, 16 s."""
    clock, expected = iter([0.0, 10.0, 16.0, 27.0]), []
    supervisor = SimpleNamespace(measure=lambda job, *_: [job.cell.key])
    modules = {"supervisor": supervisor, "server": SimpleNamespace(Memory=object)}
    monkeypatch.setattr(measure.importlib, "import_module", lambda name: modules[name.rpartition(".")[2]])
    monkeypatch.setattr(measure.time, "monotonic", lambda: next(clock))
    monkeypatch.setattr(measure.printing, "waited", lambda seconds: expected.append(seconds) or measure.undisturbed())
    jobs = [Job(Cell("gate", f"T{i}", (("tokens", i),)), ("torch",), Settings()) for i in range(4)]
    assert [rows for _, rows in measure._measured(jobs, "cold")] == [["T0"], ["T1"], ["T2"], ["T3"]]
    assert expected == [None, 30.0, 16.0, 9.0]


def test_an_option_of_an_axis():
    """Lists take several values; its help has unit, choices and what it is by default."""
    several, text, one = (options._option(AXES[name]) for name in ("tokens", "router", "trace"))
    assert [p.annotation.__metadata__[0].metavar for p in (several, text, one)] == [
        "INTEGER[,...]",
        "TEXT[,...]",
        "TEXT",
    ]
    assert several.annotation.__origin__ == list[str] | None and one.annotation.__origin__ == str | None
    assert options._help(AXES["phase"]).endswith(": prefill | decode [default: prefill]")
    assert options._help(AXES["packed"]).endswith("[default: as dtype]")
    assert options._help(AXES["capacity_factor"]).endswith("[default: none]")
    assert options._help(AXES["tokens"]).endswith(f"[default: {AXES['tokens'].typical}]")
    assert "default" not in options._help(AXES["model"])
    assert (
        options._read(AXES["tokens"], ["64, 128", "9"]) == [64, 128, 9] and options._read(AXES["trace"], "a,b") == "a,b"
    )


def test_rows_of_a_cpu_are_no_basis_of_choices(tmp_path, monkeypatch):
    """Nor those of a named run on one; the others are in order."""
    for name in ("nvidia-b", "cpu", "cpu.layers", "nvidia-a.cpu"):
        (tmp_path / "results" / name).mkdir(parents=True)
        (tmp_path / "results" / name / "measurements.parquet").touch()
    monkeypatch.chdir(tmp_path)
    assert choices.stored() == ["nvidia-a.cpu", "nvidia-b"]


def test_the_list_says_which_is_the_baseline(monkeypatch):
    monkeypatch.setattr(listed, "missing_here", lambda requires, *_: "no GPU" if "cutlass" in requires else None)
    table = listed._implementations("cpu", {"gate": BENCHES["gate"]})
    rows = [list(row) for row in zip(*(column.cells for column in table.columns), strict=True)]
    assert rows[0] == ["gate", "", BENCHES["gate"].summary] and len(rows) == 1 + len(BENCHES["gate"].implementations)
    assert ["", "torch (baseline)", "available"] in rows and ["", "cute", "no GPU"] in rows


def test_a_signal_that_is_ignored_stays_so():
    """Whatever the process of the tests was started with."""
    before = {number: signal.signal(number, signal.SIG_DFL) for number in delivery._ENDING}
    try:
        assert delivery._heeded() == [signal.SIGINT, signal.SIGTERM, signal.SIGHUP]
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        assert delivery._heeded() == [signal.SIGINT, signal.SIGTERM]
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def test_rows_wait_for_their_delivery(capsys):
    """Each once, with how many cells there are; rows that nothing takes are kept."""
    written = []
    found = delivery.Delivery(written.append, 5)
    cells = [Cell("gate", f"T{i}", ()) for i in range(3)]
    for i, cell in enumerate(cells[:2]):
        found.add(cell, [{"row": i}])
    found.deliver()
    found.add(cells[2], [{"row": 2}])
    found.deliver()
    found.deliver()
    assert [[rows for _, rows in parts] for parts in written] == [[[{"row": 0}], [{"row": 1}]], [[{"row": 2}]]]
    assert (found.finished, found.said) == (3, "3 of 5 cells")
    found.keep("stdout: full", [{"row": 7}, {"row": 8}])
    why, place, number = capsys.readouterr().err.strip().partition("; kept in ")[::1]
    path, _, number = number.partition(": ")
    assert why == "stdout: full" and number == "2 rows" and '"row": 8' in Path(path).read_text() and place
    Path(path).unlink()


def test_a_document_without_rows_is_written_once():
    """What reads JSON from a command that measured nothing gets an empty list."""
    written = []
    found = delivery.Delivery(written.append, 1)
    found.deliver()
    found.deliver()
    assert written == [[]]


def test_the_doctor_says_what_is_there_and_what_is_not(monkeypatch):
    """A check that fails is no check of something optional."""
    missing = {"triton": None, "cutlass": "not installed", "compiler": None}
    monkeypatch.setattr(doctor, "missing_here", lambda needs, *_: missing.get(needs[0]) if needs else "no such package")
    monkeypatch.setattr(doctor.platforms, "gpu_name", lambda: None)
    monkeypatch.setattr(doctor.os, "access", lambda path, mode: False)
    monkeypatch.setattr(doctor, "_check_config", lambda: ("config", None, "none"))
    monkeypatch.setattr(doctor, "_check_torch", lambda gpu: ("torch", True, "2.9"))
    found = {what: (fine, said) for what, fine, said in doctor._checks()}
    assert found["python"] == (True, f"{sys.version_info.major}.{sys.version_info.minor}")
    assert found["gpu"] == (None, "none: measuring on the CPU") and found["triton"] == (True, "available")
    assert found["cutlass"] == (None, "not installed") and found["writable"][0] is False
    assert all(found[name] == (None, "no such package") for name in ("vllm", "sglang"))
    known = sum(len(bench.implementations) for bench in BENCHES.values())
    monkeypatch.setattr(doctor.platforms, "missing", lambda requires, *_: "cutlass" in requires)
    able = known - sum("cutlass" in one.requires for bench in BENCHES.values() for one in bench.implementations)
    assert doctor._able("nvidia-h200").startswith(
        f"{able} of {known} implementations can be measured here; the others need a package;"
    )
    assert "need an NVIDIA GPU, and some a package" in doctor._able(platforms.CPU)


def test_a_kernel_without_a_form_is_named(monkeypatch, capsys):
    def precompile(name, cell, target):
        if name != "triton":
            raise NoForm("none")

    bench = SimpleNamespace(name="gate", precompile=precompile)
    objects = iter([[1, 2], [1, 2, 3, 4, 5], [1, 2, 3, 4, 5]])
    modules = {
        "cache": SimpleNamespace(objects=lambda: next(objects), folder=lambda: "folder"),
        "target": SimpleNamespace(Target=SimpleNamespace(named=lambda arch: SimpleNamespace(arch=arch))),
        "enums": SimpleNamespace(Arch=SimpleNamespace(__members__={"sm_90a": 1})),
    }
    monkeypatch.setattr(compile.importlib, "import_module", lambda name: modules[name.rpartition(".")[2]])
    monkeypatch.setattr(compile, "effective", lambda *_: {})
    monkeypatch.setattr(compile, "on", lambda settings, platform: settings)
    jobs = [SimpleNamespace(implementations=("cute", "triton", "auto"), cell=None)]
    monkeypatch.setattr(compile, "jobs_of", lambda settings: jobs)
    monkeypatch.setattr(compile, "bench_of", lambda job: bench)
    monkeypatch.setattr(compile.platforms, "missing", lambda *_: None)
    monkeypatch.setattr(compile, "track", lambda pairs, *_, **__: pairs)
    compile.compile_("sm_90a")
    assert capsys.readouterr().out.splitlines() == [
        "5 kernels in folder, 3 of them new",
        "no form for sm_90a: gate: auto, cute",
    ]


@dataclass(frozen=True)
class Rated:
    """What `with_lr` reads of a run."""

    lr: float | None = None


def test_a_run_without_a_learning_rate_has_that_of_its_best_pilot(monkeypatch, capsys):
    run = Rated()
    chosen = {"pilot_lrs": [0.1, 0.2], "pilot_losses": [3.0, 2.0], "no_column": 1}
    given = []
    monkeypatch.setattr(train.rates, "best", lambda pilots, schema: given.append(pilots) or (0.2, chosen))
    found, fields = train.with_lr(run, [Path("a")])
    assert (found.lr, given) == (0.2, [[Path("a")]]) and fields == {"pilot_lrs": [0.1, 0.2], "pilot_losses": [3.0, 2.0]}
    assert "learning rate 0.2 of [0.1, 0.2]: validation losses [3.0, 2.0]" in capsys.readouterr().out
    assert train.with_lr(found, None) == (found, {}) and train.with_lr(run, None)[0].lr == 0.2 and given[1] == []


def test_texts_are_prepared_below_their_folder(monkeypatch, tmp_path, capsys):
    given = []
    monkeypatch.setattr(texts, "folder", lambda: tmp_path)
    monkeypatch.setattr(corpus_packages, "listed", lambda listed: ["listed", listed])
    monkeypatch.setattr(corpus_preparation, "prepare", lambda *values: given.append(values) or ["a line"])
    monkeypatch.setattr(train, "read_mapping", lambda path: str(path))
    train.prepare_texts(Path("list.yaml"), 512, 0.25, 3)
    assert given == [(["listed", "list.yaml"], tmp_path / "archives", tmp_path / "packages", 0.25, 3, 512)]
    assert capsys.readouterr().out.splitlines() == ["a line", f"wrote {tmp_path / 'packages'}"]
    for share in (0.0, 1.0):
        with pytest.raises(UserError, match="--share"):
            train.prepare_texts(Path("list.yaml"), 512, share, 3)


def test_sizes_of_accuracy_are_those_that_are_asked_for(monkeypatch, capsys):
    """Each size is its own option, and every kind of weights is drawn in every cell."""
    seen, statuses = [], iter(("incorrect", "crashed", "ok", None))
    matrix = SimpleNamespace(
        DRAWS=("normal", "outliers"),
        place=lambda device: {"device": device},
        rows=lambda cell, kind, names, device: seen.append((cell, kind, names)) or [{"status": next(statuses)}],
    )
    monkeypatch.setattr(accuracy.importlib, "import_module", lambda name: matrix)
    with pytest.raises(accuracy.typer.Exit) as ended:
        accuracy.accuracy(
            weights="int4_g32,plain", activations="fp16", drawn="outliers,normal", implementations="torch_loop",
            tokens=3, hidden=128, intermediate=64, experts=5, top_k=2, seed=9,
        )  # fmt: skip
    assert ended.value.exit_code == 1 and "2 of 4 rows are of implementations that failed" in capsys.readouterr().err
    first = seen[0][0]
    assert (first.tokens, first.hidden, first.intermediate, first.experts, first.top_k, first.seed) == (
        3,
        128,
        64,
        5,
        2,
        9,
    )
    assert [(cell.weights, kind, names) for cell, kind, names in seen] == [
        (form, kind, ["torch_loop"]) for form in ("int4_g32", "fp16") for kind in ("outliers", "normal")
    ]


def test_the_report_of_a_cpu_has_the_published_runs_of_the_gpu_with_most(monkeypatch, tmp_path):
    written = []
    pages = SimpleNamespace(write_alone=lambda name, *_: written.append(name))
    monkeypatch.setattr(report.importlib, "import_module", lambda name: pages)
    known = {"nvidia-a": ["1"], "nvidia-b": ["1", "2"], "cpu": ["1", "2", "3"]}
    monkeypatch.setattr(report.stored, "runs", lambda: known)
    monkeypatch.setattr(report, "models", dict)
    report._write_published("cpu.layers")
    report._write_published("nvidia-a")
    assert written == ["nvidia-b"]


def test_claims_on_a_cpu_are_not_held_in_reports():
    assert report.held_claims("cpu.layers", None) == ()


def test_presets_of_the_last_run_are_those_that_others_lack(monkeypatch):
    monkeypatch.setattr(report, "_own_file", lambda platform: "own.yaml" if platform == "cpu" else None)
    monkeypatch.setattr(report, "models", lambda file=None: {"a": 1, "b": 2} if file else {"a": 1})
    assert report._own_presets("cpu") == {"b": "own.yaml"} and report._own_presets("gpu") == {}


def test_contradictions_are_counted_and_three_are_shown(monkeypatch):
    monkeypatch.setattr(published.contradictions, "is_free", lambda table: False)
    monkeypatch.setattr(published.contradictions, "contradiction", lambda row: row["says"])
    rows = [{"implementation": f"i{i}", "bench": "gate", "cell": f"T{i}", "says": f"s{i}" * (i != 1)} for i in range(6)]
    found = published._contradictions(pa.Table.from_pylist(rows))
    assert found == [*(f"i{i} of gate T{i}: s{i}" for i in (0, 2, 3)), "numbers of 5 rows contradict each other"]
    assert published._contradictions(pa.Table.from_pylist([rows[1]])) == []


def test_a_claim_over_cells_is_no_cell(monkeypatch):
    """A claim measures what it compares and the baseline, each once."""
    check = SimpleNamespace(bench="gate", axes={"tokens": 8, "experts": 16, "top_k": 2, "seed": 3}, over="")
    check.implementation, check.against = "cute", "torch"
    claim = SimpleNamespace(id="a1", check=check)
    monkeypatch.setattr(claims, "models", dict)
    job = claims.job_of(claim)
    assert job.implementations[:2] == ("cute", "torch") or set(job.implementations) == {"cute", "torch"}
    assert (job.cell.tokens, job.cell.experts, job.cell.top_k) == (8, 16, 2)
    with pytest.raises(UserError, match="claim a1: got 'the median of several cells'"):
        claims.job_of(SimpleNamespace(id="a1", check=SimpleNamespace(**vars(check) | {"over": "median"})))


def test_a_plan_adds_up_the_seconds_of_runs(monkeypatch, capsys):
    """By entry, pilots apart; seconds of one are those of all over their number, and the sources of rates are named."""
    runs_ = {
        str(i): SimpleNamespace(label="e8", purpose="final", router=router, seed=i, lr=0.25, lr_source="study 1")
        for i, router in enumerate(("softk", "topk", "softk"))
    }
    monkeypatch.setattr(status, "config_or_last", lambda *_: ({}, "nvidia-h200", None))
    monkeypatch.setattr(status.training, "expand", lambda *_: SimpleNamespace(runs=runs_))
    part = SimpleNamespace
    entries = {
        ("e8", "final"): [
            part(runs=2, seconds=100.0, tokens=12345, basis="stored"),
            part(runs=1, seconds=40.0, tokens=999, basis=study_costs.ESTIMATED),
        ],
        ("e8", "pilot"): [part(runs=4, seconds=5.0, tokens=678, basis="stored")],
    }
    monkeypatch.setattr(study_costs, "by_entry", lambda *_: entries)
    monkeypatch.setattr(study_costs, "stored_noise", lambda finals, sizes, code: (0.0123, "assumed"))
    monkeypatch.setattr(study_costs, "power_of_equivalence", lambda noise, rules: f"{rules} rules at {noise}")
    monkeypatch.setattr(status, "fingerprint", lambda files: "code")
    monkeypatch.setattr(study_costs, "SHAPE", ())
    for one in runs_.values():
        one.batch = one.steps = 1
    status.plan()
    lines = capsys.readouterr().out.splitlines()
    assert lines[1].split() == ["e8", "3", "12,345", "80.0", "240", *f"{study_costs.ESTIMATED}, stored".split()]
    assert lines[2].split() == ["e8", "(pilots)", "4", "678", "5.0", "20", "stored"]
    assert lines[3:6] == [
        "3 runs, 4 min of one GPU",
        "e8: learning rates of study 1: softk 0.25, topk 0.25",
        "e8, 3 seeds: 2 rules at 0.0123, at a noise of 0.012 bits (assumed)",
    ]
    assert lines[6].startswith("estimated: ")


@pytest.mark.parametrize(
    ("gpu", "cuda", "fine", "said"),
    [
        (None, None, True, "2.9, CPU build"),
        (None, "13.0", True, "2.9, CUDA 13.0"),
        ("H200", "13.0", True, "2.9, CUDA 13.0"),
        ("H200", None, False, "2.9 is a CPU build, but there is a H200"),
    ],
)
def test_a_torch_for_cpus_does_not_measure_a_gpu(monkeypatch, gpu, cuda, fine, said):
    torch = SimpleNamespace(__version__="2.9", version=SimpleNamespace(cuda=cuda))
    monkeypatch.setattr(doctor.importlib, "import_module", lambda name: torch)
    assert doctor._check_torch(gpu) == ("torch", fine, said)


@pytest.mark.parametrize(
    ("named", "settings", "folder"),
    [
        ("nvidia-a", {"platform": "nvidia-b", "run": "r"}, ("nvidia-a", None)),
        (None, {"platform": "nvidia-b", "run": "r"}, ("nvidia-b", "r")),
        (None, {"run": "r"}, (None, "r")),
    ],
)
def test_training_runs_are_of_the_platform_that_is_named_first(monkeypatch, named, settings, folder):
    """That of the command line, without the run of the config; else that of the config."""
    given = []
    monkeypatch.setattr(collect, "effective", lambda *_: settings | {"quality": ["q"], "perft": ["p"]})
    monkeypatch.setattr(collect, "platform_of", lambda *values: given.append(values) or "folder")
    monkeypatch.setattr(collect.plan, "expand", lambda *values: values)
    assert collect._planned(None, None, named) == ((["q"], ["p"], "folder"), "folder") and given == [folder]


def test_without_a_word_plugins_alone_are_isolated(monkeypatch):
    given = []
    monkeypatch.setattr(options.by_hand, "jobs", lambda *values: given.append(values) or [])
    options.asked_jobs("gate", [" cute", "torch "], {}, [], None, {"model": None, "tokens": ["8,9"]})
    assert (
        given == [("gate", ["cute", "torch"], {"tokens": [8, 9]}, {}, [], {}, ISOLATE[0])] and ISOLATE[0] == "plugins"
    )
