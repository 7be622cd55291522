"""Implementations of the tests among those of `pack`."""

import sys
from collections.abc import Callable
from dataclasses import replace
from types import ModuleType

import pytest

from moe_routing_bench.benches.bench import Bench, Implementation
from moe_routing_bench.benches.registry import BENCHES
from moe_routing_bench.measure import completion, supervisor, verify, worker


@pytest.fixture
def add_packs(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Give `pack`, beside torch, an implementation of `module` for each name, which is the value of the option `option`."""

    def add(module: ModuleType, option: str, names: tuple[str, ...]) -> None:
        monkeypatch.setitem(sys.modules, f"moe_routing_bench.kernels.pack.{module.__name__}", module)
        extra = tuple(Implementation(name, module.__name__, options={option: name}) for name in names)
        known = BENCHES["pack"].code_files()
        monkeypatch.setattr(Bench, "code_files", lambda bench: known)
        bench = replace(BENCHES["pack"], implementations=(BENCHES["pack"]["torch"], *extra))
        for one in (worker, supervisor, completion, verify):
            monkeypatch.setattr(one, "bench_of", lambda job: bench)

    return add
