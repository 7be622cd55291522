"""What a row says of the machine, on a card whose NVML is simulated: units, missing answers, and other processes."""

import importlib.metadata
import os
import platform
import socket
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from moe_routing_bench import packages
from moe_routing_bench.benches.bench import Bench
from moe_routing_bench.measure import completion, gpus, provenance, server
from moe_routing_bench.store import platforms

STATE = {
    "gpu_name": "NVIDIA H200",
    "gpu_uuid": "GPU-12",
    "driver": "570.1",
    "sm_clock_mhz": 1980,
    "memory_clock_mhz": 3201,
    "power_limit_w": 700.5,
    "throttle_bits": 0x28,
    "temperature_c": 41,
    "other_gpu_processes": 2,
}


class Nvml:
    """A card as NVML shows it: milliwatts, bits, texts that may be bytes, and errors for what it does not know."""

    NVMLError = type("NVMLError", (Exception,), {})
    NVML_CLOCK_SM, NVML_CLOCK_MEM, NVML_TEMPERATURE_GPU = 1, 2, 0

    def __init__(self, unknown: tuple[str, ...] = (), texts=str) -> None:
        self.unknown, self.texts, self.started = unknown, texts, 0

    def nvmlInit(self) -> None:
        self.started += 1

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> str:
        assert self.started, "NVML was not opened"
        return {"GPU-12": "the card"}[uuid]

    def nvmlSystemGetDriverVersion(self):
        return self.texts("570.1")

    def __getattr__(self, name: str):
        answers = {
            "nvmlDeviceGetName": {(): self.texts("NVIDIA H200")},
            "nvmlDeviceGetClockInfo": {(1,): 1980, (2,): 3201},
            "nvmlDeviceGetPowerUsage": {(): 345_600},
            "nvmlDeviceGetPowerManagementLimit": {(): 700_500},
            "nvmlDeviceGetTotalEnergyConsumption": {(): 8_123_456},
            "nvmlDeviceGetTemperature": {(0,): 41},
            "nvmlDeviceGetCurrentClocksEventReasons": {(): 0x4 | 0x8 | 0x20},
            "nvmlDeviceGetComputeRunningProcesses": {(): [SimpleNamespace(pid=pid) for pid in (1, 2, os.getpid())]},
        }[name]

        def ask(handle: str, *given: int):
            assert handle == "the card"
            if name in self.unknown:
                raise self.NVMLError
            return answers[given]

        return ask


def card(monkeypatch: pytest.MonkeyPatch, uuid: str = "12", **nvml) -> provenance.Gpu:
    one = Nvml(**nvml)
    monkeypatch.setitem(sys.modules, "pynvml", one)
    known = {0: SimpleNamespace(uuid=uuid)}
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: known[device])
    return provenance.Gpu()


@pytest.mark.parametrize(("uuid", "texts"), [("12", str), ("GPU-12", str.encode)])
def test_the_state_of_a_card(uuid, texts, monkeypatch) -> None:
    """torch says a UUID with or without its prefix, NVML its texts as bytes or not; this process is none of the others."""
    gpu = card(monkeypatch, uuid, texts=texts)
    assert gpu.state() == STATE and gpu.uuid == "GPU-12"
    assert (gpu.sm_clock_mhz(), gpu.power_w(), gpu.power_capped(), gpu.slowdown_bits()) == (1980, 345.6, True, 0x28)
    assert gpu.energy_mj() == 8_123_456


def test_what_nvml_does_not_know_is_missing(monkeypatch) -> None:
    """A reading is None then; no bits are set, and nobody else is there."""
    names = (
        "Name",
        "ClockInfo",
        "PowerUsage",
        "PowerManagementLimit",
        "Temperature",
        "TotalEnergyConsumption",
        "CurrentClocksEventReasons",
        "ComputeRunningProcesses",
    )
    gpu = card(monkeypatch, unknown=tuple(f"nvmlDeviceGet{name}" for name in names))
    assert gpu.state() == dict.fromkeys(STATE) | {
        "gpu_uuid": "GPU-12",
        "driver": "570.1",
        "throttle_bits": 0,
        "other_gpu_processes": 0,
    }
    assert (gpu.sm_clock_mhz(), gpu.power_w(), gpu.power_capped(), gpu.slowdown_bits()) == (None, None, False, 0)
    assert gpu.energy_mj() is None


def test_versions() -> None:
    found = provenance.versions()
    assert found == {
        "python_version": platform.python_version(),
        "torch_version": torch.__version__,
        "cuda_version": torch.version.cuda,
        "triton_version": importlib.metadata.version("triton"),
        "cutlass_dsl_version": importlib.metadata.version("nvidia-cutlass-dsl"),
        "host": socket.gethostname(),
        "cpu_model": provenance.cpu_model(),
        "cpu_threads": torch.get_num_threads(),
    }
    assert {type(one) for one in found.values()} <= {str, int, type(None)}, (
        "who unpickles torch's own type of version imports torch"
    )
    assert provenance.version("no-such-distribution") is None


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("processor : 0\nmodel name\t: A CPU: @ 3 GHz \nmodel name\t: B\n", "A CPU: @ 3 GHz"),
        ("processor : 0\n", "arch"),
        (None, "arch"),
    ],
)
def test_the_processor_s_own_name(text, name, monkeypatch) -> None:
    """Of the first one; else what Python knows."""

    def read(path: Path, **_: str) -> str:
        assert str(path) == "/proc/cpuinfo"
        if text is None:
            raise FileNotFoundError
        return text

    monkeypatch.setattr(Path, "read_text", read)
    monkeypatch.setattr(platform, "processor", lambda: "arch")
    assert provenance.cpu_model() == name
    monkeypatch.setattr(platform, "processor", lambda: "")
    assert provenance.cpu_model() == (name if name != "arch" else "unknown")


SHA = "0123456789abcdef" * 2 + "01234567"


def test_the_commit_of_a_checkout(tmp_path, monkeypatch) -> None:
    """Dirty where what it measures with differs, also in a new file; not where results do."""
    package = tmp_path / "src"
    package.mkdir()
    (package / "a.py").write_text("a")

    def git(*words):
        return subprocess.run(
            ["git", "-C", str(tmp_path), "-c", "user.name=n", "-c", "user.email=e", *words],
            check=True,
            capture_output=True,
            text=True,
        ).stdout

    git("init", "-q"), git("add", "."), git("commit", "-qm", "a")
    monkeypatch.setattr(provenance, "PACKAGE", package)
    monkeypatch.setenv(provenance.COMMIT, SHA)
    clean = {"git_sha": git("rev-parse", "HEAD").strip(), "git_dirty": False}
    assert provenance.git_state(lambda: pytest.fail("nothing differs")) == clean
    (tmp_path / "results").write_text("rows")
    (package / "other.py").write_text("b")
    assert provenance.git_state(lambda: [package / "a.py"]) == clean
    assert provenance.git_state(lambda: [package / "a.py", package / "other.py"])["git_dirty"] is True
    (package / "a.py").write_text("c")
    assert provenance.git_state(lambda: [package / "a.py"])["git_dirty"] is True


@pytest.mark.parametrize("ignored", [True, False])
def test_the_commit_of_another_project_is_not_ours(ignored, tmp_path, monkeypatch) -> None:
    """An environment lies in the checkout of a user's own project, ignored or not."""
    package = tmp_path / ".venv/lib/package"
    package.mkdir(parents=True)
    (package / "a.py").write_text("a")
    (tmp_path / ".gitignore").write_text(".venv" * ignored)
    for words in (["init", "-q"], ["add", ".gitignore"], ["commit", "-qm", "a"]):
        subprocess.run(
            ["git", "-C", str(tmp_path), "-c", "user.name=n", "-c", "user.email=e", *words],
            check=True,
        )
    monkeypatch.setattr(provenance, "PACKAGE", package)
    monkeypatch.delenv(provenance.COMMIT, raising=False)
    assert provenance.git_state(lambda: [package / "a.py"]) == {}
    monkeypatch.setenv(provenance.COMMIT, SHA)
    assert provenance.git_state(lambda: [package / "a.py"]) == {"git_sha": SHA, "git_dirty": False}


@pytest.mark.parametrize(
    ("said", "found"),
    [
        (SHA, {"git_sha": SHA, "git_dirty": False}),
        (SHA + "-dirty", {"git_sha": SHA, "git_dirty": True}),
        (SHA[1:], {}),
        ("", {}),
        (None, {}),
    ],
)
def test_outside_a_checkout_the_commit_is_what_was_said(said, found, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(provenance, "PACKAGE", tmp_path)
    monkeypatch.delenv(provenance.COMMIT, raising=False)
    if said is not None:
        monkeypatch.setenv(provenance.COMMIT, said)
    assert provenance.git_state(list) == found


REFUSAL = "fatal: detected dubious ownership in repository at '/a'"


@pytest.mark.fault("git refuses")
@pytest.mark.parametrize(
    ("git", "reason", "remedy"),
    [
        (f'#!/bin/sh\necho "{REFUSAL}\nTo add an exception" >&2\nexit 128\n', REFUSAL, "--add safe.directory"),
        (
            f"#!/bin/sh\necho '# branch.oid {SHA}'\necho bad index >&2\nexit 128\n",
            "bad index",
            provenance.COMMIT,
        ),
        (None, "'git'", provenance.COMMIT),
    ],
)
def test_a_checkout_without_a_commit_is_said_once(git, reason, remedy, tmp_path, monkeypatch, capsys) -> None:
    """Of another user, with a broken index, and on a machine without git."""
    (tmp_path / "bin").mkdir()
    (tmp_path / ".git").mkdir()
    if git:
        (tmp_path / "bin/git").write_text(git)
        (tmp_path / "bin/git").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    monkeypatch.setattr(provenance, "PACKAGE", tmp_path / "src")
    monkeypatch.delenv(provenance.COMMIT, raising=False)
    (tmp_path / "src").mkdir()
    assert provenance.git_state(list) == provenance.git_state(lambda: [tmp_path / "a.py"]) == {}
    out, error = capsys.readouterr()
    assert not out and error.count("\n") == 1 and error.startswith("warning: ")
    assert reason in error and remedy in error and len(error) <= 501


@pytest.mark.parametrize("error", [OSError("no git"), subprocess.TimeoutExpired("git", 10)])
def test_without_git_there_is_no_commit(error, monkeypatch) -> None:
    """It is given ten seconds."""

    def run(words, *, timeout, **_):
        assert timeout == 10
        raise error

    monkeypatch.setattr(subprocess, "run", run)
    monkeypatch.setenv(provenance.COMMIT, SHA)
    assert provenance.git_state(list) == {"git_sha": SHA, "git_dirty": False}


@pytest.mark.parametrize(
    ("named", "found"), [(None, ["0", "2"]), ("2,1", ["2"]), ("GPU-a,0", ["GPU-a", "0"]), ("1", [])]
)
def test_gpus_that_this_process_may_use(named, found, monkeypatch) -> None:
    """Those of the platform: card 1 is another kind."""
    kinds = {"0": "NVIDIA H200", "1": "NVIDIA A100", "2": "NVIDIA H200", "GPU-a": "NVIDIA H200"}
    nvml = SimpleNamespace(nvmlInit=lambda: None, nvmlDeviceGetCount=lambda: 3)
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    monkeypatch.setattr(platforms, "current", lambda: "nvidia-h200")
    monkeypatch.setattr(platforms, "name_of", kinds.__getitem__)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if named is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", named)
    assert gpus.visible() == found
    monkeypatch.setattr(platforms, "current", lambda: platforms.CPU)
    assert gpus.visible() == []


@pytest.mark.parametrize("before", [None, "3"])
@pytest.mark.parametrize("alone", [True, False])
def test_a_reserved_gpu_is_the_only_one_in_sight(alone, before, tmp_path, monkeypatch) -> None:
    """Until it is given back, also where the job fails; the lock file is that of the card."""
    monkeypatch.setattr(gpus, "FOLDER", tmp_path)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if before is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", before)

    def job() -> None:
        with gpus.reserved(alone, ["7"], identify="card{}".format) as gpu:
            assert gpu == os.environ["CUDA_VISIBLE_DEVICES"] == "7"
            assert [one.name for one in tmp_path.iterdir()] == ["moe-routing-bench-card7.lock"]
            raise RuntimeError("the job failed")

    with pytest.raises(RuntimeError, match="the job failed"):
        job()
    assert os.environ.get("CUDA_VISIBLE_DEVICES") == before


def test_a_fingerprint_is_kept_while_no_file_changes(tmp_path, monkeypatch) -> None:
    """A server's next cell parses no file, unless one of the packages has changed, or is so new that it may change again unseen."""
    source, memory = tmp_path / "a.py", server.Memory()
    (tmp_path / "__pycache__").mkdir()
    monkeypatch.setattr(packages, "PACKAGES", (tmp_path,))
    monkeypatch.setattr(provenance, "git_state", lambda files: {})
    made = iter(["first", "second", "third"])
    monkeypatch.setattr(Bench, "code_fingerprint", lambda _: next(made))

    def fingerprint() -> str:
        completion.code.cache_clear()
        return completion.code("gate", memory)["code_fingerprint"]

    source.write_text("a")
    assert packages.state() is None
    monkeypatch.setattr(packages, "_RECENT_NS", -(10**18))
    assert fingerprint() == fingerprint() == "first"
    memory.learn()  # as the server does
    assert fingerprint() == "first"
    source.write_text("ab")
    assert fingerprint() == fingerprint() == "second"
    (tmp_path / "new.py").touch()
    assert fingerprint() == "third"
    completion.code.cache_clear()
