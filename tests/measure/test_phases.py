"""Where the seconds of a cell go."""

import pytest

from moe_routing_bench.measure import phases


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """A clock whose reading is the last number."""
    now = [0.0]
    monkeypatch.setattr(phases, "monotonic", lambda: now[-1])
    return now


def test_the_seconds_of_steps_add_up(clock: list[float]) -> None:
    """Steps that come again are added, what is short is not named, and nothing counts between two workers."""
    known = phases.Phases()
    for begin, name, step in (
        (0.0, None, "inputs"),
        (2.0, "torch", "checking"),
        (2.5, "triton", "sampling"),
        (2.504, None, "calibration"),
        (4.0, "torch", "checking"),
    ):
        clock.append(begin)
        known.enter(name, step)
    clock.append(4.25)
    known.end()
    clock.append(9.0)
    known.enter("triton", "binding")
    clock.append(10.0)
    known.end()
    known.end()
    assert known.text() == "seconds: inputs 2.00, calibration 1.50; torch: checking 0.75; triton: binding 1.00"
    assert known.seconds()["triton", "sampling"] == pytest.approx(0.004)
