"""The target of kernels: what is known of an architecture without a GPU, and of the GPU that is here."""

from types import SimpleNamespace

import pytest
import torch

from moe_routing_kernels import target
from moe_routing_kernels.errors import UserError
from moe_routing_kernels.target import CPU, Target, written_for


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch):
    """Plant a GPU with these properties; nothing is remembered of it."""

    def plant(hip: str | None = None, **properties: object) -> None:
        common = {"shared_memory_per_block": 49152, "shared_memory_per_block_optin": 232448, "total_memory": 2**36}
        known = SimpleNamespace(**common | properties)
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: known)
        monkeypatch.setattr(torch.version, "hip", hip)
        target.of_device.cache_clear()

    yield plant
    target.of_device.cache_clear()


@pytest.mark.parametrize(
    ("arch", "capability", "multiprocessors", "generation"),
    [
        ("sm_75", (7, 5), 40, "sm_75"),
        ("sm_80", (8, 0), 108, "sm_80"),
        ("sm_87", (8, 7), 84, "sm_87"),
        ("sm_90a", (9, 0), 132, "sm_90"),
        ("sm_90", (9, 0), 132, "sm_90"),
        ("sm_100a", (10, 0), 148, "sm_100"),
        ("sm_103a", (10, 3), 148, "sm_103"),
        ("sm_120a", (12, 0), 188, "sm_120"),
        ("sm_121a", (12, 1), 188, "sm_121"),
    ],
)
def test_an_architecture_has_documented_counts(arch, capability, multiprocessors, generation) -> None:
    """One that is not listed has those of the newest listed one before it."""
    found = Target.of(arch)
    assert (found.vendor, found.arch, found.capability) == ("nvidia", arch, capability)
    assert (found.multiprocessors, found.generation) == (multiprocessors, generation)
    assert found.shared_memory % 1024 == 0 < found.memory


@pytest.mark.parametrize("arch", ["", "hopper", "sm_61", "sm_9", "sm_90b", "gfx942", "cpu", "SM_90A", 90, None])
def test_another_name_is_refused_in_one_line(arch) -> None:
    with pytest.raises(UserError, match=r"^arch: got .*; allowed: what a GPU is called") as caught:
        Target.of(arch)
    assert "\n" not in str(caught.value)


def test_the_gpu_that_is_here_says_its_own_counts(gpu) -> None:
    """A PCIe card has fewer multiprocessors than what is documented; what is compiled ahead for it counts these."""
    gpu(major=9, minor=0, multi_processor_count=114)
    here = Target.here()
    assert here == Target("nvidia", "sm_90a", 114, 232448, 2**36) == Target.here(torch.device("cuda"))
    assert Target.named("sm_90a") == here and Target.named("sm_80") == Target.of("sm_80")
    assert Target.of("sm_90a").multiprocessors == 132
    assert Target.here(torch.device("cpu")) == CPU


def test_a_gpu_of_another_vendor_has_no_compute_capability_of_nvidia(gpu) -> None:
    gpu(hip="7.0", major=9, minor=4, multi_processor_count=304, gcnArchName="gfx942:sramecc+:xnack-")
    here = Target.here()
    assert (here.vendor, here.arch, here.capability, here.generation) == ("amd", "gfx942", (0, 0), "gfx942")


def test_without_a_gpu_the_target_is_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert Target.here() == CPU == Target.here(torch.device("cuda", 0))
    assert (CPU.vendor, CPU.generation, CPU.capability) == ("", "cpu", (0, 0))


def test_a_kernel_of_one_architecture_says_so() -> None:
    assert written_for("sm_90a", None) is None is written_for("sm_90a", Target.of("sm_90a"))
    assert written_for("sm_90a", Target.of("sm_100a")) == "is written for sm_90a, not sm_100a"
    assert written_for("sm_90a", CPU) == "is written for sm_90a, not cpu"


@pytest.mark.parametrize("most", [114, 132, 148])
def test_kernels_are_configured_for_the_multiprocessors_of_the_target(most: int, gpu) -> None:
    """A kernel whose blocks fill a multiprocessor each has at most as many; with a count that is not documented, of the GPU here."""
    pytest.importorskip("cutlass")
    from moe_routing_kernels.permute import Permute, cute_permute

    gpu(major=9, minor=0, multi_processor_count=most)
    problem = Permute(2**20, 64, 1, 2**20)
    blocks = {arch: cute_permute.config_of(problem, arch)[1] for arch in ("sm_90a", "sm_80")}
    assert 0.9 * most < blocks["sm_90a"] <= most and 0.9 * 108 < blocks["sm_80"] <= 108
