"""Entries of the sections `quality` and `perft`: fields of the specs of runs and adaptations, some of them as lists."""

from collections.abc import Iterable
from dataclasses import MISSING, fields
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

from annotated_types import Ge, Le, Lt, MinLen
from pydantic import Field

from moe_routing_bench.config import axes
from moe_routing_bench.config.schema import field, model
from moe_routing_bench.fields import Choice, Distinct, OrNone, words
from moe_routing_bench.grid.cell import Amount, Count, Seed
from moe_routing_bench.grid.run_spec import AXES, BUILT_IN, DENSE, SCHEDULE, Adaptation, Run
from moe_routing_kernels.routers.zoo import NETWORKS, ZOO

_ALL = "all"
_RULE = "|".join(ZOO)  # joined by ``+``: those of the first layers, the last of which has all further ones
_OF_PLAN = {"purpose", "pilots", "keep_weights", "lr_source"}  # fields of a run that the plan decides
_VALUE = "true, false, a finite number or a short text"
_LABEL = "lower-case letters, digits and underscores, part of every file name"
# What is more is a slip, and would be found when the memory is full, or never.
_MOST = {
    "layers": 1000,
    "heads": 2**12,
    "dim": 2**16,
    "sequence": 2**20,
    "batch": 2**20,
    "lr": 1000,
    "weight_decay": 1000,
    "rank": 2**16,
    "adapters": 2**16,
    "expert_hidden": axes.AXES["intermediate"].most,
    **{name: axes.AXES[name].most for name in ("experts", "top_k", "capacity_factor")},
}


def _bounded(kind: Any, most: float = 2**31 - 1) -> Any:
    """The type with an upper bound on its numbers, where it has none."""
    origin, inner = get_origin(kind), get_args(kind)
    if kind in (int, float) or (
        origin is Annotated and inner[0] in (int, float) and not any(isinstance(m, Le | Lt) for m in inner[1:])
    ):
        return Annotated[kind, Le(most)]
    return Union[tuple(_bounded(part, most) for part in inner)] if origin in (Union, UnionType) else kind  # noqa: UP007


_BYTES = _bounded(Count, 2**50)
_CORPORA = (
    f"a mapping from {', '.join(BUILT_IN)} or a path to the most bytes to take of it ({words(_BYTES)}, or {_ALL})"
)
# In a config, where it is another type than in a spec.
_TYPES: dict[str, Any] = {
    "router": Annotated[str, Choice((*ZOO, DENSE), "docs/routers.md has", also=f"(?:{_RULE})(?:[+](?:{_RULE}))+")],
    "network": Annotated[str, Choice(NETWORKS)],
    "capacity_factor": Amount | OrNone,
    "corpora": Annotated[
        dict[str, Annotated[_BYTES | Literal[_ALL], Field(description=f"{words(_BYTES)}, or {_ALL}")]], MinLen(1)
    ],
    "label": Annotated[str, Field(pattern="^[a-z0-9_]+$")],
    "lr": Amount,
    "options": dict[
        Annotated[str, Field(pattern="^[a-z_][a-z0-9_]*$")],
        Annotated[
            bool | Annotated[int, Ge(-(2**31)), Le(2**31 - 1)] | float | Annotated[str, Field(max_length=200)],
            Field(description=_VALUE),
        ],
    ],
}
_WORDS = {"corpora": _CORPORA, "label": _LABEL, "options": f"a mapping of options of the routers, each {_VALUE}"}

Pilot = model(
    "Pilot",
    lr=field(Annotated[list[_bounded(Amount, _MOST["lr"])], Distinct()], "the rates to try", required=True),
    steps=field(_bounded(Count), "length of each trial", required=True),
    seed=field(Annotated[list[_bounded(Seed)], Distinct()], "the seeds of each trial", None),
)
_PILOT = field(Pilot, description="a mapping with 'lr', the rates to try, and 'steps', the length of each trial")


def _fields(
    spec: type, names: Iterable[str], lists: Iterable[str], required: Iterable[str], derived: Iterable[str] = ()
) -> dict[str, tuple[Any, Any]]:
    """The fields of an entry that are fields of a spec. The default of a `derived` one is not the spec's."""
    types = get_type_hints(spec, include_extras=True) | _TYPES
    types = {name: _bounded(kind, _MOST.get(name, 2**31 - 1)) for name, kind in types.items()}
    defaults = {item.name: item.default for item in fields(spec) if item.default is not MISSING}
    fields_of_spec = {}
    for name in names:
        several, default = name in lists, None if name in (*required, *derived) else defaults.get(name)
        fields_of_spec[name] = field(
            Annotated[list[types[name]], Distinct()] if several else types[name],
            default=[default] if several and default is not None else default,
            required=name in required,
            description=_WORDS.get(name, ""),
        )
    return fields_of_spec


_RUN = [item.name for item in fields(Run) if item.name not in _OF_PLAN]
_REQUIRED = ("label", "router", "seed", "corpora")
TrainingEntry = model(
    "TrainingEntry",
    **_fields(Run, _RUN, (*AXES, "seed"), _REQUIRED, ("lr", "eval_every")),
    pilot=_PILOT,
    lr_of=field(
        Annotated[str, Field(pattern="^[a-z0-9]+(-[a-z0-9]+)*$")],
        "the `run` of a study of learning rates, whose best by rule and size is taken; `lr` where it has none",
        None,
    ),
    timing=field(bool, "whether the step of the first run is timed by stage, with the GPU to itself", False),
)

_ADAPTED = [name for name in _RUN if name in ("label", "corpora", *SCHEDULE)]
_OWN = [item.name for item in fields(Adaptation) if item.name not in ("run", "base")]
AdaptationEntry = model(
    "AdaptationEntry",
    base=field(str, required=True, description="the label of a quality entry"),
    **_fields(Adaptation, _OWN, ("variant", "rank"), ("variant", "rank")),
    **_fields(Run, _ADAPTED, (), ("label", "corpora", "steps"), SCHEDULE),
    pilot=_PILOT,
)
