"""Model presets: the shapes of published models' MoE layers, as config/models.yaml has them."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

from moe_routing_bench.config import schema
from moe_routing_bench.config.axes import AXES, PRESET, SHARED
from moe_routing_bench.config.load import read_mapping
from moe_routing_bench.fields import Choice, file_name
from moe_routing_bench.grid.cell import Amount, Count, Whole
from moe_routing_kernels.errors import bad
from moe_routing_kernels.formats.weights import WEIGHTS
from moe_routing_kernels.routers import scaled
from moe_routing_kernels.shared_experts import GATES


class Recorded(schema.Strict):
    """What a preset says besides the axes that it always sets; of this, only what is of shared experts is measured, where asked for."""

    layers: Count | None = None
    shared_experts: Whole = 0
    shared_intermediate: Count | None = None  # of all shared experts together
    shared_gate: Annotated[str, Choice(GATES)] | None = None
    routed_scale: Amount | None = None  # on the weights of the experts; None: that of the router's rule
    weights: Annotated[str, Choice(tuple(WEIGHTS), "`moe-routing-bench list` prints")] | None = (
        None  # of the checkpoint
    )
    note: str = ""
    source: str = ""
    unsupported: str = ""  # why it cannot be measured


Preset = schema.model("Preset", Recorded, **{name: (AXES[name].type | None, None) for name in PRESET})


def load(path: str | Path, own: str | Path | None = None) -> dict[str, Any]:
    """The presets of a file by name, and those of a user's own file.

    Raises `UserError` for a preset that neither has all of its axes nor says why not, and for a name that is in both files.
    """
    presets = _load(path)
    more = _load(own) if own and os.path.realpath(own) != os.path.realpath(path) else {}
    if clashing := [name for name in more if name in presets]:
        raise bad(f"model in {own}", clashing[0], "a new name", f"{path} has a preset of this name")
    return presets | more


def _load(path: str | Path) -> dict[str, Any]:
    presets = {}
    for name, fields in read_mapping(Path(path)).items():
        where = f"model {name} in {path}"
        file_name(f"name of a model in {path}", name if isinstance(name, str) else repr(name))
        preset = schema.validated(Preset, fields, where)
        missing = [axis for axis in PRESET if getattr(preset, axis) is None]
        if missing and not preset.unsupported:
            raise bad(where, f"no {missing[0]}", ", ".join(PRESET), "or state why: 'unsupported: …'")
        presets[name] = preset
    return presets


def values(preset: Any, shared: bool = False) -> Mapping[str, Any]:
    """The axes that a preset sets, with their values; `shared`: also those of its shared experts."""
    values = {name: getattr(preset, name) for name in (PRESET + SHARED if shared else PRESET)}
    return values | {"router": preset.router and scaled(preset.router, preset.routed_scale)}
