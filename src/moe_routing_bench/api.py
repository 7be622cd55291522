"""The benchmark as a library: what `moe-routing-bench measure` does, for scripts, notebooks, and tests of a kernel.

Arguments are named as the axes of a config's grid (``config/README.md``); one that is not given has the value that
``moe-routing-bench measure --help`` says. Bad input raises `moe_routing_kernels.errors.UserError`, whose text is one line; so does the import
where the extra `bench` is not installed.
"""

import importlib
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from moe_routing_bench.store.project_files import check_extra, own_or_shipped

check_extra("moe_routing_bench.api")  # before an import fails for one of its packages

from moe_routing_bench.config import by_hand, presets  # noqa: E402
from moe_routing_bench.grid.cell import ISOLATE, Job  # noqa: E402
from moe_routing_bench.measure import client  # noqa: E402
from moe_routing_bench.store import paths, records  # noqa: E402
from moe_routing_kernels import declarations  # noqa: E402
from moe_routing_kernels.errors import UserError, bad  # noqa: E402


def measure(
    bench: str,
    implementations: Sequence[str] | None = None,
    *,
    plugins: Sequence[str] = (),
    models: str | Path | None = None,
    settings: Mapping[str, Any] | None = None,
    isolate: str = ISOLATE[0],
    **axes: Any,
) -> list[dict[str, Any]]:
    """Measure implementations of a bench together and return their rows, in the order of cells and table.

    A row has the columns of ``docs/columns.md``, of which those that do not apply are None: `status` says whether there is a time, `reason`
    why not. Without names, all implementations take part. Of an axis one value is given, or a list of several. `settings` are those
    below ``measure:`` of a config. With ``isolate="all"`` every implementation runs in a process of its own, as those of other packages do. Cells are measured as the workflow measures them, outside this process, whatever it has done with
    torch and its GPU; what failed implementations print goes to stderr.
    """
    asked = jobs(bench, implementations, plugins=plugins, models=models, settings=settings, isolate=isolate, **axes)
    baselines = importlib.import_module("moe_routing_bench.comparison.ratios")
    with tempfile.TemporaryDirectory(prefix="measure-") as folder:
        found = [_measured(job, Path(folder, f"{number}.parquet")) for number, job in enumerate(asked)]
    return [row for rows in found for row in baselines.against_dequantised(rows)]


def check(
    bench: str,
    implementation: str,
    *,
    plugins: Sequence[str] = (),
    models: str | Path | None = None,
    **axes: Any,
) -> Any:
    """Call an implementation once on inputs of a cell, in this process, and compare its outputs with the reference: a `Check`.

    The `error` of a `moe_routing_bench.benches.checks.Check` says what is wrong, or is None. For tests and debuggers: nothing is timed,
    and `measure` looks harder. Raises `UserError` where it cannot run this cell here, and whatever it raises itself.
    """
    asked = jobs(bench, [implementation], plugins=plugins, models=models, **axes)
    if len(asked) != 1:
        raise bad("check", f"{len(asked)} cells", "one value of each axis")
    return importlib.import_module("moe_routing_bench.measure.accuracy").check(asked[0])


def jobs(
    bench: str,
    implementations: Sequence[str] | None = None,
    *,
    plugins: Sequence[str] = (),
    models: str | Path | None = None,
    settings: Mapping[str, Any] | None = None,
    isolate: str = ISOLATE[0],
    **axes: Any,
) -> list[Job]:
    """What `measure` measures: a job for each cell. `job.cell` has the values of the axes, and `job.spec` is all of it as JSON."""
    own = presets.load(own_or_shipped(paths.MODELS), models) if axes.get("model") is not None else {}
    references = list(dict.fromkeys([*declarations.installed(), *plugins]))
    with by_hand.called(str):
        return by_hand.jobs(bench, implementations, axes, settings or {}, references, own, isolate)


def _measured(job: Job, out: Path) -> list[dict[str, Any]]:
    """The rows of a job, by way of a file. Raises `UserError` where it made none."""
    done = subprocess.run(
        client.command(str(out), job.spec),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        encoding="utf-8",
        errors="replace",
        check=False,
    )
    if done.returncode or not out.is_file():
        raise UserError(
            (done.stderr or done.stdout).strip().removeprefix("error: ") or f"exit status {done.returncode}"
        )
    rows = records.read(out).to_pylist()
    if any(row["status"] not in ("ok", "unsupported") for row in rows):
        print(done.stderr, end="", file=sys.stderr)
    return rows
