"""`doctor`: whether this machine can measure: versions, GPU, packages, plugins and the default config; and what it has for a measurement,
instructions of its CPU and memory.
"""

import importlib
import math
import os
import sys
from pathlib import Path

import typer
from rich.table import Table

from moe_routing_bench.benches.plugins import Plugin
from moe_routing_bench.benches.registry import BENCHES, benches_of
from moe_routing_bench.cli.list import missing_here
from moe_routing_bench.cli.options import Plugins
from moe_routing_bench.cli.printing import show
from moe_routing_bench.config.load import load
from moe_routing_bench.measure import gpus
from moe_routing_bench.packages import INSTALL
from moe_routing_bench.store import paths, platforms
from moe_routing_bench.store.project_files import to_install
from moe_routing_bench.study import jobs_of, references
from moe_routing_kernels.errors import UserError, one_line
from moe_routing_kernels.implementations import NVIDIA


def doctor(plugin: Plugins = None) -> None:
    """Check what this machine has: versions, GPU, packages, plugins and the default config. Exit status 1 if a check fails."""
    checks = [*_checks(), *_check_plugins(references(plugin))]
    table = Table("check", "", "found", box=None)
    for what, fine, state in checks:
        table.add_row(what, {True: "ok", False: "FAIL", None: "-"}[fine], state)
    show(table)
    print(_able(platforms.current()))
    raise typer.Exit(int(any(fine is False for _, fine, _ in checks)))


def _able(platform: str) -> str:
    """How many of our implementations have here what they need, and what the others lack."""
    known = [implementation for bench in BENCHES.values() for implementation in bench.implementations]
    able = sum(
        not platforms.missing(implementation.requires, platform, implementation.peer) for implementation in known
    )
    lacking = "an NVIDIA GPU, and some a package" if platform == platforms.CPU else "a package"
    return f"{able} of {len(known)} implementations can be measured here; the others need {lacking}; `moe-routing-bench list` says which"


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
        reason = missing_here((need,), platforms.current())
        checks.append((need, None if reason else True, reason or "available"))
    peers = {
        implementation.peer
        for bench in BENCHES.values()
        for implementation in bench.implementations
        if implementation.peer
    }
    for peer in sorted(peers, key=lambda peer: peer.module):
        reason = missing_here((), platforms.current(), peer)
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
        return "torch", False, f"{error}; {to_install(INSTALL)}"
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
        _check_plugin(plugin)
        for bench in benches.values()
        for plugin in bench.implementations
        if isinstance(plugin, Plugin)
    ]


def _check_plugin(plugin: Plugin) -> tuple[str, bool | None, str]:
    """Whether its modules can be imported; not asked where it says itself that they need what is not installed."""
    needs = tuple(name for name in plugin.requires if name not in ("gpu", *NVIDIA))  # what imports without a GPU, too
    if reason := missing_here(needs, platforms.current(), plugin.peer):
        return "plugin", None, f"{plugin.reference}: {reason}"
    try:
        for module in plugin.own_modules():
            importlib.import_module(module)
    except Exception as error:  # whatever a module raises
        return "plugin", False, one_line(f"{plugin.reference}: {error}")
    return "plugin", True, f"{plugin.reference}: {plugin.name} of {plugin.bench}, {plugin.version() or 'not installed'}"


def _check_config() -> tuple[str, bool | None, str]:
    if not paths.CONFIG.exists():
        return "config", None, f"no {paths.CONFIG} here; `moe-routing-bench init FOLDER` makes a folder with one"
    try:
        jobs = jobs_of(load(paths.CONFIG))
    except UserError as error:
        return "config", False, str(error)
    return "config", True, f"{paths.CONFIG}: {len(jobs)} cells"


def cpu_flags(source: Path = Path("/proc/cpuinfo")) -> set[str]:
    """What the first core of this machine has, as Linux names it; nothing where it does not say."""
    try:
        lines = source.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return set()
    return next((set(line.split(":", 1)[1].split()) for line in lines if line.startswith(("flags", "Features"))), set())


def available(platform: str) -> float:
    """Bytes of memory that a measurement may take: of the GPU all, else what is free within the limits of the control group."""
    if platform != platforms.CPU:
        return _of_gpu()
    free = [math.inf]
    meminfo = _numbers(Path("/proc/meminfo"))
    if "MemAvailable:" in meminfo:
        free.append(1024 * meminfo["MemAvailable:"])
    for most, used in (
        ("memory.max", "memory.current"),
        ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes"),
    ):
        limit, taken = (_number(Path("/sys/fs/cgroup", name)) for name in (most, used))
        if limit is not None and taken is not None:
            free.append(limit - taken)
    return min(free)


def _numbers(source: Path) -> dict[str, int]:
    try:
        words = [line.split() for line in source.read_text(encoding="ascii").splitlines()]
    except OSError:
        return {}
    return {first: int(second) for first, second, *_ in words}


def _number(source: Path) -> int | None:
    """The number in a file; None where there is no file, or a word in it."""
    try:
        return int(source.read_text(encoding="ascii"))
    except (OSError, ValueError):
        return None


def _of_gpu() -> float:
    """Bytes of the first GPU that this process may use; infinite where NVML does not say."""
    try:
        pynvml = importlib.import_module("pynvml")
        pynvml.nvmlInit()
        first = gpus.visible()[0]
        by_index, by_uuid = pynvml.nvmlDeviceGetHandleByIndex, pynvml.nvmlDeviceGetHandleByUUID
        return float(pynvml.nvmlDeviceGetMemoryInfo(by_index(int(first)) if first.isdigit() else by_uuid(first)).total)
    except Exception:  # NVML raises its own errors
        return math.inf
