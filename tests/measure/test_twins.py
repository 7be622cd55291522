"""An implementation that is entered twice: both entries are checked and timed, and how far they are apart is in its row."""

import types

import pytest

pytest.importorskip("torch")
from moe_routing_bench.config import load as config
from moe_routing_bench.config.expand import cell_of, expand
from moe_routing_bench.grid.cell import Job, Settings
from moe_routing_bench.measure import supervisor
from moe_routing_kernels.errors import UserError
from moe_routing_kernels.pack import torch_pack

CELL = cell_of("pack", tokens=256, hidden=128, experts=4, top_k=2, dtype="fp32")
QUICK = Settings(
    check_seeds=2, warmup_ms=1, interval_us=200, min_blocks=10, max_blocks=10, max_seconds=60, wall_calls=1
)


@pytest.fixture
def packs(add_packs, no_ceilings):
    """Packs that are honest for as long as nobody enters them twice."""
    module = types.ModuleType("entered_packs")
    bound = set()

    def bind(problem, *, how, x, order, inverse, packed):
        call = torch_pack.bind(problem, x=x, order=order, inverse=inverse, packed=packed)
        second = (how, x.data_ptr()) in bound  # the same input set once more
        bound.add((how, x.data_ptr()))

        def twice():
            call()
            if second and how == "wrong_later":
                packed.zero_()
            if second and how == "slow_later":
                for _ in range(30):
                    call()

        return twice

    module.bind = bind
    add_packs(module, "how", ("wrong_later", "slow_later"))


def measured(*names: str, twins: tuple[str, ...]) -> dict[str, dict]:
    job = Job(CELL, names, QUICK, twins)
    return {row["implementation"]: row for row in supervisor.measure(job, None)}


def test_the_twin_is_in_the_row_and_has_none_of_its_own(packs):
    rows = measured("torch", "slow_later", twins=("torch",))
    torch_row, other = rows["torch"], rows["slow_later"]
    assert list(rows) == ["torch", "slow_later"] and torch_row["status"] == "ok", torch_row.get("reason")
    low, high, p = (torch_row[f"twin_speedup{end}"] for end in ("_ci_low", "_ci_high", "_p"))
    assert low is high is p is None or (low <= torch_row["twin_speedup"] <= high and 0 <= p <= 1)
    assert torch_row["twin_speedup"] > 0 and other.get("twin_speedup") is None
    # the quickest of ten blocks each: medians on a shared CPU can be off by a multiple
    assert torch_row["twin_median_us"] == pytest.approx(torch_row["median_us"], rel=2)
    assert torch_row["blocks"] == 10 and torch_row["speedup"] == 1


def test_a_second_entry_that_is_wrong_takes_the_first_along(packs):
    rows = measured("torch", "wrong_later", twins=("wrong_later",))
    assert rows["wrong_later"]["status"] == "incorrect" and rows["torch"]["status"] == "ok"
    assert "twin_speedup" not in rows["wrong_later"] and "median_us" not in rows["wrong_later"]


def test_a_second_entry_that_is_slow_shows(packs):
    rows = measured("torch", "slow_later", twins=("slow_later",))
    assert rows["slow_later"]["status"] == "ok" and rows["slow_later"]["twin_speedup"] < 0.2


def test_only_cells_with_twins_have_another_spec():
    plain, twin = Job(CELL, ("torch",), QUICK), Job(CELL, ("torch",), QUICK, ("torch",))
    assert "twins" not in plain.spec and plain.hash != twin.hash
    assert Job.from_spec(twin.spec) == twin and Job.from_spec(plain.spec) == plain


def entry(**change):
    return {
        "benches": ["pack", "combine"],
        "implementations": ["torch", "triton"],
        "tokens": [64],
        "hidden": [64],
        "experts": [4],
        "top_k": [2],
    } | change


def test_entries_of_a_config_add_up():
    """A cell of several entries has the twins of all, each once, in the order of the table."""
    grid = [entry(twins=["triton"]), entry(benches=["pack"], twins=["torch", "triton"])]
    jobs = {job.cell.bench: job for job in expand(config.load({"grid": grid}), {})}
    assert jobs["pack"].twins == ("torch", "triton") and jobs["combine"].twins == ("triton",)
    assert jobs["pack"].implementations == ("torch", "triton")


@pytest.mark.parametrize("names", [["cute"], ["torch", "nosuch"]])
def test_a_twin_of_nothing_is_refused(names):
    with pytest.raises(UserError, match="twins"):
        expand(config.load({"grid": [entry(twins=names)]}), {})
