"""Implementations of the tests among those of `pack`, and ceilings of a CPU that take no time."""

import sys
from collections.abc import Callable
from dataclasses import replace
from types import ModuleType

import pytest

from moe_routing_bench.benches.bench import Bench, Implementation
from moe_routing_bench.benches.registry import BENCHES
from moe_routing_bench.measure import completion, cpu_ceilings, supervisor, verify, worker


@pytest.fixture
def add_packs(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Give `pack`, beside torch, an implementation of `module` for each name, which is the value of the option `option`."""

    def add(module: ModuleType, option: str, names: tuple[str, ...]) -> None:
        monkeypatch.setitem(sys.modules, f"moe_routing_kernels.pack.{module.__name__}", module)
        extra = tuple(Implementation(name, module.__name__, options={option: name}) for name in names)
        known = BENCHES["pack"].code_files()
        monkeypatch.setattr(Bench, "code_files", lambda bench: known)
        bench = replace(BENCHES["pack"], implementations=(BENCHES["pack"]["torch"], *extra))
        for one in (worker, supervisor, completion, verify):
            monkeypatch.setattr(one, "bench_of", lambda job: bench)

    return add


@pytest.fixture
def no_ceilings(monkeypatch: pytest.MonkeyPatch) -> None:
    """All are 1, measured at once, also in a worker that is forked from here: on a busy machine they take longer than a timeout of tests."""
    known = dict.fromkeys(("copy_gb_per_s", "read_gb_per_s", "write_gb_per_s", "peak_tflops", "launch_us"), 1.0)
    monkeypatch.setattr(
        cpu_ceilings.CpuCeilings, "__init__", lambda self, known: setattr(self, "known", None)
    )  # nor buffers to fill
    monkeypatch.setattr(cpu_ceilings.CpuCeilings, "measure", lambda self: known)
    monkeypatch.setattr(cpu_ceilings, "limits", lambda: (1e15, 1e18))
