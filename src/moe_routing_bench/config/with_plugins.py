"""All benches with the plugins that a config names, checked against the tables."""

import functools
from collections.abc import Iterable, Mapping

from moe_routing_bench.benches import plugins
from moe_routing_bench.benches.bench import Bench, find
from moe_routing_bench.benches.plugins import Plugin
from moe_routing_bench.benches.registry import BENCHES
from moe_routing_kernels.errors import bad, pick
from moe_routing_kernels.implementations import NEEDS
from moe_routing_kernels.permute.layout import LAYOUTS


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
        names = {one.name: bench for one in BENCHES[pick("bench of a plugin", bench, BENCHES)].implementations}
        for one in added:
            _check(one, names)
            names[one.name] = one.reference
    try:
        extended = {name: find(name, others) for name in BENCHES}
    except ValueError as error:
        raise bad("parts of a plugin", str(error), "stages of its bench, each once") from error
    for one in (one for added in others.values() for one in added):
        _check_parts(one, extended)
    return extended


def _check(one: Plugin, names: Mapping[str, str]) -> None:
    """Raise `UserError` for a name that is no name or among `names`, whose values say whose they are, and for unknown requirements."""
    where = f"plugin {one.reference}"
    if not one.name.isidentifier():
        raise bad(f"name of {where}", one.name, "letters, digits and underscores")
    if one.name in names:
        raise bad(f"name of {where}", one.name, "a new name", f"{names[one.name]} has an implementation of this name")
    for need in one.requires:
        pick(f"requires of {where}", need, NEEDS)
    stages = BENCHES[one.bench].stages
    if stages and not one.parts:
        raise bad(f"parts of {where}", "none", f"a way for some of {', '.join(stage.name for stage in stages)}")
    if stages:
        pick(f"layout of {where}", one.layout, LAYOUTS)


def _check_parts(one: Plugin, benches: Mapping[str, Bench]) -> None:
    """Raise `UserError` for a part of one stage that is no implementation of the stage's bench."""
    for stage in benches[one.bench].stages:
        known = [each.name for each in benches[stage.bench].implementations]
        if stage.name in one.parts:
            pick(f"part {stage.name} of plugin {one.reference}", one.parts[stage.name], known)
