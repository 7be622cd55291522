"""Kernels that are compiled ahead of a measurement."""

import importlib
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import track

from moe_routing_bench.benches.plugins import bench_of
from moe_routing_bench.cli.asked import effective, jobs_of
from moe_routing_bench.cli.options import ConfigJson, Configs
from moe_routing_bench.cli.quantising import BENCH, default_cells
from moe_routing_bench.config.load import on
from moe_routing_bench.errors import bad, pick
from moe_routing_bench.store import platforms
from moe_routing_bench.store.shipped import to_install

_GPU = "gpu"  # any platform but the CPU's: where kernels run, a config's part for CPUs is not what counts


def compile_(
    arch: Annotated[str, typer.Option(help="Such as sm_80, sm_90a, sm_100a [default: this machine's GPU]")] = "",
    config: Configs = None, config_json: ConfigJson = None,
) -> None:  # fmt: skip
    """Compile the CuTe DSL kernels of a config's cells, and of its accuracy matrix, into the kernel cache; needs no GPU when --arch is given."""
    settings = on(effective(config, config_json), _GPU)
    pairs = [(bench_of(job), name, job.cell) for job in jobs_of(settings) for name in job.implementations]
    if settings.get("accuracy"):
        pairs += [(BENCH, one.name, cell) for cell in default_cells() for one in BENCH.implementations]
    if not arch and platforms.current() == platforms.CPU:
        raise bad("--arch", "none", "an architecture", "there is no GPU here to take it from: pass --arch sm_90a")
    if reason := platforms.missing(("cutlass",), platforms.current()):
        raise bad("compile", to_install(reason), "nvidia-cutlass-dsl installed")
    if arch:
        pick("--arch", arch, importlib.import_module("cutlass.base_dsl.enums").Arch.__members__)
    compilation, cache = (
        importlib.import_module(f"moe_routing_bench.kernels.cute.{name}") for name in ("compilation", "cache")
    )
    arch, known = arch or compilation.current_arch(), len(cache.objects())
    for bench, name, cell in track(pairs, f"compiling for {arch}", console=Console(stderr=True)):
        bench.precompile(name, cell, arch)
    print(f"{len(cache.objects())} kernels in {cache.folder()}, {len(cache.objects()) - known} of them new")
