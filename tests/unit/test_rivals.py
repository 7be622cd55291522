"""What `watch` holds a version against."""

import pytest

from moe_routing_bench.benches.registry import BENCHES
from moe_routing_bench.cli.rounds import Rivals

NOISE = (0.99, 1.0, 1.01, 1.0, 0.995, 1.005)


def row(name: str, us: float, status: str = "ok", **columns) -> dict:
    """A row of `combine` with blocks around a time, which share the noise of a round."""
    known = {"implementation": name, "status": status, "platform": "cpu", "median_us": us, "best_other": None}
    return known | {"block_medians_us": [us * one for one in NOISE]} | columns


def rows(*found: dict) -> dict[str, dict]:
    return {one["implementation"]: one for one in found}


def rivals(names: tuple[str, ...], mine: str = "cute") -> Rivals:
    return Rivals(BENCHES["combine"], [mine], [mine, *names])


def test_a_compiled_rival_is_in_the_first_round_alone_and_drift_between_rounds_does_not_count() -> None:
    """The machine takes twice as long for all in the second round: 80 us then are 40 us of before, against 50."""
    found = rivals(("torch", "torch_compile"))
    assert found.beside == ["torch", "torch_compile"]
    found.choose(rows(row("torch", 100), row("torch_compile", 50), row("cute", 40)))
    assert found.beside == ["torch"]
    own = row("cute", 80, best_other="torch", best_speedup=2.5)
    (said,) = found.said(own, rows(own, row("torch", 200)), None)
    assert said == "1.25x torch_compile (faster; that of round 1, by way of torch)"
    (said,) = found.said(own, rows(own, row("torch", 160)), None)
    assert said == "1.00x torch_compile (same; that of round 1, by way of torch)"


def test_without_its_time_the_baseline_is_no_way() -> None:
    """Where it has failed in this round, the row's own ratio is said, if there is one."""
    found = rivals(("torch", "torch_compile"))
    found.choose(rows(row("torch", 100), row("torch_compile", 50), row("cute", 40)))
    own = row("cute", 80)
    assert list(found.said(own, rows(own, row("torch", 200, "crashed")), None)) == []


def test_the_baseline_is_measured_for_a_compiled_rival_that_is_asked_for_alone() -> None:
    found = rivals(("torch_compile",))
    assert found.beside == ["torch_compile", "torch"]
    assert rivals(("triton",)).beside == ["triton"] and rivals(("torch_compile",), "torch").beside == ["torch_compile"]


def test_any_other_rival_is_measured_in_every_round() -> None:
    found = rivals(("torch", "triton", "torch_compile"))
    found.choose(rows(row("torch", 100), row("torch_compile", 50), row("triton", 30), row("cute", 40)))
    assert found.beside == ["triton"]
    ends = {"best_speedup_ci_low": 0.7, "best_speedup_ci_high": 0.8, "best_speedup_p": 1e-6}
    own = row("cute", 40, best_other="triton", best_speedup=0.75, **ends)
    assert list(found.said(own, rows(own, row("triton", 30)), None)) == ["0.75x triton (slower)"]
    own |= {"best_speedup_ci_low": None, "best_speedup_ci_high": None, "best_speedup_p": None}
    assert list(found.said(own, rows(own, row("triton", 30)), None)) == ["0.75x triton (undecided)"]


@pytest.mark.parametrize(("mine", "baseline"), [("cute", "crashed"), ("torch", "ok")])
def test_a_compiled_rival_without_a_way_to_it_is_measured_in_every_round(mine: str, baseline: str) -> None:
    """The baseline has no time, or is what is being written."""
    found = rivals(("torch_compile",), mine)
    found.choose(rows(row("torch", 100, baseline), row("torch_compile", 50), row("cute", 40)))
    assert found.beside == ["torch_compile"]


def test_without_a_rival_that_is_right_the_last_version_is_left() -> None:
    found = rivals(("triton",))
    found.choose(rows(row("triton", 30, "unsupported"), row("cute", 40)))
    assert found.beside == []
    assert list(found.said(row("cute", 40), {}, None)) == []
