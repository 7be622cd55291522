"""What there is: benches, implementations, routers and presets, and whether this machine can measure them."""

import importlib
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import typer
from rich.table import Table

from moe_routing_bench.benches.bench import Bench, Peer
from moe_routing_bench.benches.plugins import Plugin
from moe_routing_bench.benches.registry import BENCHES
from moe_routing_bench.cli.asked import jobs_of, models, references
from moe_routing_bench.cli.options import Models, Platform, Plugins
from moe_routing_bench.cli.printing import show
from moe_routing_bench.config import axes, presets
from moe_routing_bench.config.load import load
from moe_routing_bench.config.plugins import benches_of
from moe_routing_bench.store import paths, platforms
from moe_routing_bench.store.shipped import to_install
from moe_routing_kernels.errors import UserError, one_line
from moe_routing_kernels.formats.weights import WEIGHTS
from moe_routing_kernels.routers import ROUTERS


def list_(platform: Platform = None, plugin: Plugins = None, own: Models = None) -> None:
    """List benches with their implementations, routers, formats of weights and model presets, and say what is not available and why."""
    platform = platform or platforms.current()
    show(_implementations(platform, benches_of(references(plugin))), _routers(), _weights(), _presets(models(own)))


def doctor(plugin: Plugins = None) -> None:
    """Check what this machine has: versions, GPU, packages, plugins and the default config. Exit status 1 if a check fails."""
    checks = [*_checks(), *_check_plugins(references(plugin))]
    table = Table("check", "", "found", box=None)
    for what, fine, found in checks:
        table.add_row(what, {True: "ok", False: "FAIL", None: "-"}[fine], found)
    show(table)
    print(_able(platforms.current()))
    raise typer.Exit(int(any(fine is False for _, fine, _ in checks)))


def _able(platform: str) -> str:
    """How many of our implementations have here what they need, and what the others lack."""
    known = [one for bench in BENCHES.values() for one in bench.implementations]
    able = sum(not platforms.missing(one.requires, platform, one.peer) for one in known)
    lacking = "an NVIDIA GPU, and some a package" if platform == platforms.CPU else "a package"
    return f"{able} of {len(known)} implementations can be measured here; the others need {lacking}; `moe-routing-bench list` says which"


def _implementations(platform: str, benches: Mapping[str, Bench]) -> Table:
    table = Table("bench", "implementation", f"on {platform}", title="Benches", title_justify="left", box=None)
    for bench in benches.values():
        table.add_row(bench.name, "", bench.summary)
        for one in bench.implementations:
            note = " (baseline)" if one.name == bench.baseline else ""
            if isinstance(one, Plugin):
                note = f" ({one.reference})"
            table.add_row("", one.name + note, _missing(one.requires, platform, one.peer) or "available")
    return table


def _missing(requires: tuple[str, ...], platform: str, peer: Peer | None = None) -> str | None:
    """What is not there, as `platforms.missing` says it, with how to install it here."""
    reason = platforms.missing(requires, platform, peer)
    return reason and to_install(reason)


def _routers() -> Table:
    table = Table("router", "", title="\nRouters", title_justify="left", box=None)
    for router in ROUTERS.values():
        table.add_row(router.name, router.summary)
    return table


def _weights() -> Table:
    """Bits of a weight with its share of scales and zero points, in matrices of 4096 x 4096 beside bf16 activations."""
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


def _checks() -> list[tuple[str, bool | None, str]]:
    """(what, fine, found) of every check; fine is None for something optional that is not there."""
    python = f"{sys.version_info.major}.{sys.version_info.minor}"
    gpu = platforms.gpu_name()
    checks: list[tuple[str, bool | None, str]] = [
        ("python", (3, 11) <= sys.version_info[:2] < (3, 14), python),
        _check_torch(gpu),
        ("gpu", True if gpu else None, gpu or "none: measuring on the CPU"),
        ("platform", True, platforms.current()),
    ]
    for need in ("triton", "cutlass", "compiler"):
        reason = _missing((need,), platforms.current())
        checks.append((need, None if reason else True, reason or "available"))
    peers = {one.peer for bench in BENCHES.values() for one in bench.implementations if one.peer}
    for peer in sorted(peers, key=lambda peer: peer.module):
        reason = _missing((), platforms.current(), peer)
        checks.append((peer.module, None if reason else True, reason or "available"))
    return [
        *checks,
        _check_config(),
        ("writable", os.access(Path.cwd(), os.W_OK), "results and reports go below the working directory"),
    ]


def _check_torch(gpu: str | None) -> tuple[str, bool, str]:
    try:
        torch = importlib.import_module("torch")
    except ImportError as error:
        return "torch", False, f"{error}; run `make install`"
    cuda = torch.version.cuda
    if gpu and not cuda:
        return "torch", False, f"{torch.__version__} is a CPU build, but there is a {gpu}"
    return "torch", True, f"{torch.__version__}, {f'CUDA {cuda}' if cuda else 'CPU build'}"


def _check_plugins(asked: list[str]) -> list[tuple[str, bool | None, str]]:
    """Whether the declarations of plugins can be read and taken together, and the modules of each be imported."""
    try:
        benches = benches_of(asked)
    except UserError as error:
        return [("plugin", False, str(error))]
    return [
        _check_plugin(one) for bench in benches.values() for one in bench.implementations if isinstance(one, Plugin)
    ]


def _check_plugin(one: Plugin) -> tuple[str, bool | None, str]:
    """Whether its modules can be imported; not asked where it says itself that they need what is not installed."""
    needs = tuple(name for name in one.requires if name != "cuda")  # what imports without a GPU, too
    if reason := _missing(needs, platforms.current(), one.peer):
        return "plugin", None, f"{one.reference}: {reason}"
    try:
        for module in one.own_modules():
            importlib.import_module(module)
    except Exception as error:  # whatever a module raises
        return "plugin", False, one_line(f"{one.reference}: {error}")
    return "plugin", True, f"{one.reference}: {one.name} of {one.bench}, {one.version() or 'not installed'}"


def _check_config() -> tuple[str, bool | None, str]:
    if not paths.CONFIG.exists():
        return "config", None, f"no {paths.CONFIG} here; `moe-routing-bench init FOLDER` makes a folder with one"
    try:
        jobs = jobs_of(load(paths.CONFIG))
    except UserError as error:
        return "config", False, str(error)
    return "config", True, f"{paths.CONFIG}: {len(jobs)} cells"
