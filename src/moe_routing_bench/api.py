"""The benchmark as a library: what `moe-routing-bench measure` does, for scripts, notebooks, and tests of a kernel.

Arguments are named as the axes of a config's grid (``config/README.md``); one that is not given has the value that
``moe-routing-bench measure --help`` says. Bad input raises `moe_routing_bench.errors.UserError`, whose text is one line.
"""

import importlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from moe_routing_bench import declarations
from moe_routing_bench.config import by_hand, presets
from moe_routing_bench.errors import bad
from moe_routing_bench.grid.job import Job
from moe_routing_bench.store import paths, records
from moe_routing_bench.store.shipped import own_or_shipped


def measure(
    bench: str,
    implementations: Sequence[str] | None = None,
    *,
    plugins: Sequence[str] = (),
    models: str | Path | None = None,
    settings: Mapping[str, Any] | None = None,
    **axes: Any,
) -> list[dict[str, Any]]:
    """Measure implementations of a bench side by side and return their rows, in the order of cells and table.

    A row has the columns of ``docs/columns.md``, of which those that do not apply are None: `status` says whether there is a time, `reason`
    why not. Without names, all implementations take part. Of an axis one value is given, or a list of several. `settings` are those
    below ``measure:`` of a config. Each cell is measured in a process of its own.
    """
    asked = jobs(bench, implementations, plugins=plugins, models=models, settings=settings, **axes)
    supervisor = importlib.import_module("moe_routing_bench.measure.supervisor")
    baselines = importlib.import_module("moe_routing_bench.comparison.baselines")
    found = [row for job in asked for row in baselines.against_dequantised(supervisor.measure(job))]
    return [dict.fromkeys(records.COLUMNS) | row for row in found]


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
    return importlib.import_module("moe_routing_bench.measure.once").check(asked[0])


def jobs(
    bench: str,
    implementations: Sequence[str] | None = None,
    *,
    plugins: Sequence[str] = (),
    models: str | Path | None = None,
    settings: Mapping[str, Any] | None = None,
    **axes: Any,
) -> list[Job]:
    """What `measure` measures: a job for each cell. `job.cell` has the values of the axes, and `job.spec` is all of it as JSON."""
    own = presets.load(own_or_shipped(paths.MODELS), models) if axes.get("model") is not None else {}
    references = list(dict.fromkeys([*declarations.installed(), *plugins]))
    with by_hand.called(str):
        return by_hand.jobs(bench, implementations, axes, settings or {}, references, own)
