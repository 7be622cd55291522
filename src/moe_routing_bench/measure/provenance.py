"""Where a number comes from: machine, GPU state, versions, source. Reads, never changes, card settings."""

import functools
import importlib.metadata
import os
import platform
import re
import shlex
import socket
import subprocess
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from time import perf_counter

from moe_routing_bench.packages import COMMIT
from moe_routing_kernels.errors import one_line

PACKAGE = Path(__file__).resolve().parents[1]


def version(distribution: str) -> str | None:
    """Version of an installed distribution, or None."""
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def git_state(files: Callable[[], Iterable[Path]]) -> dict[str, object]:
    """Commit and whether the tree differs from it; outside a checkout what `COMMIT` says, ``<sha>`` or ``<sha>-dirty``, or nothing.

    What `COMMIT` says need not be believed: a row's code fingerprint is that of the files that ran, and a test compares it with that of
    the commit. Only `files`, which are what is measured with, count as a difference; they are asked for where something of the packages
    differs.
    """
    why = None
    try:
        sha, differs = _checkout(PACKAGE.parent)
        in_checkout = (PACKAGE.parents[1] / ".git").exists() and not differs
        if in_checkout or _git(
            "ls-files", "--", str(PACKAGE)
        ):  # else the checkout is of another project, and holds this package
            return {"git_sha": sha, "git_dirty": differs and _checkout(*files())[1]}
    except (OSError, subprocess.SubprocessError) as error:
        why = getattr(error, "stderr", None) or str(error)
    if named := re.fullmatch(r"([0-9a-f]{40})(-dirty)?", os.environ.get(COMMIT, "")):
        return {"git_sha": named[1], "git_dirty": bool(named[2])}
    if why and (root := next((folder for folder in PACKAGE.parents if (folder / ".git").exists()), None)):
        _warn_of_no_commit(root, why.strip().partition("\n")[0])
    return {}


def _checkout(*paths: Path) -> tuple[str, bool]:
    """The commit of the checkout of this package, and whether one of `paths` differs from it. Raises `OSError` and `subprocess.SubprocessError`."""
    lines = _git("status", "--porcelain=v2", "--branch", "--no-ahead-behind", "--", *map(str, paths)).splitlines()
    commit = next((line.split()[-1] for line in lines if line.startswith("# branch.oid ")), "")
    if not re.fullmatch("[0-9a-f]{40,64}", commit):
        raise OSError(f"there is no commit: git says {commit!r}")
    return commit, any(not line.startswith("#") for line in lines)


def _git(*words: str) -> str:
    """What git prints in the checkout of this package. Raises `OSError` and `subprocess.SubprocessError`."""
    return subprocess.run(
        ["git", "-C", str(PACKAGE), *words],
        capture_output=True,
        encoding="utf-8",
        errors="replace",
        timeout=10,
        check=True,
    ).stdout.strip()


@functools.cache
def _warn_of_no_commit(root: Path, why: str) -> None:
    """Say on stderr, once in a process, why rows of a checkout do not name their commit."""
    remedy = f"name the commit in {COMMIT}, or let `git -C {shlex.quote(str(root))} status` work"
    if "dubious ownership" in why:
        remedy = f"`git config --global --add safe.directory {shlex.quote(str(root))}`"
    print(one_line(f"warning: rows have no git_sha, so they cannot be published: {why}; {remedy}"), file=sys.stderr)


def cpu_model() -> str:
    """The processor's own name."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
        return next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or "unknown"


def versions() -> dict[str, object]:
    """Versions of what a measurement runs on, as plain texts, because to unpickle torch's own type imports torch. Imports torch itself."""
    import torch

    return {
        "python_version": platform.python_version(),
        "torch_version": str(torch.__version__),
        "cuda_version": torch.version.cuda,
        "triton_version": version("triton"),
        "cutlass_dsl_version": version("nvidia-cutlass-dsl"),
        "host": socket.gethostname(),
        "cpu_model": cpu_model(),
        "cpu_threads": torch.get_num_threads(),
    }


class Gpu:
    """NVML readings of the GPU that torch calls device 0. Every reading is None where NVML has no answer."""

    def __init__(self) -> None:
        """Open NVML and find the device by its UUID, which CUDA_VISIBLE_DEVICES does not renumber."""
        import pynvml
        import torch

        self._nvml = pynvml
        pynvml.nvmlInit()
        uuid = str(torch.cuda.get_device_properties(0).uuid)
        self.uuid = uuid if uuid.startswith("GPU-") else f"GPU-{uuid}"
        self._handle = pynvml.nvmlDeviceGetHandleByUUID(self.uuid)
        self.own_pids = {os.getpid()}
        self._others: set[int] = set()
        self._watched = float("-inf")

    def _ask(self, name: str, *arguments: object) -> object:
        try:
            return getattr(self._nvml, name)(self._handle, *arguments)
        except self._nvml.NVMLError:
            return None

    def sm_clock_mhz(self) -> int | None:
        """Current clock of the multiprocessors."""
        return self._ask("nvmlDeviceGetClockInfo", self._nvml.NVML_CLOCK_SM)  # type: ignore[return-value]

    def power_w(self) -> float | None:
        """Current draw of the board, watts."""
        power = self._ask("nvmlDeviceGetPowerUsage")
        return power / 1000 if isinstance(power, int) else None

    def energy_mj(self) -> int | None:
        """What the board has drawn since its driver was loaded, millijoules."""
        return self._ask("nvmlDeviceGetTotalEnergyConsumption")  # type: ignore[return-value]

    def power_capped(self) -> bool:
        """Whether the power limit holds the clock down at this moment."""
        return bool(self._reasons() & 0x4)

    def slowdown_bits(self) -> int:
        """Throttle reasons that mean the hardware slowed itself: heat, power brake, hardware slowdown."""
        return self._reasons() & (0x8 | 0x20 | 0x40 | 0x80)

    def _reasons(self) -> int:
        return int(self._ask("nvmlDeviceGetCurrentClocksEventReasons") or 0)  # type: ignore[call-overload]

    def watch(self, seconds: float = 0.1) -> None:
        """Note which processes use the GPU and are none of `own`, unless that was noted less than so many seconds ago."""
        if perf_counter() - self._watched >= seconds:
            self._watched = perf_counter()
            processes = self._ask("nvmlDeviceGetComputeRunningProcesses") or []
            self._others |= {process.pid for process in processes} - self.own_pids  # type: ignore[attr-defined]

    def state(self) -> dict[str, object]:
        """Row fields: name, driver, clocks, power limit, temperature, throttle bits, other processes so far."""
        power = self._ask("nvmlDeviceGetPowerManagementLimit")
        self.watch(0.0)
        driver = self._nvml.nvmlSystemGetDriverVersion()
        name = self._ask("nvmlDeviceGetName")
        return {
            "gpu_name": name.decode() if isinstance(name, bytes) else name,
            "gpu_uuid": self.uuid,
            "driver": driver.decode() if isinstance(driver, bytes) else driver,
            "sm_clock_mhz": self.sm_clock_mhz(),
            "memory_clock_mhz": self._ask("nvmlDeviceGetClockInfo", self._nvml.NVML_CLOCK_MEM),
            "power_limit_w": power / 1000 if isinstance(power, int) else None,
            "throttle_bits": self.slowdown_bits(),
            "temperature_c": self._ask("nvmlDeviceGetTemperature", self._nvml.NVML_TEMPERATURE_GPU),
            "other_gpu_processes": len(self._others),
        }
