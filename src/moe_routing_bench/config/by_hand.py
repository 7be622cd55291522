"""Cells that options or arguments ask for, in place of a config file."""

import contextlib
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from moe_routing_bench.benches.registry import BENCHES, benches_of
from moe_routing_bench.config.axes import AXES
from moe_routing_bench.config.expand import config_of, expand
from moe_routing_bench.config.load import load
from moe_routing_bench.grid.cell import ISOLATE, Job, Settings
from moe_routing_kernels.errors import UserError, pick

_KEY = re.compile(
    rf"^(?:config\.(?:grid\[0\]\.|measure\.)?(\w+)(?:\[\d+\])?|(?:grid )?({'|'.join(AXES)}|implementations))(?=:)"
)


def jobs(
    bench: str,
    implementations: Sequence[str] | None,
    values: Mapping[str, Any],
    settings: Mapping[str, Any],
    plugins: Sequence[str],
    models: Mapping[str, Any],
    isolate: str = ISOLATE[0],
) -> list[Job]:
    """A job for each cell of a bench with these values of axes: of an axis of lists one value, or a list of several.

    An axis that is not given has its typical value, where it has one; a model gives its own. Without names, all implementations of the
    bench take part, those of `plugins` among them. `models` are those of `presets.load`. `isolate` says which run in
    processes of their own. Raises `UserError`.
    """
    for name in values:
        pick("axis", name, AXES)
    lists = {name: value for name, value in values.items() if isinstance(value, list | tuple)}
    given = {name: value for name, value in (_typical(values) | dict(values)).items() if name not in lists}
    asked = config_of(pick("bench", bench, BENCHES), given)
    asked["grid"][0] |= {name: list(value) for name, value in lists.items()}
    if plugins:
        asked["plugins"] = list(plugins)
    if isolate != ISOLATE[0]:
        asked["isolate"] = isolate
    if implementations is not None:
        known = [implementation.name for implementation in benches_of(plugins)[bench].implementations]
        asked["grid"][0]["implementations"] = [pick("implementations", name, known) for name in implementations]
    least = settings.get("min_blocks", Settings.min_blocks)
    most = {"max_blocks": max(least, Settings.max_blocks)} if isinstance(least, int) else {}
    asked["measure"] = most | dict(settings)
    return expand(load(asked), models)


def _typical(values: Mapping[str, Any]) -> dict[str, Any]:
    """Typical values of axes that have no default, but those that a model gives; the sampler that a trace is for."""
    modelled = values.get("model") is not None
    typical = {axis.name: axis.typical for axis in AXES.values() if axis.typical is not None}
    typical = {name: value for name, value in typical.items() if not (modelled and AXES[name].preset)}
    return typical | ({"sampler": "trace"} if values.get("trace") is not None else {})


@contextlib.contextmanager
def called(form: Callable[[str], str]) -> Iterator[None]:
    """Raise a `UserError` about a key of the config, or an axis of a cell, with what the user called it: `form` of its name."""
    try:
        yield
    except UserError as error:
        raise UserError(_KEY.sub(lambda key: form(key[1] or key[2]), str(error))) from None
