"""The training runs of a config's `quality` section: pilots, final runs, and which are timed alone. Without torch."""

import importlib
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from moe_routing_bench import paths
from moe_routing_bench.errors import bad, pick
from moe_routing_bench.quality.run import DENSE, Run

AXES = ("router", "network", "capacity_factor", "drop_policy", "train_mode")  # lists of an entry, besides the seeds
_OWN = {*AXES, "seed", "pilot", "timing", "trace_tokens"}


@dataclass
class Plan:
    """Runs by name. `timing` maps the run that is timed to all runs that differ from it in nothing but the seed."""

    pilots: dict[str, Run] = field(default_factory=dict)
    finals: dict[str, Run] = field(default_factory=dict)
    timing: dict[str, list[str]] = field(default_factory=dict)

    @property
    def runs(self) -> dict[str, Run]:
        """All of them."""
        return self.pilots | self.finals

    def files(self, platform: str) -> dict[Path, Run]:
        """The Parquet file of every final run."""
        return {paths.run_file(platform, name): run for name, run in self.finals.items()}

    def timing_files(self, platform: str) -> dict[Path, list[str]]:
        """The file of every timing run, and the names of the runs that it speaks for."""
        return {paths.timing_file(platform, name): names for name, names in self.timing.items()}


def expand(entries: Sequence[Mapping[str, Any]]) -> Plan:
    """All runs of the schema-valid `quality` section, in its order, each once.

    Raises `UserError` for what a schema cannot say: unknown routers, sizes that do not fit, two entries of one label.
    """
    plan = Plan()
    labels = [entry["label"] for entry in entries]
    if twice := {one for one in labels if labels.count(one) > 1}:
        raise bad("quality label", min(twice), "a label once", "entries are told apart by it")
    for entry in entries:
        axes = [entry.get(axis, [getattr(Run(), axis)]) for axis in AXES]
        for values in itertools.product(*axes):
            _add(plan, entry, dict(zip(AXES, values, strict=True)))
    return plan


def _add(plan: Plan, entry: Mapping[str, Any], axes: dict[str, Any]) -> None:
    """The runs of one point of an entry's axes: its pilots, and one for every seed."""
    scalars = {name: value for name, value in entry.items() if name not in _OWN}
    scalars.setdefault("eval_every", scalars.get("steps", Run.steps))
    scalars["corpora"] = {name: None if most == "all" else most for name, most in entry["corpora"].items()}
    axes["capacity_factor"] = None if axes["capacity_factor"] == "none" else float(axes["capacity_factor"])
    if axes["router"] == DENSE:  # it has no router to build and no capacity to exceed
        axes = {"router": DENSE, "network": "linear", "capacity_factor": None, "drop_policy": "position", "train_mode": "joint"}  # fmt: skip
    _check(axes["router"], axes["network"], entry.get("top_k", Run.top_k))
    seeds, pilot = entry["seed"], entry.get("pilot")
    if (pilot is None) == ("lr" not in entry):
        raise bad(f"quality entry {entry['label']}", "both" if pilot else "neither", "one of lr and pilot")
    if pilot is not None:
        steps = pilot["steps"]
        own = {
            "purpose": "pilot",
            "steps": steps,
            "eval_every": steps,
            "warmup": min(scalars.get("warmup", Run.warmup), steps // 10),
        }
        pilots = [Run(**scalars | axes | own | {"seed": seeds[0], "lr": float(lr)}) for lr in pilot["lr"]]
        plan.pilots |= {one.name: one for one in pilots}
        scalars |= {"lr": None, "pilots": tuple(one.name for one in pilots)}
    timed = entry.get("timing", False)
    first = Run(
        **scalars | axes | {"seed": seeds[0], "trace_tokens": entry.get("trace_tokens", 0), "keep_weights": timed}
    )
    rest = [replace(first, seed=seed, trace_tokens=0, keep_weights=False) for seed in seeds[1:]]
    finals = {one.name: one for one in (first, *rest)}
    plan.finals |= finals
    if timed:
        plan.timing[first.name] = list(finals)


def _check(router: str, network: str, top_k: int) -> None:
    """Raise `UserError` for a router or a network that is not there, or that cannot choose `top_k`."""
    if router == DENSE:
        return
    zoo = importlib.import_module("moe_routing_bench.routers.zoo")
    rule = zoo.ZOO[pick("quality router", router, [*zoo.ZOO, DENSE])]
    pick("quality network", network, zoo.NETWORKS)
    if rule.top_k is None and top_k < rule.least_top_k:
        raise bad(f"quality top_k for router {router}", top_k, f"at least {rule.least_top_k}")
