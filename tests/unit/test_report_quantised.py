"""The section of the report on formats of weights: its lines, and who is on the frontier."""

from typing import Any

import pandas as pd
import pytest
from rows import frame, one

from moe_routing_bench.figures import formats
from moe_routing_bench.report import quantised_weights
from moe_routing_bench.report.bars import PLATFORM

pytestmark = pytest.mark.slow

SHAPE = {
    "hidden": 2048,
    "intermediate": 768,
    "experts": 128,
    "top_k": 8,
    "dtype": "bf16",
    "packed": "bf16",
    "platform": PLATFORM,
}


def row(name: str, us: float, weights: str = "int4_g128", tokens: int = 8, bench: str = "experts", **values: Any):
    known = {
        "median_us": us,
        "ci_low_us": us,
        "ci_high_us": us,
        "rel_l2_error": 1e-3,
        "tolerance": 4e-3,
        "compulsory_bytes": 126_000_000,
    }
    return one(bench, name, **SHAPE, **known, weights=weights, tokens=tokens, **values)


ROWS = [
    row("cute", 120.0, "bf16"),
    row("dequant", 90.0),
    row("cute_quantised", 45.0, share_of_copy=0.66, share_of_roofline=0.66, speedup=2.0, baseline="dequant"),
    row("marlin", 60.0),
    row("cute_quantised", 50.0, "int8_g128"),
]


def test_a_line_per_format_beside_unquantised_weights() -> None:
    plain, int8, int4 = quantised_weights.lines(frame(*ROWS))
    assert (plain.form, plain.plain, plain.frontier) == ("bf16", "–", "–")
    assert (int4.implementation, int4.moved, int4.copy, int4.error) == ("cute_quantised", "126 MB", "66%", "25%")
    assert (int4.speedup, int4.plain, int4.peer) == ("2.00x dequant", "2.67x", "1.33x marlin")
    assert (int8.form, int8.peer) == ("int8_g128", "–")
    assert quantised_weights.lines(frame(ROWS[0])) == []


@pytest.mark.parametrize(
    ("chose", "expected"),
    [
        ("cute_quantised; 2 stages", ("cute_quantised", "2.00x cute_marlin")),
        ("cute_fp8; 2 stages", ("auto", "2.05x cute_marlin")),
        (None, ("auto", "2.05x cute_marlin")),
    ],
)
def test_what_auto_ran_counts_where_it_has_no_row_of_its_own(chose: str | None, expected: tuple[str, str]) -> None:
    """As in runs that measure `auto` and other packages alone; no ratio where unquantised weights were not measured."""
    times = {"cute_quantised": 45.0, "auto": 44.0, "cute_marlin": 90.0}
    known = {"bench": "layer", "cell": "one"}
    layers = [row(name, us, **known, configuration=chose if name == "auto" else None) for name, us in times.items()]
    (found,) = quantised_weights.lines(frame(*layers))
    assert (found.implementation, found.peer, found.plain) == (*expected, "–")


@pytest.mark.parametrize(("exactness", "best"), [(15.0, ""), (20.0, ""), (21.0, "yes")])
def test_the_frontier_is_of_what_is_faster_or_more_exact(exactness: float, best: str) -> None:
    """int8 is slower than int4, and on the frontier only if it loses less."""
    known = {"int4_g128": 20.0, "int8_g128": exactness}
    matrix = pd.DataFrame(
        [
            {"weights": w, "activations": "bf16", "drawn": drawn, "output_snr_db": s / less}
            for drawn, less in (("normal", 1), ("outliers", 9))
            for w, s in known.items()
        ]
    )
    assert [(line.form, line.loses, line.frontier) for line in quantised_weights.lines(frame(*ROWS), matrix)] == [
        ("bf16", "–", "yes"),
        ("int8_g128", f"{exactness:.1f} dB", best),
        ("int4_g128", "20.0 dB", "yes"),
    ]


def test_figures_have_a_line_per_format() -> None:
    """Of the fastest of ours; the share is known of one row."""
    rows = frame(*ROWS, row("cute_quantised", 55.0, tokens=64, share_of_roofline=0.8))
    times, shares = formats.formats(rows), formats.format_limits(rows)
    assert times.kind == "lines" and len(set(times.marks["panel"])) == 1
    assert list(zip(times.marks["series"], times.marks["x"], times.marks["y"], strict=True)) == [
        ("bf16", 8, 120.0),
        ("int8_g128", 8, 50.0),
        ("int4_g128", 8, 45.0),
        ("int4_g128", 64, 55.0),
    ]
    assert list(shares.marks["y"]) == [66.0, 80.0] and shares.reference == 100.0


def test_a_format_has_its_own_colour_and_rows_of_a_warm_cache_no_ceiling() -> None:
    """Whatever other formats are drawn; 0.2 % of the ceiling was of the FLOPs of weights in the cache."""
    every = formats.formats(frame(*ROWS))
    alone = formats.formats(frame(ROWS[0], ROWS[2]))
    assert len(alone.colors) < len(every.colors)
    assert {name: every.colors[name] for name in alone.colors} == dict(alone.colors)
    shares = formats.format_limits(
        frame(*ROWS, row("cute_quantised", 55.0, tokens=64, share_of_roofline=0.002, cold=False))
    )
    assert list(shares.marks["x"]) == [66.0]


def test_shapes_of_one_number_of_tokens_are_lines_of_dots() -> None:
    """Where nothing changes along tokens, formats of a shape lie on one line, in a panel per bench."""
    other = row("cute_quantised", 30.0, share_of_roofline=0.9) | {"hidden": 4096}
    times, shares = formats.formats(frame(*ROWS, other)), formats.format_limits(frame(*ROWS, other))
    assert (times.kind, times.y.kind, set(times.marks["panel"])) == ("dots", "names", {"experts"})
    assert [(m.series, m.x, m.y.split()[0], m.y.split()[-1]) for m in times.marks.itertuples()] == [
        ("bf16", 120.0, "H2048", "T8"),
        ("int8_g128", 50.0, "H2048", "T8"),
        ("int4_g128", 45.0, "H2048", "T8"),
        ("int4_g128", 30.0, "H4096", "T8"),
    ]
    assert list(shares.marks["x"]) == [66.0, 90.0] and shares.reference_in("experts") == 100.0
