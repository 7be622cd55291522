"""An implementation takes as long in a process of its own as in the one that checks."""

import pytest

from moe_routing_bench.config.expand import cell_of
from moe_routing_bench.grid.cell import Job, Settings
from moe_routing_bench.measure import supervisor

pytestmark = pytest.mark.slow

SAME = """from moe_routing_bench.benches.plugins import Plugin
from moe_routing_kernels.experts import torch_experts
SAME = Plugin(bench="experts", name="same")
bind = torch_experts.bind_loop
"""
CELL = cell_of("experts", tokens=256, hidden=256, intermediate=256, experts=8, top_k=2, dtype="fp32")
SETTINGS = Settings(max_seconds=2.0, min_blocks=20, max_blocks=60, warmup_ms=50)
NOISE = 0.05  # half-width within which equals differ on a CPU that has nothing else to do


def test_both_forms_take_the_same_time(tmp_path, monkeypatch):
    """Calls of some milliseconds, side by side: in one of three cells the interval of the ratio, widened by the noise of a CPU and the
    hand-over, holds 1. Other work of the machine slows one process or the other for seconds."""
    (tmp_path / "isolated_twin.py").write_text(SAME)
    monkeypatch.syspath_prepend(tmp_path)
    job = Job(CELL, ("torch_loop", "same"), SETTINGS, plugins=("isolated_twin:SAME",))
    seen = []
    while len(seen) < 3:
        one, same = supervisor.measure(job)
        assert (one["status"], same["status"], one["isolated"], same["isolated"]) == ("ok", "ok", False, True)
        assert same["handover_us"] < 0.01 * same["median_us"] * same["calls_per_sample"]
        low, high = same["best_speedup_ci_low"], same["best_speedup_ci_high"]
        if low is None or low * (1 - NOISE) <= 1 <= high * (1 + NOISE):  # None: noise of any size
            return
        seen.append((one["median_us"], same["median_us"], low, high))
    pytest.fail(f"in no cell: {seen}")
