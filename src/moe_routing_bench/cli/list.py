"""What there is to name: `list`, benches with their implementations, routers, formats of weights and model presets, and `columns` of a row."""

from collections.abc import Mapping
from typing import Annotated, Any

import typer
from rich.table import Table

from moe_routing_bench.benches.bench import Bench, Peer
from moe_routing_bench.benches.plugins import Plugin
from moe_routing_bench.benches.registry import benches_of
from moe_routing_bench.cli.options import Models, Platform, Plugins
from moe_routing_bench.cli.printing import show
from moe_routing_bench.config import axes, presets
from moe_routing_bench.store import platforms
from moe_routing_bench.store.project_files import to_install
from moe_routing_bench.study import models, references
from moe_routing_kernels.errors import bad
from moe_routing_kernels.formats.weights import WEIGHTS
from moe_routing_kernels.routers import ROUTERS


def list_(platform: Platform = None, plugin: Plugins = None, own: Models = None) -> None:
    """List benches with their implementations, routers, formats of weights and model presets, and say what is not available and why."""
    platform = platform or platforms.current()
    show(_implementations(platform, benches_of(references(plugin))), _routers(), _weights(), _presets(models(own)))


def _implementations(platform: str, benches: Mapping[str, Bench]) -> Table:
    table = Table("bench", "implementation", f"on {platform}", title="Benches", title_justify="left", box=None)
    for bench in benches.values():
        table.add_row(bench.name, "", bench.summary)
        for implementation in bench.implementations:
            note = " (baseline)" if implementation.name == bench.baseline else ""
            if isinstance(implementation, Plugin):
                note = f" ({implementation.reference})"
            table.add_row(
                "",
                implementation.name + note,
                missing_here(implementation.requires, platform, implementation.peer) or "available",
            )
    return table


def missing_here(requires: tuple[str, ...], platform: str, peer: Peer | None = None) -> str | None:
    """What is not there, as `platforms.missing` says it, with how to install it here."""
    reason = platforms.missing(requires, platform, peer)
    return reason and to_install(reason)


def _routers() -> Table:
    table = Table("router", "", title="\nRouters", title_justify="left", box=None)
    for router in ROUTERS.values():
        table.add_row(router.name, router.summary)
    return table


def _weights() -> Table:
    """Bits of a weight with its share of scales and zero points, in matrices of 4096 x 4096 with bf16 activations."""
    table = Table("weights", "bits", title="\nQuantised weights", title_justify="left", box=None)
    for form in WEIGHTS.values():
        table.add_row(form.name, f"{form.bytes_of(4096, 4096, 'bf16') * 8 / 4096**2:.4g}")
    return table


def _presets(models: Mapping[str, Any]) -> Table:
    table = Table("model", *axes.PRESET, title="\nModel presets", title_justify="left", box=None)
    for name, preset in models.items():
        *sizes, router = (str(value) for value in presets.values(preset).values())
        table.add_row(name, *sizes, f"unsupported: {preset.unsupported}" if preset.unsupported else router)
    return table


def columns(
    text: Annotated[
        str | None, typer.Argument(help="Show only columns with this text in the name or the meaning")
    ] = None,
) -> None:
    """List the columns of a row, axes included, with unit and meaning."""
    from moe_routing_bench.store.records import COLUMNS, about  # with Arrow, which `list` does not need

    shown = Table("column", "unit", "contents", box=None)
    for name in COLUMNS:
        meaning = about()[name]
        if text is None or text.lower() in f"{name} {meaning.meaning}".lower():
            shown.add_row(name, meaning.unit, meaning.meaning)
    if not shown.row_count:
        raise bad("TEXT", text, "a text in the name or the meaning of a column")
    show(shown)
