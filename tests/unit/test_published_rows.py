"""Rows that other projects claims, next to ours: which cells are the same, what became of each row, and what the file of rows holds."""

from pathlib import Path

import pandas as pd
import pytest
import yaml
from rows import frame, one

from moe_routing_bench.comparison import published_rows
from moe_routing_bench.config import claims, presets
from moe_routing_bench.figures import foreign
from moe_routing_bench.report import section_tables
from moe_routing_bench.store import paths
from moe_routing_kernels.errors import UserError

ROOT = Path(__file__).parents[2]
SIZES = {"hidden": 2048, "intermediate": 768, "experts": 128, "top_k": 8}
FORMATS = {"dtype": "bf16", "weights": "bf16", "packed": "bf16"}
SOURCE = {"title": "theirs", "source": "a wheel", "version": "1", "licence": "MIT", "author": "they"} | {
    "hardware": "NVIDIA H200",
    "bench": "layer",
    "boundary": "all",
    "mode": "warm",
    "mode_note": "",
    "within": 0.1,
    "kernels": {"fast": {"implementation": "sonicmoe", "differs": "a gate"}, "gone": {"lacks": "a GPU of theirs"}},
}
PUBLISHED = (
    SIZES
    | FORMATS
    | {"model": "qwen3-30b-a3b", "tokens": 64, "median_us": 100.0}
    | {
        "package": "sonic",
        "version": "2",
        "kernel": "fast",
        "tensor_parallel": 1,
        "expert_parallel": 1,
        "loads": "balanced",
    }
)
SEEN = {"gpu_name": "NVIDIA H200", "skew": 0.0, "started_at": "2026-11-28", "git_sha": "a" * 40, "git_dirty": False}
OURS = {**SIZES, **FORMATS, **SEEN, "activation": "swiglu", "model": "qwen3-30b-a3b", "phase": "decode", "tokens": 64}


def ours(name: str, us: float | None, **values: object) -> dict[str, object]:
    return one("layer", name, **{"cell": "a", "median_us": us, "warm_median_us": us, **OURS, **values})


def matched(*rows: dict[str, object], **values: object) -> pd.DataFrame:
    source = claims.Source(**SOURCE)
    return published_rows.matched(source, pd.DataFrame([PUBLISHED | values]), frame(*rows))


@pytest.mark.parametrize(
    ("us", "status", "ratio"),
    [
        (109.0, published_rows.REPRODUCED, 1.09),
        (91.0, published_rows.REPRODUCED, 0.91),
        (111.0, published_rows.NOT, 1.11),
        (89.0, published_rows.NOT, 0.89),
    ],
)
def test_the_same_kernel_is_compared_with_its_warm_time(us: float, status: str, ratio: float) -> None:
    row = ours("sonicmoe", 500.0, implementation_version="3") | {"warm_median_us": us}
    (line,) = matched(row, ours("cute", 80.0)).to_dict("records")
    assert (line["status"], line["ratio"], line["why"]) == (status, pytest.approx(ratio), "version 3 here; a gate")
    assert (line["ours"], line["ours_us"]) == ("cute", 80.0)


@pytest.mark.parametrize(
    ("rows", "values", "status", "why"),
    [
        ([ours("cute", 80.0)], {}, published_rows.NO_ROW, ""),
        ([ours("cute", 80.0)], {"kernel": "gone"}, published_rows.NO_IMPLEMENTATION, "a GPU of theirs"),
        (
            [ours("sonicmoe", None, status="unsupported", reason="k")],
            {},
            published_rows.NO_TIME,
            "unsupported: k",
        ),
    ],
)
def test_what_has_no_time_here_says_why(rows, values, status, why) -> None:
    (line,) = matched(*rows, **values).to_dict("records")
    assert (line["status"], line["why"]) == (status, why) and pd.isna(line["ratio"])


@pytest.mark.parametrize(
    "other",
    [
        {"tokens": 8},
        {"hidden": 4096},
        {"weights": "int4_g128"},
        {"packed": "fp8_row"},
        {"model": "mixtral-8x7b"},
        {"gpu_name": "NVIDIA H100"},
        {"skew": 0.7},
        {"capacity_factor": 1.25},
        {"shared_intermediate": 512},
        {"tp": 2},
        {"ep": 8},
    ],
)
def test_rows_of_other_cells_are_not_compared(other: dict[str, object]) -> None:
    assert matched(ours("sonicmoe", 100.0, **other)).empty


@pytest.mark.parametrize("spread", [{"tensor_parallel": 2}, {"expert_parallel": 8}, {"loads": "power_law_1.2"}])
def test_ranks_and_uneven_loads_are_kept_as_data(spread: dict[str, object]) -> None:
    assert matched(ours("sonicmoe", 100.0), **spread).empty


def test_a_tensor_parallel_rank_is_compared_with_one_of_as_many() -> None:
    """Its width is a part of the model's in both."""
    rank = {"intermediate": 384, "tensor_parallel": 2}
    (line,) = matched(ours("sonicmoe", 100.0, intermediate=384, tp=2), **rank).to_dict("records")
    assert line["status"] == published_rows.REPRODUCED
    assert matched(ours("sonicmoe", 100.0, intermediate=384, tp=4), **rank).empty
    path = next(iter(claims.load_published(ROOT / paths.OTHERS)))
    rows = published_rows.read(path)
    ranks = rows[(rows["tensor_parallel"] > 1) & (rows["expert_parallel"] == 1)]
    assert len(ranks) > 40 and set(ranks["model"]) == {"qwen3-30b-a3b", "deepseek-v3"}


def test_the_share_counts_what_has_a_row_of_the_same_kernel() -> None:
    """Of three compared rows two are reproduced; a fourth has no row, which is no failure."""
    source = claims.Source(**SOURCE)
    theirs = pd.DataFrame(
        [PUBLISHED | {"tokens": tokens, "median_us": us} for tokens, us in ((1, 1), (2, 1), (3, 9), (4, 1))]
    )
    rows = [ours("sonicmoe", 1.0, tokens=tokens, cell=str(tokens)) for tokens in (1, 2, 3)]
    lines = published_rows.matched(source, theirs, frame(*rows, ours("cute", 1.0, tokens=4)))
    assert published_rows.summary(lines) == {"matched": 4, "compared": 3, "reproduced": 2}
    assert "67 %" in published_rows.sentence(source, theirs, lines)


def test_a_kernel_of_an_unknown_name_is_refused() -> None:
    with pytest.raises(UserError, match="kernels"):
        matched(ours("sonicmoe", 1.0), kernel="slow")


@pytest.mark.parametrize(
    ("kernel", "got"), [({}, "neither"), ({"implementation": "sonicmoe", "lacks": "a GPU"}, "both")]
)
def test_a_kernel_has_an_implementation_or_lacks_something(kernel, got, tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text(yaml.safe_dump(SOURCE | {"kernels": {"fast": kernel}}))
    with pytest.raises(UserError, match=r"no a\.csv"):
        claims.load_published(tmp_path)
    (tmp_path / "a.csv").touch()
    with pytest.raises(UserError, match=got):
        claims.load_published(tmp_path)


def test_the_stored_rows_are_foreign_rows_of_the_sizes_of_presets() -> None:
    """At least 300 rows of whole layers; `report --rows` takes the file; each kernel is known."""
    models = presets.load(ROOT / paths.MODELS)
    for path, source in claims.load_published(ROOT / paths.OTHERS).items():
        assert len(foreign.read_csv(path)) == len(pd.read_csv(path))
        rows = published_rows.comparable(published_rows.read(path))
        assert len(rows) >= 300
        for row in rows.to_dict("records"):
            sizes = presets.values(models[row["model"]])
            whole = row | {"intermediate": row["intermediate"] * row["tensor_parallel"]}
            assert all(whole[name] == sizes[name] for name in SIZES), row
            assert source.kernel(row["kernel"], row["weights"])


def test_a_report_shows_them_where_it_has_such_cells() -> None:
    rows = frame(ours("cute", 80.0))
    (table,) = section_tables.published(rows)
    assert len(table.rows) >= 3 and all(row[:3] == ["qwen3-30b-a3b", "64", "bf16"] for row in table.rows)
    assert section_tables.published(frame(ours("cute", 80.0, tokens=65))) == []


def test_of_two_rows_of_a_cell_the_later_counts() -> None:
    early = ours("sonicmoe", 200.0, implementation_version="3", started_at="2026-11-27T00:00:00+00:00")
    late = ours("sonicmoe", 100.0, implementation_version="3", started_at="2026-11-28T00:00:00+00:00")
    for pair in ((early, late), (late, early)):
        (line,) = matched(*pair).to_dict("records")
        assert (line["status"], line["ratio"]) == (published_rows.REPRODUCED, pytest.approx(1.0))
