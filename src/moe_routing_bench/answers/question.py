"""A question in the words of a user as the values of axes that a cell must be near to."""

import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from moe_routing_bench.answers.nearest import FAMILIES, formats_of, of_ranks
from moe_routing_bench.benches.registry import BENCHES
from moe_routing_bench.config import axes, expand, presets
from moe_routing_bench.config.axes import AXES, PRESET
from moe_routing_bench.store import paths
from moe_routing_bench.store.project_files import own_or_shipped
from moe_routing_kernels.errors import bad, near, pick
from moe_routing_kernels.formats import weights

PLATFORM = "nvidia-h200"
TRAINING = "training"
_WHOLE = "model"  # the bench whose cells are of one model: sizes do not say all


@dataclass(frozen=True)
class Question:
    """A question: `benches` in the order in which they may answer, and `values` of axes; an axis without a value may have any.

    `given` are the values that the user gave. `unsupported` says why a model cannot be measured.
    """

    model: str | None
    benches: tuple[str, ...]
    values: Mapping[str, Any]
    given: Mapping[str, Any]
    implementations: tuple[str, ...] = ()
    unsupported: str = ""
    ignored: list[str] = field(default_factory=list)

    def of(self, bench: str) -> Mapping[str, Any]:
        """The values that a cell of a bench is compared with: of one tensor-parallel rank, as rows have them. Raises `UserError`."""
        found = dict(self.values) | ({"model": self.model} if bench == _WHOLE and self.model else {})
        return found | (expand.shard(found) if {"tp", "ep"} & set(self.given) else {})

    def shard(self) -> dict[str, str | None] | None:
        """What rows measure of a question about `tp` or `ep`, and what a model alone says, with the command that runs the model."""
        ranks = {name: self.given[name] for name in ("tp", "ep") if self.given.get(name, 1) > 1}
        if not ranks:
            return None
        (name, number), *more = ranks.items()
        ranks_said = f"{' x '.join(map(str, ranks.values()))} ranks" + ("" if more else f" ({name} {number})")
        command = None
        if self.model and not more:
            parts = ["moe-routing-bench", "scale", self.model, "--gpus", str(number), f"--{name}", str(number)]
            parts += ["--tokens", str(-(-self.given["tokens"] // number))] if "tokens" in self.given else []
            parts += ["--weights", formats_of(self.given["weights"])[0]] if "weights" in self.given else []
            command = shlex.join(parts)
        return {
            "measured": f"one of {ranks_said} on one GPU, without what ranks send to each other",
            "modelled": "the whole layer with what ranks send to each other" if command else None,
            "command": command,
            "over_ranks": f"Layers over {number} GPUs with their exchange: --ranks {number} instead of --ep {number}"
            if list(ranks) == ["ep"]
            else None,
        }

    def unread(self, bench: str) -> list[str]:
        """The formats and ranks that the user gave and a bench does not read."""
        names = [name for name in self.given if AXES[name].part == "format" or of_ranks(name)]
        return [name for name in names if name not in _read(bench)]

    def to_measure(self, bench: str) -> dict[str, Any]:
        """The values of axes of the cell that would answer, as `measure` takes them: sizes in place of a model that is altered."""
        found = dict(self.given)
        if self.model and not set(PRESET) & set(self.given):
            found["model"] = self.model
        elif self.model:
            found = {name: self.values[name] for name in PRESET if name in self.values} | found
        if "weights" in found:
            found["weights"] = formats_of(found["weights"])[0]
        return {name: value for name, value in found.items() if name in _read(bench) or name == "model"}


def _read(bench: str) -> set[str]:
    return {axis.name for axis in axes.of(BENCHES[bench].axes)}


def asked(
    model: str | None,
    bench: str | None,
    implementations: tuple[str, ...],
    models: str | Path | None,
    given: Mapping[str, Any],
) -> Question:
    """The question in these arguments of `ask`. Raises `UserError` for an unknown name and a value out of bounds."""
    given = {name: _value(name, value) for name, value in given.items() if value is not None}
    sizes, unsupported = _preset(model, models) if model is not None else ({}, "")
    training = given.get("phase") == TRAINING
    if training:
        del given["phase"]
    chosen = _benches(bench, given, training)
    read = set().union(*map(_read, chosen))
    formats = ("weights",) if "intermediate" in read else ()  # experts that do not read it have weights of their dtype
    ignored = [name for name in given if name not in (*read, *formats) and not of_ranks(name)]
    values = {"dtype": AXES["dtype"].default, "skew": 0.0, "capacity_factor": None, "trace": None}
    values |= {name: None for name, axis in AXES.items() if axis.sparse} | sizes
    values |= given
    values |= {name: values["dtype"] for name in ("weights", "packed") if not {"weights", "packed"} & set(given)}
    values.setdefault("weights", values["dtype"])
    return Question(model, chosen, values, given, implementations, unsupported, ignored)


def _value(name: str, value: Any) -> Any:
    """A value of an axis. Raises `UserError`."""
    axis = AXES[pick("axis", name, AXES)]
    if name == "phase":
        return pick("phase", value, (*axis.choices, TRAINING))
    if name == "weights":
        known = (*FAMILIES, *weights.NAMES)
        return value if formats_of(value) else pick("weights", value, known)
    if axis.choices and not axis.also:
        return pick(name, value, axis.choices)
    if axis.kind is str:
        return value
    least = axis.least if axis.above is None else axis.above
    assert least is not None
    if isinstance(value, bool) or not isinstance(value, int | axis.kind) or value < least or value == axis.above:
        raise bad(
            name,
            value,
            f"a number {'above' if axis.least is None else 'from'} {least:g}{'' if axis.least is None else ' on'}",
        )
    return axis.kind(value)


def _preset(model: str, own: str | Path | None) -> tuple[dict[str, Any], str]:
    """What a model sets, and why it cannot be measured. Raises `UserError` for an unknown one."""
    known = presets.load(own_or_shipped(paths.MODELS), own)
    if model not in known:
        hint = (
            f"{near(model, list(known)) + '; ' if near(model, list(known)) else ''}`--models FILE` adds presets of your own, `moe-routing-bench preset CONFIG.JSON` "
            "writes one, and --hidden, --intermediate, --experts and --top-k say the sizes without one"
        )
        raise bad("model", model, f"a preset of config/models.yaml ({len(known)})", hint)
    found = {name: value for name, value in presets.values(known[model]).items() if value is not None}
    return found, known[model].unsupported


def _benches(bench: str | None, given: Mapping[str, Any], training: bool) -> tuple[str, ...]:
    if bench is not None:
        return (pick("bench", bench, BENCHES),)
    if training:
        return (f"ep_{TRAINING}" if "ranks" in given else TRAINING,)
    if "ranks" in given:  # whole layers before what they consist of
        over = [name for name, one in BENCHES.items() if "ranks" in one.axes and name != f"ep_{TRAINING}"]
        return tuple(reversed(over))
    return ("layer", "experts") if not {"tp", "ep"} & set(given) else ("layer",)
