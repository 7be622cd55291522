"""Which device this machine measures on, and its slug. Imports neither torch nor CUDA, so that Snakemake can ask."""

import functools
import importlib.util
import os
import re
import shutil

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
    import pynvml

    pynvml.nvmlInit()
    by_index = pynvml.nvmlDeviceGetHandleByIndex
    handle = by_index(int(gpu)) if gpu.isdigit() else pynvml.nvmlDeviceGetHandleByUUID(gpu)
    name = pynvml.nvmlDeviceGetName(handle)
    return name.decode() if isinstance(name, bytes) else name


def slug(name: str | None) -> str:
    """Folder name of a device: ``NVIDIA H200`` is ``nvidia-h200``, no GPU is ``cpu``."""
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-") if name else CPU


def current() -> str:
    """The platform slug of this machine."""
    return slug(gpu_name())


_PACKAGES = {"triton": "triton", "cutlass": "cutlass", "quack": "quack"}
_INSTALL = {
    "triton": "pip install triton",
    "cutlass": "pip install 'nvidia-cutlass-dsl[cu13]'",
    "quack": "pip install -e '.[peers]'",
}


def missing(requires: tuple[str, ...], platform: str) -> str | None:
    """Why an implementation's requirements are not met on `platform`, with what to install, or None."""
    for need in requires:
        if need == "cuda" and platform == CPU:
            return "needs an NVIDIA GPU, this platform is cpu"
        if need == "compiler" and platform == CPU and not _cxx():
            return "torch.compile needs a C++ compiler on a CPU; install g++"
        if need == "compiler" and platform != CPU and not _importable("triton"):
            return "torch.compile needs triton on a GPU; pip install triton"
        if need in _PACKAGES and not _importable(_PACKAGES[need]):
            return f"{_PACKAGES[need]} is not installed; {_INSTALL[need]}"
    return None


@functools.cache
def _importable(package: str) -> bool:
    return importlib.util.find_spec(package) is not None


def _cxx() -> str | None:
    return shutil.which(os.environ.get("CXX", "g++")) or shutil.which("c++")
