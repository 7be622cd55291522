"""From a config to runs and adaptations, without torch.

The section `quality` gives pilots, final runs, and which of these are timed alone; `perft` gives adaptations of these
runs.
"""

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from moe_routing_bench.grid.run_spec import AXES, DENSE, SCHEDULE, Adaptation, Run
from moe_routing_bench.quality import rates
from moe_routing_bench.store import paths, platforms
from moe_routing_kernels.errors import bad, pick
from moe_routing_kernels.routers import zoo

MOST_RUNS = 5_000  # of an entry
_OWN = {*AXES, "seed", "pilot", "lr_of", "timing", "trace_tokens"}


@dataclass
class Plan:
    """Runs and adaptations by name.

    `timing` maps a run that is timed to all runs that differ from it in the seed alone.
    """

    pilots: dict[str, Run] = field(default_factory=dict)
    finals: dict[str, Run] = field(default_factory=dict)
    timing: dict[str, list[str]] = field(default_factory=dict)
    adaptation_pilots: dict[str, Adaptation] = field(default_factory=dict)
    adaptations: dict[str, Adaptation] = field(default_factory=dict)

    @property
    def runs(self) -> dict[str, Run]:
        """Pilots and final runs."""
        return self.pilots | self.finals

    def files(self, platform: str) -> dict[Path, Run]:
        """The Parquet file of every final run."""
        return {paths.run_file(platform, name): run for name, run in self.finals.items()}

    @property
    def all_adaptations(self) -> dict[str, Adaptation]:
        """Pilots and final adaptations."""
        return self.adaptation_pilots | self.adaptations

    def adaptation_files(self, platform: str) -> dict[Path, Adaptation]:
        """The Parquet file of every final adaptation."""
        return {paths.perft_file(platform, name): adaptation for name, adaptation in self.adaptations.items()}

    def timing_files(self, platform: str) -> dict[Path, list[str]]:
        """The file of every timing run, and the names of the runs that it speaks for."""
        return {paths.timing_file(platform, name): names for name, names in self.timing.items()}


def expand(
    entries: Sequence[Mapping[str, Any]], perft: Sequence[Mapping[str, Any]] = (), platform: str = platforms.CPU
) -> Plan:
    """All runs and adaptations of the sections `quality` and `perft` that the schema allows, in order, each once.

    `platform`, or a folder of its results, is where rows of studies are stored that entries take their learning rates of.

    Raises `UserError` for what a schema cannot refuse: unknown routers or bases, sizes that do not fit, and two entries
    with one label.
    """
    plan = Plan()
    for section, labels in (
        ("quality", [entry["label"] for entry in entries]),
        ("perft", [entry["label"] for entry in perft]),
    ):
        if twice := {label for label in labels if labels.count(label) > 1}:
            raise bad(f"{section} label", min(twice), "a label once", "entries are told apart by it")
    bases = {pick("perft base", one["base"], [entry["label"] for entry in entries]) for one in perft}
    for entry in entries:
        axes = [entry.get(axis, [getattr(Run(), axis)]) for axis in AXES]
        _check_number(f"quality entry {entry['label']}", *axes, entry["seed"])
        for values in itertools.product(*axes):
            _add(plan, entry, dict(zip(AXES, values, strict=True)), entry["label"] in bases, platform.partition(".")[0])
    for entry in perft:
        _adapt(plan, entry)
    return plan


def _check_number(where: str, *lists: Sequence[Any]) -> None:
    """Raise `UserError` where the product of an entry's lists is too many runs to train."""
    if (count := math.prod(map(len, lists))) > MOST_RUNS:
        raise bad(where, f"{count} runs", f"at most {MOST_RUNS}", "an entry is the product of its lists")


def _add(plan: Plan, entry: Mapping[str, Any], axes: dict[str, Any], keep: bool, platform: str) -> None:
    """Add the runs of one point of an entry's axes: its pilots, and one per seed.

    `keep` says that all keep their weights.
    """
    scalars = {name: value for name, value in entry.items() if name not in _OWN}
    scalars.setdefault("eval_every", scalars.get("steps", Run.steps))
    scalars["corpora"] = _corpora(entry)
    axes["capacity_factor"] = None if axes["capacity_factor"] == "none" else float(axes["capacity_factor"])
    if axes["router"] == DENSE:  # has no router to build and no capacity to exceed
        axes = {name: getattr(Run(), name) for name in AXES} | {"router": DENSE, "capacity_factor": None}
    _check(axes, entry.get("top_k", Run.top_k), entry.get("layers", Run.layers))
    seeds, pilot = entry["seed"], _pilot(entry, f"quality entry {entry['label']}")
    if pilot is not None:
        steps = pilot["steps"]
        warmup = min(scalars.get("warmup", Run.warmup), steps // 10)
        change = {"purpose": "pilot", "steps": steps, "eval_every": steps, "warmup": warmup}
        pilots = [
            Run(**scalars | axes | change | {"seed": seed, "lr": float(lr)})
            for lr in pilot["lr"]
            for seed in pilot.get("seed") or seeds[:1]
        ]
        plan.pilots |= {run.name: run for run in pilots}
        scalars |= {"lr": None, "pilots": tuple(run.name for run in pilots)}
    elif study := entry.get("lr_of"):
        fields = {name: scalars.get(name, getattr(Run, name)) for name in rates.SIZE}
        lr, source = rates.of_study(study, platform, axes["router"], fields) or (scalars["lr"], rates.FALLBACK)
        scalars |= {"lr": lr, "lr_source": source}
    timed = entry.get("timing", False)
    change = {"seed": seeds[0], "trace_tokens": entry.get("trace_tokens", 0), "keep_weights": timed or keep}
    first = Run(**scalars | axes | change)
    rest = [replace(first, seed=seed, trace_tokens=0, keep_weights=keep) for seed in seeds[1:]]
    finals = {run.name: run for run in (first, *rest)}
    plan.finals |= finals
    if timed:
        plan.timing[first.name] = list(finals)


def _adapt(plan: Plan, entry: Mapping[str, Any]) -> None:
    """Add the adaptations of an entry: each variant and rank for the run of each seed of its base, and their pilots."""
    where = f"perft entry {entry['label']}"
    _check_number(where, entry["variant"], entry["rank"])
    bases = [run for run in plan.finals.values() if run.label == entry["base"]]
    if len({replace(run, seed=0, trace_tokens=0).spec for run in bases}) > 1 or bases[0].router == DENSE:
        raise bad(where, f"base {entry['base']} with several routers or configs", "one router but dense, and its seeds")
    pilot = _pilot(entry, where)
    if pilot is not None and "seed" in pilot:
        raise bad(f"{where} pilot", "seed", "lr and steps", "its pilots have the first seed of the base")
    change = {name: value for name, value in entry.items() if name in SCHEDULE}
    change |= {
        "eval_every": change.get("eval_every", change["steps"]),
        "warmup": change.get("warmup", change["steps"] // 10),
    }
    change["corpora"] = _corpora(entry)
    change |= {"label": entry["label"], "pilots": (), "train_mode": "joint", "trace_tokens": 0, "keep_weights": False}
    alike = {name: entry[name] for name in ("adapters", "top_k", "alpha") if name in entry}
    for variant, rank in itertools.product(entry["variant"], entry["rank"]):
        if pilot is not None:
            steps = pilot["steps"]
            short = {"purpose": "pilot", "steps": steps, "eval_every": steps, "warmup": steps // 10, "pilots": ()}
            tried = [replace(bases[0], **change | short | {"lr": float(lr)}) for lr in pilot["lr"]]
            pilots = [Adaptation(run, bases[0].name, variant, rank, **alike) for run in tried]
            plan.adaptation_pilots |= {run.name: run for run in pilots}
            change |= {"lr": None, "pilots": tuple(run.name for run in pilots)}
        finals = [Adaptation(replace(base, **change), base.name, variant, rank, **alike) for base in bases]
        plan.adaptations |= {run.name: run for run in finals}


def _pilot(entry: Mapping[str, Any], where: str) -> Mapping[str, Any] | None:
    """How pilots choose an entry's learning rate.

    None where it is given. Raises `UserError` for both and for neither.
    """
    pilot = entry.get("pilot")
    if (pilot is None) == ("lr" not in entry):
        raise bad(where, "both" if pilot else "neither", "one of lr and pilot")
    if pilot is not None and "lr_of" in entry:
        raise bad(where, "lr_of and pilot", "one of them", "lr_of takes the rates of another config's pilots")
    return pilot


def _corpora(entry: Mapping[str, Any]) -> dict[str, int | None]:
    """The most bytes to take of each text; None for all."""
    return {name: None if most == "all" else most for name, most in entry["corpora"].items()}


def _check(axes: Mapping[str, Any], top_k: int, layers: int) -> None:
    """Raise `UserError` for an unknown router or network, and for a router that cannot choose `top_k` or weigh a shared expert."""
    if axes["router"] == DENSE:
        return
    for part in axes["router"].split("+"):
        pick("quality router", part, [*zoo.ZOO, DENSE])
    pick("quality network", axes["network"], zoo.NETWORKS)
    for rule in zoo.by_layer(axes["router"], layers):
        if rule.top_k is None and top_k < rule.least_top_k:
            raise bad(f"quality top_k for router {rule.name}", top_k, f"at least {rule.least_top_k}")
        if axes["shared_gate"] == "joint" and "shared" not in rule.options:
            able = ", ".join(name for name, one in zoo.ZOO.items() if "shared" in one.options)
            raise bad(f"quality shared_gate for router {rule.name}", "joint", "plain or gated", f"joint is for {able}")
