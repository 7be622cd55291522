"""What a report says of how its rows were measured, and why it has no finding: nothing that the rows do not hold."""

import pytest
from rows import frame, one

from moe_routing_bench.figures import footer
from moe_routing_bench.report import headlines, words
from moe_routing_bench.report.render import render

pytestmark = pytest.mark.slow

GPU = {
    "gpu_name": "NVIDIA H200",
    "gpu_uuid": "GPU-1",
    "platform": "nvidia-h200",
    "median_us": 5.0,
    "ci_low_us": 4.9,
    "ci_high_us": 5.1,
}


def ran(**values: object) -> dict[str, object]:
    return one("gate", "cute", **GPU | {"cold": True, "turns": "short"} | values)


def near(**values: object) -> dict[str, object]:
    """A row that is a few percent faster than the best other."""
    return ran(best_other="triton", best_speedup=1.05, best_speedup_ci_low=1.04, best_speedup_ci_high=1.06) | values


@pytest.mark.parametrize(
    ("cold", "said"),
    [
        ((True, True), "cold L2"),
        ((False, False), "L2 may be warm"),
        ((True, True, True, False), "cold L2 but for 25% of rows"),
        ((True, None), "cold L2 but for 50% of rows"),
        ((True,) * 299 + (False,), "cold L2 but for 1% of rows"),
        ((False,) * 299 + (True,), "cold L2 but for 99% of rows"),
    ],
)
def test_a_caption_calls_the_cache_cold_only_where_all_rows_found_it_so(
    cold: tuple[bool | None, ...], said: str
) -> None:
    rows = frame(*(ran(cold=value) for value in cold))
    assert footer.caches(rows) == said and footer.measured(rows).endswith(f"| medians, device time, {said}")
    assert words.method(rows).caches == f" ({said})"


def test_a_cpu_has_no_word_on_its_caches() -> None:
    rows = frame(ran(gpu_name=None, gpu_uuid=None, cpu_model="a", cold=False))
    assert "L2" not in footer.measured(rows) and words.method(rows).caches == ""


@pytest.mark.parametrize(
    ("turns", "blocks", "long"),
    [
        (("short",), True, False),
        (("long", "long"), False, True),
        (("short", "long", "short"), True, True),
        ((), True, True),
    ],
)
def test_turns_are_those_of_the_rows(turns: tuple[str, ...], blocks: bool, long: bool, tmp_path) -> None:
    """Of a run in long turns no page says that blocks were in random order."""
    rows = frame(*(ran(turns=value) for value in turns), ran(status="crashed", median_us=None, turns=None))
    said = words.method(rows).turns
    assert ("random order" in said) is blocks and ("long turns" in said) is long
    assert ("(2 rows)" in said and "(1 row)" in said) is (len(turns) == 3)
    render(rows, {}, tmp_path / "index.html")
    page = (tmp_path / "index.html").read_text()
    assert f"on identical inputs, {said}. What is timed" in page


@pytest.mark.parametrize(
    ("rows", "said"),
    [
        ([ran(), ran()], "no cell has times of two implementations to compare"),
        (
            [near(), near()],
            "no implementation was entered twice, so that differences up to 11 % are not judged, and no",
        ),
        (
            [near(gpu_uuid=None, gpu_name=None)],
            "no implementation was entered twice, so that differences are not judged;",
        ),
        ([near(twin_speedup=1.0), near()], "1 implementation was entered twice, and 5 are needed"),
        (
            [ran(best_verdict="same"), ran(best_verdict="faster", suspect=True)],
            "of 2 rows with a verdict, none that is sound",
        ),
        ([ran(best_verdict="faster", best_speedup=1.5)], "1 of which is faster"),
    ],
    ids=["one each", "without twins", "on a CPU", "too few twins", "nothing sound", "without an interval"],
)
def test_a_report_without_findings_says_why(rows: list[dict[str, object]], said: str, tmp_path) -> None:
    """That no difference is beyond doubt would be false where none was judged: times may be a factor of ten apart."""
    table = frame(*rows)
    assert headlines.headlines(table) == [] and said in headlines.unfound(table)
    render(table, {}, tmp_path / "index.html")
    assert f"<p>None: {headlines.unfound(table)} " in (tmp_path / "index.html").read_text()
