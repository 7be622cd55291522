"""What this machine has for a measurement: instructions of its CPU, and memory. No torch."""

import importlib
import math
from pathlib import Path

from moe_routing_bench.measure import gpus
from moe_routing_bench.store import platforms


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
