"""From a validated config to jobs: the cartesian product of each grid entry, projected on the axes that each bench reads."""

import itertools
import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from moe_routing_bench.benches.bench import Bench
from moe_routing_bench.benches.plugins import used
from moe_routing_bench.benches.registry import benches_of
from moe_routing_bench.config import axes, presets
from moe_routing_bench.config.axes import AXES, Axis
from moe_routing_bench.config.load import load
from moe_routing_bench.grid.cell import ISOLATE, Cell, Job, Settings, Value
from moe_routing_kernels.errors import UserError, bad, near, pick

_WIDTHS = ("intermediate", "shared_intermediate")  # of experts
MOST_CELLS = 50_000  # of a config: they are expanded in a few seconds, and measured in days


def expand(config: Mapping[str, Any], models: Mapping[str, Any]) -> list[Job]:
    """All jobs of a config, each cell once, in the order of the config.

    `config` has passed `load.load`; `models` are those of `presets.load`. A cell asked for by several entries
    gets the union of their implementations. Raises `UserError` for what no schema can say.
    """
    settings = Settings(**config.get("measure", {}))
    whole = {axis.name: [config[axis.name]] for axis in AXES.values() if axis.scope == "config"}
    benches = benches_of(config.get("plugins", ()))
    wanted: dict[Cell, tuple[list[str], list[str]]] = {}  # names, twins
    for entry in config["grid"]:
        _check_entry(entry, benches)
        for name in entry["benches"]:
            bench = benches[name]
            implementations = _implementations(bench, entry)
            if not implementations:
                continue
            for cell in _cells(bench, entry, models, whole):
                if len(wanted) == MOST_CELLS and cell not in wanted:
                    raise _too_many(f"more than {MOST_CELLS} cells")
                names, twins = wanted.setdefault(cell, ([], []))
                names += implementations
                twins += [twin for twin in entry.get("twins", ()) if twin in implementations]
    if not wanted:
        raise bad("grid", "no cell", "at least one", "none of the benches has any of the implementations")
    jobs = []
    for cell, asked in wanted.items():
        bench = benches[cell.bench]
        names, twins = (_in_table_order(bench, each) for each in asked)
        isolate = config.get("isolate", ISOLATE[0])
        jobs.append(Job(cell, names, settings, twins, used(bench, names), isolate))
    _check_keys(jobs)
    return jobs


def cell_of(bench: str, **values: Any) -> Cell:
    """One cell of a bench from values of its axes; the rest, and those that are None, are defaults.

    Raises `UserError` for a cell that cannot exist.
    """
    (job,) = expand(load(config_of(bench, values)), {})
    return job.cell


def config_of(bench: str, values: Mapping[str, Any]) -> dict[str, Any]:
    """A config that asks for one cell of a bench: one value of each axis that is given and not None."""
    entry: dict[str, Any] = {"benches": [bench]}
    whole: dict[str, Any] = {}
    for axis, value in ((AXES[name], value) for name, value in values.items() if value is not None):
        (whole if axis.scope == "config" else entry)[axis.name] = [value] if axis.scope == "list" else value
    return whole | {"grid": [entry]}


def _check_entry(entry: Mapping[str, Any], benches: Mapping[str, Bench]) -> None:
    """Raise `UserError` for values that would be ignored in silence."""
    if "trace" in entry and "trace" not in entry.get("sampler", ()):
        raise bad("trace", entry["trace"], "only with sampler: [trace]", "nothing else reads it")
    shared = entry.get("shared_experts", False)
    if shared and "model" not in entry:
        raise bad("grid shared_experts", shared, "false without a model", "give shared_intermediate")
    given = [name for name in (axes.PRESET + axes.SHARED if shared else axes.PRESET) if name in entry]
    if "model" in entry and given:
        raise bad(
            f"grid {given[0]}", entry[given[0]], f"nothing in addition to model: {entry['model']}", "a model sets it"
        )
    known = dict.fromkeys(implementation.name for bench in benches.values() for implementation in bench.implementations)
    for name in entry.get("implementations", ()):
        pick("grid implementations", name, known)
    measured = {name for bench in entry["benches"] for name in _implementations(benches[bench], entry)}
    if strangers := [name for name in entry.get("twins", ()) if name not in measured]:
        raise bad("grid twins", strangers[0], ", ".join(sorted(measured)), "one of the entry's implementations")


def _implementations(bench: Bench, entry: Mapping[str, Any]) -> list[str]:
    """Names of the entry's implementations that this bench has."""
    listed = [implementation.name for implementation in bench.implementations]
    return [name for name in entry.get("implementations", listed) if name in listed]


def _in_table_order(bench: Bench, names: Iterable[str]) -> tuple[str, ...]:
    asked = set(names)
    return tuple(implementation.name for implementation in bench.implementations if implementation.name in asked)


def _cells(
    bench: Bench, entry: Mapping[str, Any], models: Mapping[str, Any], whole: dict[str, list[Any]]
) -> Iterator[Cell]:
    """The cells of an entry for one bench; `whole` are the axes of which the config holds one value."""
    for shape in _shapes(entry, models):
        values = {name: _listed(value) for name, value in (dict(entry) | shape).items() if name in AXES}
        yield from _products(bench, values | whole)


def _listed(value: Any) -> list[Any]:
    return list(value) if isinstance(value, list | tuple) else [] if value is None else [value]


def _shapes(entry: Mapping[str, Any], models: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """The axes that a model preset sets, per preset; one empty mapping when the entry names none."""
    if "model" not in entry:
        yield {}
    for name in entry.get("model", ()):
        preset = models[pick("grid model", name, models, _model_hint(name, models))]
        if preset.unsupported:
            raise bad("grid model", name, "a preset that can be measured", preset.unsupported)
        shared = entry.get("shared_experts", False)
        if shared and not preset.shared_intermediate:
            raise bad("grid shared_experts", shared, f"false for {name}", "the model has none")
        stored = {"weights": [preset.weights]} if preset.weights and "weights" not in entry else {}
        yield {"model": [name]} | stored | {axis: [value] for axis, value in presets.values(preset, shared).items()}


def _model_hint(name: Any, models: Mapping[str, Any]) -> str:
    """The closest name, and how to add a preset."""
    own = "`--models FILE` adds presets of your own, and `moe-routing-bench preset` writes one"
    return "; ".join(filter(None, (near(name, list(models)), own)))


def _products(bench: Bench, values: Mapping[str, list[Any]]) -> Iterator[Cell]:
    """Every combination of the values of the axes that a bench reads, checked."""
    read = axes.of(bench.axes)
    lists = [values.get(axis.name) or _default(bench, axis) for axis in read]
    if (count := math.prod(map(len, lists))) > MOST_CELLS:
        raise _too_many(f"{count} cells of {bench.name}")
    for combination in itertools.product(*lists):
        found = {axis.name: axes.spelled(axis, value) for axis, value in zip(read, combination, strict=True)}
        for axis in read:
            if axis.follows and found[axis.name] is None:
                found[axis.name] = found[axis.follows]
        if found.get("sampler") == "trace":
            found["skew"] = None
        elif "trace" in found:
            found["trace"] = None
        found |= shard(found)
        axes.check(bench.name, found)
        found = {name: value for name, value in found.items() if value is not None or not AXES[name].sparse}
        yield Cell(bench.name, axes.key(found), tuple(found.items()), axes.family(bench.name, found))


def shard(values: Mapping[str, Any]) -> dict[str, Any]:
    """The inner widths of one of the cell's tensor-parallel ranks. One rank is none; ranks that are no divisor raise `UserError`."""
    ranks = values.get("tp") or 1
    widths = {name: values[name] for name in _WIDTHS if values.get(name)}
    for name, width in widths.items():
        if width % ranks:
            raise bad("tp", ranks, f"a divisor of {name}={width}", "every rank has an equal part")
    experts, groups = values.get("experts") or 1, values.get("ep") or 1
    if experts % groups:
        raise bad("ep", groups, f"a divisor of experts={experts}", "every rank has as many experts")
    alone = {name: None for name, number in (("tp", ranks), ("ep", groups)) if number == 1}
    return {name: width // ranks for name, width in widths.items()} | alone


def _too_many(cells: str) -> UserError:
    return bad(
        "grid", cells, f"at most {MOST_CELLS} cells", "an entry is the product of its lists: use several configs"
    )


def _default(bench: Bench, axis: Axis) -> list[Value]:
    if axis.default is None and not axis.optional and not axis.follows:
        raise bad(
            f"grid entry for bench {bench.name}",
            f"no {axis.name}",
            "a list of values",
            f"add '{axis.name}: [...]' or a model",
        )
    return [axis.default]


def _check_keys(jobs: list[Job]) -> None:
    seen: dict[tuple[str, str], Cell] = {}
    for job in jobs:
        other = seen.setdefault((job.cell.bench, job.cell.key), job.cell)
        if other != job.cell:
            raise bad(
                "cell key",
                job.cell.key,
                "one cell per key",
                f"two cells differ only in what the key leaves out: {other} and {job.cell}",
            )
