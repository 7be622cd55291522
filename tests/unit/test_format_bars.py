"""Which bars of quantised kernels a few rows reach: on the bar, beside it, not measured, and what counts as what."""

from collections.abc import Sequence

import pandas as pd
import pytest
from rows import frame, one

from moe_routing_bench.report import format_bars
from moe_routing_bench.report.bars import PLATFORM
from moe_routing_bench.report.parts import BarLine
from moe_routing_kernels.formats.weights import WEIGHTS

QWEN = {"model": "qwen3-30b-a3b", "hidden": 2048, "intermediate": 768, "experts": 128, "top_k": 8}
FEW, TABLE, DECODE = (
    "experts, seed 003, at most 64 rows per expert: speed over dequantising first",
    "experts, seed 003: speed over dequantising into a kept workspace and multiplying",
    "experts, decode, int4_g128: weight bytes over time, of copy",
)


def row(name: str, us: float, bench: str = "experts", **values: object) -> dict[str, object]:
    """A row of the platform that the bars are for, of the cell that its values name."""
    known = {
        "platform": PLATFORM,
        "dtype": "bf16",
        "packed": "bf16",
        "phase": "prefill",
        "skew": 0.0,
        "sampler": "exact",
        "seed": 17,
        "set_aside": 0,
    }
    at = known | {"layout": "compact"} | values
    at["packed"] = values.get("packed", at["dtype"])
    key = "-".join(str(at[name]) for name in sorted(at) if name not in ("status", "share_of_copy"))
    times = {
        "median_us": us,
        "ci_low_us": us * 0.99,
        "ci_high_us": us * 1.01,
        "block_medians_us": [us * (1 + 0.002 * (i % 3)) for i in range(6)],
    }
    errors = {"rel_l2_error": 1e-3, "tolerance": 4e-3}
    return one(bench, name, cell=key, cell_hash=key, **times, **errors, **at)


def tables(
    rows: Sequence[dict[str, object]], matrix: Sequence[dict[str, object]]
) -> tuple[format_bars.Tables, format_bars.Tables]:
    """The rows of a run, and its accuracy matrix, if it has one."""
    return {"quantised": frame(*rows)}, {"quantised": pd.DataFrame(matrix)} if matrix else {}


def lines(
    *rows: dict[str, object], matrix: Sequence[dict[str, object]] = (), absent: bool = False
) -> dict[str, BarLine]:
    return {line.what: line for line in format_bars.lines(*tables(rows, matrix), absent)}


def exact(*rows: dict[str, object], matrix: Sequence[dict[str, object]] = ()) -> BarLine | None:
    """The line of the accuracy bar alone, if there is one."""
    return next(iter(format_bars.exact(*tables(rows, matrix))), None)


def replayed(dequant: float, strong: float = 1000.0) -> list[dict[str, object]]:
    """Rows of every cell of seed 003: ours in 100 us, dequantising with torch, and in the form that is hard to beat."""
    names = (("cute_quantised", 100.0), ("dequant", dequant), ("dequant_cute", strong), ("dequant_loop", 1.0))
    at = [dict(cell) | {"skew": 0.05} for cell in format_bars.replayed().values()]
    return [row(name, us, **cell) for cell in at for name, us in names]


def test_the_cells_of_seed_003() -> None:
    """Seven shapes, eight formats, two formats of activations; three shapes and the smallest have few rows per expert."""
    assert (len(format_bars.replayed()), len(format_bars.replayed(64))) == (112, 64)
    small = format_bars.replayed()["small E8 N4096 K4096 int4_g128 fp16"]
    assert (small["hidden"], small["intermediate"], small["tokens"]) == (4096, 2048, 252)


@pytest.mark.parametrize(
    ("dequant", "table"), [(400.1, "reached, and the stretch"), (200.1, "reached"), (199, "missed")]
)
def test_the_table_of_seed_003(dequant: float, table: str) -> None:
    found = lines(*replayed(dequant))
    assert (found[TABLE].verdict, found[TABLE].cells) == (table, "112 of 112")
    assert found[FEW].verdict == "reached" and found[FEW].measured.startswith(f"{dequant / 100:.3f}x [")


def test_the_better_of_both_forms_counts_and_the_strong_one_must_have_run() -> None:
    found = lines(*replayed(400.0, 90.0))
    assert (found[FEW].verdict, found[TABLE].verdict) == ("missed", "missed")
    assert "0.900x" in found[FEW].measured and "(cute_quantised, dequant_cute)" in found[FEW].measured
    weak = lines(*(each for each in replayed(400.0) if each["implementation"] != "dequant_cute"))
    assert FEW not in weak and TABLE not in weak


def test_one_slower_cell_of_few_rows_is_a_miss() -> None:
    rows = replayed(400.0)
    assert rows[1]["experts"] == 8 and rows[1]["tokens"] == 252
    rows[1]["median_us"], rows[1]["block_medians_us"] = 99.0, [99.0] * 6
    found = lines(*rows)
    assert found[FEW].verdict.startswith("missed") and found[TABLE].verdict.startswith("reached")
    assert lines(*rows[:4])[TABLE].verdict == "open"


def test_bytes_of_weights_over_time() -> None:
    shares = dict(zip(format_bars.DECODE, (0.8, 0.76, 0.8, 0.76, 0.9, 0.75), strict=True))
    rows = [
        row("cute_quantised", 9.0, share_of_copy=shares[name], **dict(cell))
        for name, cell in format_bars.DECODE.items()
    ]
    found = lines(*rows)[DECODE]
    assert (found.verdict, found.bar, found.stretch) == (
        "reached, and the stretch",
        "each ≥ 50 %, 65 %, 70 %",
        "each ≥ 75 %",
    )
    low = lines(*rows[:-1], rows[-1] | {"share_of_copy": 0.6})[DECODE]
    assert low.verdict == "missed" and "deepseek-v3 T=64: 60.0 % [59.4, 60.6] (cute_quantised)" in low.measured


def test_every_format_has_its_fastest_peer() -> None:
    """Of two cells, each with another peer; what dequantises, and torch, are nobody's."""
    at = QWEN | {"weights": "int4_g128"}
    rows = [
        row("cute_quantised", 100.0, tokens=8, **at),
        row("marlin", 130.0, tokens=8, **at),
        row("humming", 121.0, tokens=8, **at),
    ]
    rows += [
        row("cute_quantised", 100.0, tokens=64, **at),
        row("humming", 100.0, tokens=64, **at),
        row("dequant", 10.0, tokens=64, **at),
    ]
    rows += [row("cute_quantised", 100.0, tokens=8, **QWEN, weights="int8_g128")]
    found = lines(*rows)
    (peers,) = [line for what, line in found.items() if "fastest peer" in what]
    assert (peers.what, peers.cells, peers.verdict) == (
        "experts, int4_g128: speed over the fastest peer",
        "2 of 2",
        "reached",
    )
    assert (
        peers.measured.startswith("1.100x [") and "worst: qwen3-30b-a3b T64 weights-int4_g128: 1.000x" in peers.measured
    )


def test_formats_that_no_kernel_of_ours_takes_have_no_bar() -> None:
    """A format of ours has one before anything is measured beside it, an operand of both sides too."""
    rows = [row("mslk_fp8", 100.0, tokens=8, **QWEN, weights="e4m3_row", packed="fp8_row")]
    rows += [row("cute_fp8", 90.0, tokens=8, **QWEN, weights="e4m3_block128", packed="fp8_block128")]
    rows += [row("cute_quantised", 90.0, "layer", tokens=8, **QWEN, weights="int2_g128")]
    assert [one.what for one in format_bars.bars(tables(rows, ())[0]) if "peer" in one.what] == [
        "experts, e4m3_block128: speed over the fastest peer"
    ]


@pytest.mark.parametrize(("us", "verdict"), [(110.0, "reached"), (120.0, "missed"), (99.0, "reached, and the stretch")])
def test_a_prefill_is_held_against_our_layer_of_16_bits(us: float, verdict: str) -> None:
    """Of the same card, and of no package of somebody else."""
    at = QWEN | {"tokens": 16384}
    plain = [row("cute", 100.0, "layer", weights="bf16", **at), row("sonicmoe", 50.0, "layer", weights="bf16", **at)]
    own = row("cute_quantised", us, "layer", weights="int4_g128", **at)
    found = lines(*plain, own)["layer, prefill, int4_g128 x bf16: speed over our bf16 layer"]
    assert found.verdict == verdict and found.measured.startswith(f"{100 / us:.3f}x [")
    assert [one.verdict for one in lines(*plain, own | {"gpu_uuid": "GPU-2"}).values()] == ["not comparable"]


def test_fp8_on_both_sides_against_our_layer_of_16_bits() -> None:
    at = QWEN | {"tokens": 16384}
    fp8 = {"weights": "e4m3_block128", "packed": "fp8_block128"}
    rows = [
        row("cute_gather", 160.0, "layer", weights="bf16", **at),
        row("cute_fp8", 100.0, "layer", **fp8, **at),
        row("dequant_loop", 10.0, "layer", **fp8, **at),
    ]
    (found,) = lines(*rows).values()
    assert (found.verdict, found.bar) == ("reached", "≥ 1.5x in the geometric mean")


EXACT = "experts: results compared with those of dequantised weights"
CASES = "18 of 18 cases of seed 003, and all other formats"


def compared(weights: str, name: str, status: str | None = "ok", **values: object) -> dict[str, object]:
    """A row of the accuracy matrix."""
    known = {
        "platform": PLATFORM,
        "activations": "bf16",
        "drawn": "normal",
        "of_bound": 0.5,
        "kernel_error": 1e-3,
        "tolerance": 4e-3,
    }
    return known | {"weights": weights, "implementation": name, "status": status} | values


def every_format() -> list[dict[str, object]]:
    """A right result of each format beside bf16: ours, or of what dequantises where no kernel of ours takes it."""
    return [
        compared(name, "dequant_loop" if form.codec == "float4" else "cute_quantised") for name, form in WEIGHTS.items()
    ]


def seed_003() -> list[dict[str, object]]:
    """Our rows of the 18 cases that the seed's accuracy table has."""
    plain = [row("cute", 9.0, tokens=252, weights=dtype, dtype=dtype) for dtype in ("fp16", "bf16")]
    return plain + [each for each in replayed(300.0) if each["implementation"] == "cute_quantised"]


def test_exactness_counts_the_cases_of_seed_003() -> None:
    other = row("cute_quantised", 9.0, tokens=8, weights="int4_g32")
    found = exact(*seed_003(), other)
    assert (found.verdict, found.cells) == ("open", "18 of 18"), "the bar is of all other formats, too"
    seen = "right: 18 of its 18 cases, 1 of 1 others; largest error 25% of its limit"
    assert found == BarLine(EXACT, CASES, "–", seen, "18 of 18", "–", "open", "quantised")
    others = [other | {"weights": name} for name in WEIGHTS if name not in {one["weights"] for one in seed_003()}]
    assert exact(*seed_003(), *others).verdict == "reached"
    assert exact(*seed_003(), *others[1:]).verdict == "open"
    assert exact(*seed_003(), other | {"status": "incorrect"}).verdict == "missed"
    first, second, *quantised = seed_003()
    assert exact(*quantised, first).verdict == "open" and exact(first, second) is None, "nothing quantised"


def test_the_accuracy_matrix_judges_all_other_formats() -> None:
    """Where one of our kernels takes a format it counts, and nobody else; elsewhere everybody does. Other platforms say nothing."""
    assert WEIGHTS.keys() > {"mxfp4", "int4_g32"}
    matrix = every_format()
    others = len(WEIGHTS) - 8
    reached = exact(*seed_003(), matrix=matrix)
    assert reached.verdict == "reached" and reached.measured.startswith(
        f"right: 18 of its 18 cases, {others} of {others} others;"
    )
    assert exact(*seed_003(), matrix=[*matrix, compared("int4_g32", "marlin", "incorrect")]).verdict == "reached"
    at_its_bound = compared("int4_g32", "cute_quantised", of_bound=1.0, kernel_error=3e-3)
    largest = exact(*seed_003(), matrix=[*matrix, at_its_bound])
    assert largest.verdict == "reached" and largest.measured.endswith("; largest error 75% of its limit")
    elsewhere = [one | {"platform": "cpu"} if one["weights"] == "mxfp4" else one for one in matrix]
    assert exact(*seed_003(), matrix=elsewhere).verdict == "open"
    without = [one | {"status": None, "implementation": None} if one["weights"] == "mxfp4" else one for one in matrix]
    assert exact(*seed_003(), matrix=without).verdict == "open", "a row of the format alone is no result"
    assert lines(seed_003()[0], matrix=matrix)[EXACT] == exact(seed_003()[0], matrix=matrix), (
        "it is among the bars of formats"
    )
    assert exact(seed_003()[0], matrix=matrix).cells == "9 of 18", "the eight formats beside bf16, and one plain case"


def test_a_run_with_too_few_cases_is_not_open_where_another_decides() -> None:
    few = frame(row("cute_quantised", 9.0, tokens=8, weights="int4_g32"))
    runs, matrices = {"whole": frame(*seed_003()), "few": few}, {"whole": pd.DataFrame(every_format())}
    assert [(line.where, line.verdict) for line in format_bars.exact(runs, matrices)] == [("whole", "reached")]
    assert [line.verdict for line in format_bars.exact(runs)] == ["open", "open"]
    wrong = few.assign(status="incorrect")
    assert [line.verdict for line in format_bars.exact(runs | {"few": wrong}, matrices)] == ["reached", "missed"]


@pytest.mark.parametrize(
    "wrong",
    [
        compared("int4_g32", "cute_quantised", "incorrect"),
        compared("int4_g32", "cute_quantised", "crashed", kernel_error=None, tolerance=None),
        compared("mxfp4", "marlin", "incorrect"),
        compared("int4_g128", "cute_quantised", "incorrect"),
        compared("int4_g32", "cute_quantised", of_bound=1.01),
    ],
)
def test_one_wrong_result_of_the_accuracy_matrix_is_a_miss(wrong: dict[str, object]) -> None:
    matrix = every_format()
    assert exact(*seed_003(), matrix=[*matrix, wrong]).verdict == "missed"


def test_where_all_crashed_there_is_no_largest_error() -> None:
    crashed = compared("int4_g32", "cute_quantised", "crashed", kernel_error=float("nan"), tolerance=float("nan"))
    found = exact(row("cute", 1.0, tokens=8, weights="bf16") | {"status": "crashed"}, matrix=[crashed])
    assert found.verdict == "missed"
    assert found.measured == "right: 0 of its 18 cases, 0 of 1 others; largest error – of its limit"


def test_rows_beside_eight_bits_are_another_case() -> None:
    """Rows of fp8 are cells of bf16 that are packed otherwise: no case of seed 003."""
    fp8 = row("cute_fp8", 9.0, tokens=8, weights="e4m3_block128") | {"packed": "fp8_block128"}
    assert exact(fp8).measured.startswith("right: 0 of its 18 cases, 1 of 1 others;")


def test_what_is_not_measured_is_said_on_request() -> None:
    assert lines(row("cute", 1.0, tokens=8, weights="bf16")) == {}
    found = lines(row("cute", 1.0, tokens=8, weights="bf16"), absent=True)
    assert {line.verdict for line in found.values()} == {"not measured"} and len(found) == 6
    assert found[EXACT] == BarLine(EXACT, CASES, "–", "–", "0 of 18", "–", "not measured", "")
