"""Where results, reports and configs lie (below the working directory), and which source files a bench depends on."""

import hashlib
import os
import sys
from pathlib import Path

from moe_routing_bench import platforms
from moe_routing_bench.grid import Job
from moe_routing_bench.routers import ROUTERS

PACKAGE = Path(__file__).resolve().parent
CONFIG = Path("config/config.yaml")
MODELS = Path("config/models.yaml")

_CORE = (
    "benches/__init__.py", "benches/checks.py", "errors.py", "files.py", "grid.py", "platforms.py", "records.py", "row_map.py",
    "settings.py", "skew.py", "trace.py", "workload.py",
)  # fmt: skip
_STAGES = ("gate", "permute", "pack", "combine")
_ADAPTATION = ("adapt", "adaptation", "adaptations", "adapters")  # files of quality that no training run depends on
_PARTS = {"router": ("gate",), "routing": _STAGES, "layer": (*_STAGES, "routing")}


def results(platform: str) -> Path:
    """Folder of everything measured on a platform."""
    return Path("results") / platform


def cell_file(platform: str, job: Job) -> Path:
    """The Parquet file of one job's cell."""
    return results(platform) / "cells" / job.cell.bench / f"{job.name}.parquet"


def cell_files(platform: str, jobs: list[Job]) -> dict[Path, Job]:
    """The file of every job."""
    return {cell_file(platform, job): job for job in jobs}


def asked(platform: str) -> Path:
    """The list of the grid's jobs that the workflow keeps up to date."""
    return results(platform) / "asked.txt"


def code(platform: str, bench: str) -> Path:
    """The hashes of a bench's source files, which the workflow keeps up to date."""
    return results(platform) / "code" / f"{bench}.sha256"


def keep(path: Path, text: str) -> None:
    """Make the file hold the text; one that does already is not touched."""
    if not path.is_file() or path.read_text() != text:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def measurements(platform: str) -> Path:
    """All rows of a platform in one file: what figures and the report are made from."""
    return results(platform) / "measurements.parquet"


def quality(platform: str) -> Path:
    """All rows of the training runs of a platform."""
    return results(platform) / "quality.parquet"


def perft(platform: str) -> Path:
    """All rows of the adaptations of trained runs (PERFT)."""
    return results(platform) / "perft.parquet"


TABLES = {"measurements": measurements, "quality": quality, "perft": perft}  # what figures and the report are made from


def reported(platform: str) -> set[str]:
    """The tables that a platform's report is of: measurements, and what else is stored."""
    return {name for name, path in TABLES.items() if name == "measurements" or path(platform).is_file()}


def run_file(platform: str, name: str) -> Path:
    """The Parquet file of a training run."""
    return results(platform) / "runs" / f"{name}.parquet"


def perft_file(platform: str, name: str) -> Path:
    """The Parquet file of an adaptation."""
    return results(platform) / "perft" / f"{name}.parquet"


def timing_file(platform: str, name: str) -> Path:
    """The times of a training run's steps with the machine to itself."""
    return results(platform) / "timing" / f"{name}.parquet"


def trace_file(run: Path) -> Path:
    """The routing that a trained model chose, beside the folder of its run."""
    return run.parent.parent / "traces" / run.name


def report(platform: str) -> Path:
    """The HTML report."""
    return Path("reports") / platform / "index.html"


def figure(platform: str, name: str, suffix: str = "svg") -> Path:
    """One drawn figure."""
    return Path("reports") / platform / "figures" / f"{name}.{suffix}"


def source(relative: str) -> str:
    """A file of this package as Snakemake should name it: relative where it lies below the working directory."""
    path, here = PACKAGE / relative, Path.cwd().resolve()
    return os.path.relpath(path, here) if path.is_relative_to(here) else str(path)


def sources(*folders: str, suffixes: tuple[str, ...] = (".py",)) -> list[str]:
    """All files of the given folders of this package, sorted."""
    found = {p for f in folders for p in (PACKAGE / f).rglob("*") if p.suffix in suffixes}
    return sorted(source(str(p.relative_to(PACKAGE))) for p in found)


def code_files(bench: str) -> list[str]:
    """Every source file whose edit makes the measurements of a bench stale, sorted."""
    parts = _PARTS.get(bench, ())
    folders = [f"benches/{name}" for name in (bench, *parts)]
    rules = {"__init__", *(router.module for router in ROUTERS.values())}  # not the trainable ones: no bench runs them
    files = {*sources("measure", *folders), *(source(f"routers/{name}.py") for name in rules)}
    files |= {source(name) for name in _CORE}
    if parts:
        files.add(source("benches/composite.py"))
    if any("cute_support" in Path(name).read_text() for name in files):
        files.add(source("cute_support.py"))
    return sorted(files)


def training_files() -> list[str]:
    """Every source file whose edit makes training runs stale, sorted."""
    after = {
        source(f"quality/{name}.py")
        for name in ("commands", "compare", "perft_summary", "plan", "specialisation", *_ADAPTATION)
    }
    return sorted({*sources("quality", "routers"), source("measure/provenance.py")} - after)


def adaptation_files() -> list[str]:
    """The same for adaptations of trained runs."""
    return sorted({*training_files(), *(source(f"quality/{name}.py") for name in _ADAPTATION)})


def code_hashes(files: list[str]) -> str:
    """What `sha256sum` prints for files: to compare two of them says which file made results stale."""
    return "".join(f"{hashlib.sha256(Path(name).read_bytes()).hexdigest()}  {name}\n" for name in files)


def prepare_jobs(device: str) -> None:
    """Set what child processes inherit: this interpreter is found as `python`, and device cpu hides the GPU.

    By name, so that no path of a machine is part of what decides whether a cell is measured again.
    """
    os.environ["PATH"] = os.path.dirname(sys.executable) + os.pathsep + os.environ.get("PATH", "")
    hide_gpu(device)


def hide_gpu(device: str) -> None:
    """Leave the GPU out of sight of this process and its children when the config's device is cpu."""
    if device == platforms.CPU:
        os.environ["MOE_ROUTING_BENCH_DEVICE"] = platforms.CPU
        platforms.gpu_name.cache_clear()
