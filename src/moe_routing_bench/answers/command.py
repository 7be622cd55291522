"""The command that measures a cell again, from a row or from the values of its axes."""

import shlex
from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any

from moe_routing_bench.config.axes import AXES, PRESET
from moe_routing_bench.grid.cell import Settings
from moe_routing_bench.store.platforms import CPU

_Texts = Mapping[str, str]


def again(
    row: Mapping[Any, Any], plugins: _Texts = MappingProxyType({}), presets: _Texts = MappingProxyType({})
) -> str:
    """A line for a shell: the row's cell, with its implementation and those that it was compared with.

    `plugins` are the references of implementations of other packages, by name: their modules are named, too. `presets` are the files of
    models that are not in the project's, by name. Left out is what `measure` takes anyway: defaults, and what a model preset sets. A row holds the threads alone of the settings of a measurement; they count on a CPU.
    """
    return shlex.join([*started(row, plugins, presets), *options(row)])


def started(row: Mapping[Any, Any], plugins: _Texts, presets: _Texts) -> list[str]:
    """The command without the options of the row's cell."""
    names = list(dict.fromkeys(_compared(row)))
    modules = sorted({plugins[name].partition(":")[0] for name in names if name in plugins})
    named = [word for module in modules for word in ("--plugin", module)]
    if row["model"] in presets:
        named += ["--models", presets[row["model"]]]
    return ["moe-routing-bench", "measure", row["bench"], "--implementations", ",".join(names), *named]


def _compared(row: Mapping[Any, Any]) -> Iterator[str]:
    yield row["implementation"]
    for name, ratio in (("baseline", "speedup"), ("best_other", "best_speedup")):
        if not _absent(row[name]) and not _absent(row[ratio]):
            yield row[name]


def options(row: Mapping[Any, Any]) -> Iterator[str]:
    """Option and value of every axis that has a value of its own; axes that the bench does not read are null."""
    known = {name: axis.kind(row[name]) for name, axis in AXES.items() if not _absent(row[name])}
    for name, value in known.items():
        of_model = "model" in known and name in PRESET
        if not of_model and value != (AXES[name].default if not AXES[name].follows else known.get(AXES[name].follows)):
            yield from (AXES[name].option, str(value))
    threads = row["cpu_threads"]
    if row["platform"] == CPU and not _absent(threads) and threads != Settings.cpu_threads:
        yield from ("--cpu-threads", str(int(threads)))


def asked(bench: str, values: Mapping[str, Any]) -> str:
    """The command that measures the cell with these values of axes, with all implementations of the bench."""
    row = dict.fromkeys(AXES) | dict(values) | {"platform": None, "cpu_threads": None}
    return shlex.join(["moe-routing-bench", "measure", bench, *options(row)])


def _absent(value: Any) -> bool:
    """Whether a row has no value: None or NaN."""
    return value is None or value != value
