"""What makes a measurement stale: the files that it depends on are those that run, and no others."""

import hashlib
import json
import subprocess
from pathlib import Path

import pytest

import forks
from moe_routing_bench.benches.registry import BENCHES
from moe_routing_bench.config.expand import cell_of
from moe_routing_bench.grid.cell import Job, Settings
from moe_routing_bench.packages import PACKAGES, fingerprint
from moe_routing_kernels.implementations import OPERATIONS, module_of, ranked

pytestmark = pytest.mark.slow

SHAPE = {"tokens": 16, "hidden": 16, "intermediate": 16, "experts": 8, "top_k": 2, "capacity_factor": 1.25}
QUICK = Settings(check_seeds=1, warmup_ms=1, interval_us=20, samples_per_block=1, min_blocks=3, max_blocks=3)
BENCH, KERNELS = PACKAGES
KINDS = ("gate", "layer", "training")  # a bench of one operation, a composite of all of them, one that runs operators
FILES = sorted(path for package in PACKAGES for path in package.rglob("*.py"))
# For each job in a process of its own: measures it, and prints the files of the package that its worker has loaded. Ceilings, which
# take longer than all else, are not measured.
SCRIPT = """
import gc, json, os, sys
import nvtx, pyarrow.parquet, scipy.stats, torch._dynamo
gc.freeze()
CEILINGS = "copy_gb_per_s", "read_gb_per_s", "write_gb_per_s", "peak_tflops", "launch_us"
for spec in sys.argv[1:]:
    if os.fork():
        os.wait()
        continue
    from moe_routing_bench.grid.cell import Job
    from moe_routing_bench.measure import cpu_ceilings, worker
    cpu_ceilings.CpuCeilings.__init__ = lambda self, known: setattr(self, 'known', None)
    cpu_ceilings.CpuCeilings.measure = lambda self: dict.fromkeys(CEILINGS, 1.0)
    job, messages = Job.from_spec(spec), []
    worker.run(job, "cpu", list(job.implementations), messages.append)
    assert set(messages[-1][1]) == set(job.implementations), messages
    from moe_routing_bench.measure import supervisor
    from moe_routing_bench.store import rows
    loaded = [m.__file__ for n, m in sys.modules.items() if n.startswith("moe_routing")]
    print(json.dumps([job.cell.bench, loaded]), flush=True)
    os._exit(0)
"""


@pytest.mark.parametrize(
    "benches", [KINDS, pytest.param(tuple(name for name in BENCHES if name not in KINDS), marks=pytest.mark.campaign)]
)
def test_what_runs_is_what_makes_stale(benches: tuple[str, ...]) -> None:
    """Every file that a worker loads to measure a bench on a CPU is among those whose edit makes it stale."""
    specs = []
    for name, bench in ((name, BENCHES[name]) for name in benches):
        cell = cell_of(name, **SHAPE)
        here = [one.name for one in bench.implementations if not {"gpu", "nvidia", "compiler"} & set(one.requires)]
        names = tuple(one for one in here if not bench.supports(one, cell))
        specs.append(Job(cell, names, QUICK).spec)
    python = forks.programs() / forks.PYTHON  # which has nothing of the packages
    environment = forks.environment(BENCH.parent)
    done = subprocess.run([python, "-c", SCRIPT, *specs], env=environment, capture_output=True, text=True, check=False)
    loaded = dict(map(json.loads, done.stdout.splitlines()))
    assert loaded.keys() == {*benches}, done.stderr
    for name, files in loaded.items():
        known = {path.resolve() for path in BENCHES[name].code_files()}
        assert {Path(file).resolve() for file in files} <= known, name


def test_an_edit_makes_stale_exactly_the_benches_whose_closure_has_the_file(monkeypatch: pytest.MonkeyPatch) -> None:
    """The fingerprint of a bench changes with each of its files, and does not with all others at once."""
    content = {path: str(path).encode() for path in FILES}  # little to hash, and of every file another
    edited = {path: hashlib.sha256(text).digest() for path, text in content.items()}
    now = dict(content)
    monkeypatch.setattr(Path, "read_bytes", lambda path: now[path])
    for name, bench in BENCHES.items():
        files = bench.code_files()
        before = fingerprint(files)
        for path in files:
            now[path] = edited[path]
            assert fingerprint(files) != before, (name, path)
            now[path] = content[path]
        now.update({path: edited[path] for path in FILES if path not in files})
        assert fingerprint(files) == before, name
        now.update(content)


def test_lists_make_nothing_stale() -> None:
    """What only registers, plans, reads, draws or trains is no part of any measurement."""
    free = (
        "benches/registry.py",
        "config/",
        "store/records.py",
        "store/paths.py",
        "figures/",
        "report/",
        "quality/",
        "cli/",
    )
    for bench in BENCHES.values():
        names = [path.relative_to(BENCH.parent).as_posix().partition("/")[2] for path in bench.code_files()]
        assert not [name for name in names if name.startswith(free)], bench.name
        measured = ("training", "model", "ep_layer", "ep_training")
        assert any(name.startswith("ops/") for name in names) == (bench.name in measured), bench.name


def test_what_operators_choose_by_name_makes_stale() -> None:
    """`training` and `model` run them: every module of a kernel that a table ranks."""
    for bench in ("training", "model"):
        files = set(BENCHES[bench].code_files())
        for operation in OPERATIONS:
            for one in ranked(operation):
                if one.backend != "torch" and not one.quantised:
                    assert KERNELS / f"{operation}/{module_of(one.module)}.py" in files, one


def test_a_composite_depends_on_its_stages_and_no_stage_on_a_composite() -> None:
    files = {name: set(bench.code_files()) for name, bench in BENCHES.items()}
    for bench in BENCHES.values():
        for stage in bench.stages:
            assert files[stage.bench] < files[bench.name]
    assert BENCH / "benches/composite.py" not in files["pack"]
    # A library's module may know the sizes of all operations, which their `__init__` have, but none of our kernels of another.
    assert files["gate"].isdisjoint((KERNELS / "pack").glob("[!_]*.py"))
