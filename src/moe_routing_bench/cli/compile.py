"""Kernels that are compiled ahead of a measurement."""

import importlib
import time
from collections.abc import Mapping
from typing import Annotated, Any

import typer
from rich.progress import track

from moe_routing_bench.benches.plugins import bench_of
from moe_routing_bench.cli.accuracy import BENCH, default_cells
from moe_routing_bench.cli.options import ConfigJson, Configs, Models
from moe_routing_bench.cli.printing import progress_console
from moe_routing_bench.config.load import on
from moe_routing_bench.store import platforms
from moe_routing_bench.store.project_files import to_install
from moe_routing_bench.study import effective, jobs_of
from moe_routing_bench.study import models as own
from moe_routing_kernels.errors import NoForm, bad, pick

_GPU = "gpu"  # any platform but the CPU's: where kernels run, a config's part for CPUs is not what counts


def compile_(
    arch: Annotated[str, typer.Option(help="Such as sm_80, sm_90a, sm_100a [default: this machine's GPU]")] = "",
    config: Configs = None,
    config_json: ConfigJson = None,
    model: Annotated[
        list[str] | None,
        typer.Option(
            help="A model preset: all that `ops.layer` may choose for it, in place of a config's cells",
            show_default=False,
        ),
    ] = None,
    models: Models = None,
    tokens: Annotated[int, typer.Option(help="With --model: for 1 to so many tokens")] = 16384,
    training: Annotated[bool, typer.Option("--training", help="With --model: also the backward pass")] = False,
) -> None:
    """Compile the CuTe DSL kernels of a config's cells, and of its accuracy matrix, or of a model, into the kernel cache; needs no GPU when --arch is given."""
    if model:
        _prepare(model, own(models), arch, tokens, training)
        return
    settings = on(effective(config, config_json), _GPU)
    pairs = [(bench_of(job), name, job.cell) for job in jobs_of(settings) for name in job.implementations]
    if settings.get("accuracy"):
        pairs += [
            (BENCH, implementation.name, cell) for cell in default_cells() for implementation in BENCH.implementations
        ]
    if not arch and platforms.current() == platforms.CPU:
        raise bad("--arch", "none", "an architecture", "there is no GPU here to take it from: pass --arch sm_90a")
    if reason := platforms.missing(("cutlass",), platforms.current()):
        raise bad("compile", to_install(reason), "nvidia-cutlass-dsl installed")
    if arch:
        pick("--arch", arch, importlib.import_module("cutlass.base_dsl.enums").Arch.__members__)
    cache, target = (importlib.import_module(f"moe_routing_kernels.{name}") for name in ("cute.cache", "target"))
    compiled_for = target.Target.named(arch) if arch else target.Target.here()
    known = len(cache.objects())
    without: dict[str, set[str]] = {}
    for bench, name, cell in track(pairs, f"compiling for {compiled_for.arch}", console=progress_console()):
        try:
            bench.precompile(name, cell, compiled_for)
        except NoForm:
            without.setdefault(bench.name, set()).add(name)
    print(f"{len(cache.objects())} kernels in {cache.folder()}, {len(cache.objects()) - known} of them new")
    if without:
        listed = "; ".join(f"{bench}: {', '.join(sorted(names))}" for bench, names in without.items())
        print(f"no form for {compiled_for.arch}: {listed}")


def _prepare(names: list[str], presets: Mapping[str, Any], arch: str, tokens: int, training: bool) -> None:
    """Compile what the operators may choose for models, one after the other, each side by side."""
    for name in names:
        if reason := presets[pick("--model", name, presets)].unsupported:
            raise bad("--model", name, "a preset that can be measured", reason)
    ops = importlib.import_module("moe_routing_kernels.ops")
    for name in names:
        preset, start = presets[name], time.monotonic()
        sizes = {size: getattr(preset, size) for size in ("hidden", "intermediate", "experts", "top_k", "activation")}
        count = ops.prepare(
            **sizes,
            rule=preset.router,
            scale=preset.routed_scale,
            most_tokens=tokens,
            training=training,
            arch=arch or None,
        )
        print(f"{name}: {count} kernels compiled in {time.monotonic() - start:.1f} s, the others were in the cache")
