"""Which kernel an operator takes, and the Triton ones in the interpreter."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from moe_routing_kernels.choices import chooser
from moe_routing_kernels.combine import Combine
from moe_routing_kernels.gate import Gate
from moe_routing_kernels.ops import backends
from moe_routing_kernels.pack import Pack
from moe_routing_kernels.permute import Permute
from moe_routing_kernels.target import Target

PROBLEMS = {
    "gate": Gate(64, 128, 8, "bf16", "deepseek_v3"),
    "permute": Permute(64, 128, 8, 512),
    "pack": Pack(64, 2048, 8, 512, "bf16", "bf16", padding=True),
    "combine": Combine(64, 2048, 8, "bf16", dropping=True),
}


HOPPER = Target.of("sm_90a")
OLD = HOPPER._replace(arch="sm_61")  # no compiler of ours has it


def chosen(problem, target=HOPPER) -> str | None:
    """The backend of a problem, nothing remembered."""
    module = chooser.kernel.__wrapped__(problem, target)
    return module and module.__name__.removeprefix(f"{type(problem).__module__}.").partition("_")[0]


@pytest.mark.parametrize("problem", PROBLEMS.values(), ids=PROBLEMS)
def test_cute_comes_first_then_triton_then_torch(problem, monkeypatch) -> None:
    pytest.importorskip("triton")
    pytest.importorskip("cutlass")
    assert chosen(problem) == "cute"
    assert chosen(problem, Target.of("sm_75")) == "triton" and chosen(problem, OLD) is None
    monkeypatch.setattr(chooser, "installed", lambda package: package == "triton")
    assert chosen(problem) == "triton"
    monkeypatch.setattr(chooser, "installed", lambda package: False)
    assert chosen(problem) is None


def test_what_kernels_do_not_support_is_left_to_torch() -> None:
    pytest.importorskip("triton")
    assert chosen(Gate(64, 2048, 8, "bf16", "softmax_topk")) is None
    assert chosen(Permute(64, 2048, 8, 512)) is None


def test_a_choice_is_remembered(monkeypatch) -> None:
    """The second call asks no kernel, and imports nothing."""
    problem = Permute(65, 127, 7, 455)
    first = chooser.kernel(problem, HOPPER)
    monkeypatch.setattr(chooser, "importlib", None)
    assert chooser.kernel(problem, HOPPER) is first


def test_kernels_get_contiguous_aligned_tensors() -> None:
    whole = torch.arange(64, dtype=torch.float32)
    for tensor in (whole, whole[4:], whole[1:], whole.view(8, 8).T, whole.view(8, 8)[:, 2:]):
        found = backends.ready(tensor)
        assert torch.equal(found, tensor) and found.is_contiguous() and found.data_ptr() % 16 == 0
    assert backends.ready(whole[4:]).data_ptr() == whole[4:].data_ptr()
    for empty in (
        torch.zeros(()).expand(0, 8),
        torch.zeros(4, 0).t(),
        torch.zeros(8, 6)[:0, ::2],
    ):  # all are "contiguous"
        assert empty.is_contiguous() and backends.ready(empty).stride() == torch.empty(empty.shape).stride()


@pytest.mark.slow
def test_triton_kernels_match_float64() -> None:
    """One subprocess runs every case: triton reads TRITON_INTERPRET when it is imported."""
    pytest.importorskip("triton")
    program = Path(__file__).with_name("ops_cases.py")
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run([sys.executable, str(program)], env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
