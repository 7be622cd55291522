"""Where results, reports and configs lie, below the working directory."""

import re
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from moe_routing_kernels.errors import bad

if TYPE_CHECKING:
    from moe_routing_bench.grid.cell import Job

CONFIG = Path("config/config.yaml")
MODELS = Path("config/models.yaml")
CLAIMS = Path("config/claims.yaml")
PUBLISHED = Path("config/seeds/published")  # figures of the seed documents
OTHERS = Path("config/published")  # rows that other projects published


_MOST_LETTERS = 100
_FOLDER = re.compile(r"[a-z0-9]+(-[a-z0-9]+)*(\.[a-z0-9]+(-[a-z0-9]+)*)?")


def folder(platform: str, run: str | None = None) -> str:
    """The name of the folder of a platform's results: ``nvidia-h200``, or ``nvidia-h200.NAME`` for a run that has a name.

    Every `platform` of this module is such a name. Raises `UserError` for one that is no safe name of a folder.
    """
    name = f"{platform}.{run}" if run else platform
    if not _FOLDER.fullmatch(name) or len(name) > _MOST_LETTERS:
        what, got = ("run", run) if run else ("platform", platform)
        close = re.sub(r"[^a-z0-9]+", "-", str(got).lower()).strip("-")[:40]
        raise bad(
            what,
            got,
            f"at most {_MOST_LETTERS} lower-case letters, digits and dashes",
            f"did you mean {close!r}?" if close else "",
        )
    return name


def results(platform: str) -> Path:
    """Folder of everything measured on a platform."""
    return Path("results") / platform


def cell_file(platform: str, job: "Job") -> Path:
    """The Parquet file of one job's cell."""
    return results(platform) / "cells" / job.cell.bench / f"{job.name}.parquet"


def cell_files(platform: str, jobs: "Iterable[Job]") -> "dict[Path, Job]":
    """The file of every job."""
    cells = results(platform) / "cells"
    return {Path(cells, job.cell.bench, f"{job.name}.parquet"): job for job in jobs}


def orphans(platform: str, wanted: "Iterable[Path]") -> list[Path]:
    """Cell files of a platform that no job of the config asks for, sorted."""
    return sorted(set(results(platform).glob("cells/*/*.parquet")) - set(wanted))


def asked(platform: str) -> Path:
    """The list of the grid's jobs that the workflow keeps up to date."""
    return results(platform) / "asked.txt"


def code(platform: str, bench: str) -> Path:
    """The hashes of a bench's source files, which the workflow keeps up to date."""
    return results(platform) / "code" / f"{bench}.sha256"


def plugin_code(platform: str, reference: str) -> Path:
    """The same of a plugin, by its reference."""
    return results(platform) / "code" / f"{reference.replace(':', '.')}.sha256"


def trash(platform: str) -> Path:
    """What `prune` has set aside."""
    return results(platform) / "trash"


def measurements(platform: str) -> Path:
    """All rows of a platform in one file: what figures and the report are made from."""
    return results(platform) / "measurements.parquet"


def manifest(platform: str) -> Path:
    """What measured the rows of a published run."""
    return results(platform) / "manifest.yaml"


def again(platform: str) -> Path:
    """What doubted rows took when they were measured once more."""
    return results(platform) / "again.parquet"


def accuracy(platform: str) -> Path:
    """What quantised weights lose, and how exact kernels are with them."""
    return results(platform) / "accuracy.parquet"


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


def claim_file(platform: str, claim: str) -> Path:
    """The rows that were measured to check a published figure."""
    return results(platform) / "claims" / f"{claim}.parquet"


def claim_files(platform: str) -> Iterable[Path]:
    """All of these."""
    return (results(platform) / "claims").glob("*.parquet")


def perft_file(platform: str, name: str) -> Path:
    """The Parquet file of an adaptation."""
    return results(platform) / "perft" / f"{name}.parquet"


def timing_file(platform: str, name: str) -> Path:
    """The times of a training run's steps with the machine to itself."""
    return results(platform) / "timing" / f"{name}.parquet"


def weights_file(run: Path) -> Path:
    """The last weights of a training run, next to its Parquet, for timing and adapting it."""
    return run.with_suffix(".pt")


def trace_file(run: Path) -> Path:
    """The routing that a trained model chose, next to the folder of its run."""
    return run.parent.parent / "traces" / run.name


def profile_folder(platform: str, job: "Job") -> Path:
    """The operator profiles of a cell's implementations."""
    return results(platform) / "profiles" / job.name


def profile_files(platform: str) -> Iterable[Path]:
    """All of a platform's profiles, one per cell."""
    return sorted((results(platform) / "profiles").glob("*/profile.json"))


def report(platform: str) -> Path:
    """The HTML report."""
    return Path("reports") / platform / "index.html"


def published_page(platform: str) -> Path:
    """The page of published rows of a GPU, next to the report of a machine without one."""
    return report(platform).with_name("published.html")


def figure(platform: str, name: str, suffix: str = "svg") -> Path:
    """One drawn figure."""
    return Path("reports") / platform / "figures" / f"{name}.{suffix}"
