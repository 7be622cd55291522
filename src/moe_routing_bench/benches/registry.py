"""All benches, in the order of the report, and with the plugins that a config names, checked against the tables."""

import functools
from collections.abc import Iterable, Mapping
from types import MappingProxyType

from moe_routing_bench.benches import plugins
from moe_routing_bench.benches.bench import Bench, find
from moe_routing_bench.benches.plugins import Plugin
from moe_routing_kernels.errors import bad, pick
from moe_routing_kernels.implementations import NEEDS
from moe_routing_kernels.permute import LAYOUTS

OPERATIONS = (
    "gate",
    "router",
    "permute",
    "pack",
    "experts",
    "combine",
    "dispatch",
    "ep_combine",
    "ep_pair",
    "ep_exchange",
    "ep_layer",
    "ep_training",
    "routing",
    "layer",
    "training",
    "model",
)
BENCHES: Mapping[str, Bench] = MappingProxyType({name: find(name) for name in OPERATIONS})


def benches_of(references: Iterable[str]) -> Mapping[str, Bench]:
    """The benches by name, in the order of the report, with the plugins of these references after their own implementations.

    Raises `UserError` for a plugin that cannot be read, or that no bench can take.
    """
    return _benches(tuple(references))


@functools.cache
def _benches(references: tuple[str, ...]) -> Mapping[str, Bench]:
    others = plugins.by_bench(references)
    if not others:
        return BENCHES
    for bench, added in others.items():
        names = {
            implementation.name: bench
            for implementation in BENCHES[pick("bench of a plugin", bench, BENCHES)].implementations
        }
        for plugin in added:
            _check(plugin, names)
            names[plugin.name] = plugin.reference
    try:
        extended = {name: find(name, others) for name in BENCHES}
    except ValueError as error:
        raise bad("parts of a plugin", str(error), "stages of its bench, each once") from error
    for plugin in (plugin for added in others.values() for plugin in added):
        _check_parts(plugin, extended)
    return extended


def _check(plugin: Plugin, names: Mapping[str, str]) -> None:
    """Raise `UserError` for a name that is no name or among `names`, whose values say whose they are, and for unknown requirements."""
    where = f"plugin {plugin.reference}"
    if not plugin.name.isidentifier():
        raise bad(f"name of {where}", plugin.name, "letters, digits and underscores")
    if plugin.name in names:
        raise bad(
            f"name of {where}", plugin.name, "a new name", f"{names[plugin.name]} has an implementation of this name"
        )
    for need in plugin.requires:
        pick(f"requires of {where}", need, NEEDS)
    stages = BENCHES[plugin.bench].stages
    if stages and not plugin.parts:
        raise bad(f"parts of {where}", "none", f"a way for some of {', '.join(stage.name for stage in stages)}")
    if stages:
        pick(f"layout of {where}", plugin.layout, LAYOUTS)


def _check_parts(plugin: Plugin, benches: Mapping[str, Bench]) -> None:
    """Raise `UserError` for a part of one stage that is no implementation of the stage's bench."""
    for stage in benches[plugin.bench].stages:
        known = [each.name for each in benches[stage.bench].implementations]
        if stage.name in plugin.parts:
            pick(f"part {stage.name} of plugin {plugin.reference}", plugin.parts[stage.name], known)
