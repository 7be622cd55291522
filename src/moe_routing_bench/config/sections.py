"""What a config may say: one pydantic model of its sections, built from the axes, the settings and the specs of training.

``python -m moe_routing_bench.config.sections`` writes the model's JSON schema to workflow/schemas, for editors and readers.
"""

import json
from dataclasses import fields
from pathlib import Path
from typing import Annotated, Any, get_type_hints

import yaml
from annotated_types import Le, MinLen
from pydantic import Field

from moe_routing_bench.benches.registry import BENCHES
from moe_routing_bench.config.axes import AXES, Axis
from moe_routing_bench.config.schema import field, json_schema, model
from moe_routing_bench.config.training_sections import AdaptationEntry, TrainingEntry
from moe_routing_bench.fields import Choice, Distinct, title
from moe_routing_bench.grid.cell import ISOLATE, Settings
from moe_routing_kernels import declarations
from moe_routing_kernels.errors import writing

NAME = r"^[a-z0-9]+(-[a-z0-9]+)*$"
SCHEMA = Path("workflow/schemas/config.schema.yaml")
_HEAD = "# Written by `python -m moe_routing_bench.config.sections`, from the axes, the settings and the specs of training.\n"
_LISTED = "`moe-routing-bench list` prints"
# Of settings: more is a slip, and would be found after hours, or when the memory is full.
_MOST = {
    "check_seeds": 1000,
    "warmup_ms": 3.6e6,
    "settle_blocks": 10_000,
    "interval_us": 1e8,
    "samples_per_block": 100_000,
    "min_blocks": 1_000_000,
    "max_blocks": 1_000_000,
    "target_half_width": 1.0,
    "max_seconds": 86_400.0,
    "turn_seconds": 3600.0,
    "wall_calls": 1_000_000,
    "cpu_threads": 4096,
    "timeout": 86_400.0,
    "set_limit": 1_000_000,
    "set_bytes": 1e13,
}
_IMPLEMENTATIONS = Annotated[
    list[str], Distinct()
]  # `expand` checks them: plugins, which the config names, add to the tables
DEFAULTS: dict[str, Any] = {
    **{axis.name: axis.default for axis in AXES.values() if axis.scope == "config"},
    "device": "auto",
    "measure": {},
}


def _names(known: Any) -> Any:
    return Annotated[list[Annotated[str, Choice(tuple(known), _LISTED)]], Distinct()]


def _axis(axis: Axis) -> tuple[Any, Any]:
    summary = f"{axis.summary}{f' ({axis.unit})' if axis.unit else ''}"
    default = [axis.default] if axis.scope == "list" and axis.default is not None else axis.default
    return field(axis.entry_type, summary, default)


def _axes(*scopes: str) -> dict[str, tuple[Any, Any]]:
    return {axis.name: _axis(axis) for axis in AXES.values() if axis.scope in scopes}


def _settings() -> dict[str, tuple[Any, Any]]:
    hints = get_type_hints(Settings, include_extras=True)
    types = {setting.name: Annotated[hints[setting.name], Le(_MOST[setting.name])] for setting in fields(Settings)}
    return {
        setting.name: field(types[setting.name], title(types[setting.name]), setting.default)
        for setting in fields(Settings)
    }


GridEntry = model(
    "GridEntry",
    benches=field(_names(BENCHES), required=True),
    implementations=field(_IMPLEMENTATIONS, "each bench takes those that it has, without this all"),
    twins=field(
        _IMPLEMENTATIONS, "implementations that are measured twice in each cell, to see how far equals are apart"
    ),
    shared_experts=field(bool, "whether the layers of a model have its shared experts", False),
    **_axes("list", "scalar"),
)
Measure = model("Measure", **_settings())


def _section(entry: Any, each: str, required: bool = False) -> tuple[Any, Any]:
    described = Annotated[entry, Field(description="a mapping with " + _keys(entry))]
    return field(
        Annotated[list[described], MinLen(1)], required=required, description=f"a list of entries; each {each}"
    )


def _keys(entry: Any) -> str:
    """The keys that an entry must have."""
    *first, last = [repr(name) for name, required in entry.model_fields.items() if required.is_required()]
    return f"{', '.join(first)} and {last}" if first else last


_MEASURE = field(Measure, description="a mapping of settings of the measurement")
_GRID = _section(GridEntry, "is the product of its axes for each of its benches", required=True)
OnCpu = model("OnCpu", measure=_MEASURE, grid=_GRID)
Config = model(
    "Config",
    **_axes("config"),
    run=field(
        Annotated[str, Field(pattern=NAME)],
        description="lower-case letters, digits and dashes: the name of a run that has results and report of its own",
    ),
    device=field(
        Annotated[str, Choice(("auto", "cpu"))],
        default="auto",
        description="auto (the first NVIDIA GPU, else the CPU) or cpu",
    ),
    platform=field(
        Annotated[str, Field(pattern=NAME)],
        description="cpu, or the name of a GPU in lower-case letters, digits and dashes, such as nvidia-h200",
    ),
    share=field(
        Annotated[str, Field(pattern=r"^[1-9][0-9]{0,3}/[1-9][0-9]{0,3}$")],
        description="I/N, such as 1/4: the part of the jobs that this run measures, without collecting them",
    ),
    plugins=field(
        Annotated[list[Annotated[str, Field(pattern=f"^{declarations.REFERENCE}$")]], Distinct()],
        "implementations of other packages, which are measured with those of this one",
        description="a non-empty list, without repetition, of package.module or package.module:NAME",
    ),
    isolate=field(
        Annotated[str, Choice(ISOLATE)],
        "implementations that run in processes of their own: those of other packages, or all",
        ISOLATE[0],
    ),
    models=field(
        str, "a file of model presets, in addition to those of the project", description="the path of a YAML file"
    ),
    measure=_MEASURE,
    grid=_GRID,
    profile=field(bool, "whether one call of each implementation is profiled in each cell of `layer`", False),
    accuracy=field(bool, "whether the accuracy of quantised weights is in the report", False),
    cpu=field(
        OnCpu, description="a mapping with 'grid' and, at will, 'measure', which stand in for the config's on a CPU"
    ),
    quality=_section(TrainingEntry, "trains a language model with each router, config and seed"),
    perft=_section(AdaptationEntry, "adapts the runs of a quality entry to other text"),
)


def text() -> str:
    """The JSON schema of a config, as YAML."""
    document = {"$schema": "https://json-schema.org/draft/2020-12/schema"} | json_schema(Config)
    document |= {"title": "Configuration of moe-routing-bench"}
    copy = json.loads(json.dumps(document))  # equal parts as copies: YAML would make references of them
    return _HEAD + yaml.safe_dump(copy, sort_keys=False, width=120, allow_unicode=True)


if __name__ == "__main__":
    with writing(SCHEMA):
        SCHEMA.write_text(text(), encoding="utf-8")
    print(f"wrote {SCHEMA}")
