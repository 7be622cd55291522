"""Which device this machine measures on, and its slug. Imports neither torch nor CUDA, so that Snakemake can ask."""

import functools
import importlib.util
import os
import re
import shutil
import sys
from typing import Any

from moe_routing_bench.packages import INSTALL
from moe_routing_kernels.errors import bad
from moe_routing_kernels.implementations import NVIDIA

CPU = "cpu"


@functools.cache
def gpu_name() -> str | None:
    """Name of the first NVIDIA GPU that this process may use, or None. MOE_ROUTING_BENCH_DEVICE=cpu hides it."""
    if os.environ.get("MOE_ROUTING_BENCH_DEVICE") == CPU or os.environ.get("CUDA_VISIBLE_DEVICES") == "":
        return None
    try:
        return name_of(os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0])
    except Exception:  # NVML raises its own errors, or the library is absent: either way there is no GPU to use
        return None


def name_of(gpu: str) -> str:
    """Name of a GPU by its index or UUID, as CUDA_VISIBLE_DEVICES has them. Raises NVML's errors."""
    return _asked("nvmlDeviceGetName", gpu)


def uuid_of(gpu: str) -> str:
    """UUID of a GPU by its index or UUID. Raises NVML's errors."""
    return _asked("nvmlDeviceGetUUID", gpu)


def _asked(what: str, gpu: str) -> str:
    """A text that NVML knows of a GPU."""
    import pynvml

    pynvml.nvmlInit()
    by_index = pynvml.nvmlDeviceGetHandleByIndex
    handle = by_index(int(gpu)) if gpu.isdigit() else pynvml.nvmlDeviceGetHandleByUUID(gpu)
    text = getattr(pynvml, what)(handle)
    return text.decode() if isinstance(text, bytes) else text


def slug(name: str | None) -> str:
    """Folder name of a device: ``NVIDIA H200`` is ``nvidia-h200``, no GPU is ``cpu``."""
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-") if name else CPU


def current() -> str:
    """The platform slug of this machine."""
    return slug(gpu_name())


def verify(asked: str) -> None:
    """Raise `UserError` where results of a platform, or of a named run on it, are asked for and this machine is another."""
    platform, here = asked.partition(".")[0], current()
    if here != platform:
        hint = "ask for that GPU (--gpus, gres, constraint), or name the platform that this machine is"
        raise bad("platform", here, platform, hint)


_TORCH = f"torch is not installed; {INSTALL}"
_INSTALL = dict.fromkeys(("triton", "cutlass"), "pip install -e '.[gpu]'")


def missing(requires: tuple[str, ...], platform: str, peer: Any = None) -> str | None:
    """Why an implementation's requirements, and the package of its `peer`, are not met on `platform`, or None.

    The text says what to install. Every implementation needs torch.
    """
    for need in requires:
        if need == "gpu" and platform == CPU:
            return "needs a GPU, this platform is cpu"
        if need in NVIDIA and platform == CPU:  # every other platform is one, as NVML has named it
            return "needs an NVIDIA GPU, this platform is cpu"
        if need == "compiler" and platform == CPU and not _cxx():
            return "torch.compile needs a C++ compiler on a CPU; install g++"
        if need == "compiler" and platform != CPU and not _importable("triton"):
            return f"torch.compile needs triton on a GPU; {_INSTALL['triton']}"
        if need in _INSTALL and not _importable(need):
            return f"{need} is not installed; {_INSTALL[need]}"
    if peer is not None and not _importable(peer.module):
        return f"{peer.module} is not installed; {peer.install}"
    return None if _importable("torch") else _TORCH


@functools.cache
def _importable(package: str) -> bool:
    return importlib.util.find_spec(package) is not None


def _cxx() -> str | None:
    return shutil.which(os.environ.get("CXX", "g++")) or shutil.which("c++")


def prepare_jobs(device: str) -> None:
    """Set what child processes inherit: this interpreter is found as `python`, and device cpu hides the GPU.

    By name, so that no path of a machine is part of what decides whether a cell is measured again.
    """
    os.environ["PATH"] = os.path.dirname(sys.executable) + os.pathsep + os.environ.get("PATH", "")
    hide_gpu(device)


def hide_gpu(device: str) -> None:
    """Leave the GPU out of sight of this process and its children when the config's device is cpu."""
    if device == CPU:
        os.environ["MOE_ROUTING_BENCH_DEVICE"] = CPU
        gpu_name.cache_clear()
