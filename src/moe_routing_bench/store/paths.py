"""Where results, reports and configs lie, below the working directory."""

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from moe_routing_bench.grid.job import Job

CONFIG = Path("config/config.yaml")
MODELS = Path("config/models.yaml")


def results(platform: str) -> Path:
    """Folder of everything measured on a platform."""
    return Path("results") / platform


def cell_file(platform: str, job: "Job") -> Path:
    """The Parquet file of one job's cell."""
    return results(platform) / "cells" / job.cell.bench / f"{job.name}.parquet"


def cell_files(platform: str, jobs: "Iterable[Job]") -> "dict[Path, Job]":
    """The file of every job."""
    return {cell_file(platform, job): job for job in jobs}


def asked(platform: str) -> Path:
    """The list of the grid's jobs that the workflow keeps up to date."""
    return results(platform) / "asked.txt"


def code(platform: str, bench: str) -> Path:
    """The hashes of a bench's source files, which the workflow keeps up to date."""
    return results(platform) / "code" / f"{bench}.sha256"


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


def weights_file(run: Path) -> Path:
    """The last weights of a training run, beside its Parquet, for timing and adapting it."""
    return run.with_suffix(".pt")


def trace_file(run: Path) -> Path:
    """The routing that a trained model chose, beside the folder of its run."""
    return run.parent.parent / "traces" / run.name


def report(platform: str) -> Path:
    """The HTML report."""
    return Path("reports") / platform / "index.html"


def figure(platform: str, name: str, suffix: str = "svg") -> Path:
    """One drawn figure."""
    return Path("reports") / platform / "figures" / f"{name}.{suffix}"
