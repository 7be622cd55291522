"""Times of a CPU that cannot be."""

from types import SimpleNamespace

import pytest

from moe_routing_bench.measure import cpu_ceilings

COST = SimpleNamespace(read_bytes=3000, write_bytes=1000, flops=600, rate=2)


@pytest.mark.parametrize(
    ("limits", "time", "status"),
    [
        ((1e9, 1e12), 4.0, "ok"),
        ((1e9, 1e12), 3.99, "below_roofline"),
        ((1e12, 1e8), 3.0, "ok"),
        ((1e12, 1e8), 2.99, "below_roofline"),
    ],
)
def test_a_time_below_the_limits_is_marked(limits, time, status, monkeypatch) -> None:
    """4000 bytes at 1 GB/s take 4 us; 600 FLOPs at a rate of 2, and 1e8 a second, take 3 us."""
    monkeypatch.setattr(cpu_ceilings, "limits", lambda: limits)
    row = {"status": "ok", "median_us": time}
    cpu_ceilings.judge([row], COST)
    assert row["status"] == status and row["median_us"] == time and ("reason" in row) == (status != "ok")


def test_limits_are_above_what_this_machine_does() -> None:
    """No copy of 64 MiB, which no cache holds, comes near them."""
    import torch

    nbytes, flops = cpu_ceilings.limits()
    source = torch.ones(1 << 26, dtype=torch.uint8)
    target = torch.empty_like(source)
    assert (1 << 27) / cpu_ceilings._seconds(lambda: target.copy_(source), 1) < nbytes / 2
    square = torch.ones(256, 256)
    assert 2 * 256**3 / cpu_ceilings._seconds(lambda: square @ square, 4) < flops
