"""The report of a seed's run: what was published on the left, what this run measured on the right, and nothing made of both."""

from pathlib import Path

import pandas as pd
import pytest
from rows import frame, one

from moe_routing_bench.config import presets
from moe_routing_bench.config.expand import expand
from moe_routing_bench.config.load import load, on
from moe_routing_bench.report import seeds
from moe_routing_bench.report.parts import ABSENT, Group, Table
from moe_routing_bench.report.render import render
from moe_routing_bench.report.seeds.section import SOURCES, section

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
CONFIGS = sorted((ROOT / "config/seeds").glob("*.yaml"))
MODELS = presets.load(ROOT / "config/models.yaml")


def cells(config: Path, platform: str) -> list:
    return [job.cell for job in expand(on(load(config), platform), MODELS)]


def layers(platform: str, times: dict[str, float], **values) -> pd.DataFrame:
    """Rows of every cell of seed 000, with these times."""
    return frame(
        *(
            one(
                "layer",
                name,
                **dict(cell.values),
                cell=cell.key,
                median_us=us,
                max_abs_error=2e-6,
                gpu_name="NVIDIA H200",
            )
            | values
            for cell in cells(ROOT / "config/seeds/000.yaml", platform)
            for name, us in times.items()
        )
    )


def lines(table) -> list[dict[str, str]]:
    """The rows of a table by the headings of its columns, of which the second of one name counts."""
    return [
        dict(zip([name for group in table.groups for name in group.columns], row, strict=True)) for row in table.rows
    ]


@pytest.mark.parametrize("config", CONFIGS, ids=lambda path: path.stem)
def test_every_seed_is_a_config_of_its_own_run_with_fewer_or_smaller_cells_on_a_cpu(config):
    assert load(config)["run"] == f"seed-{config.stem}" and SOURCES[config.stem] in seeds.sources()
    here, there = ({cell.key for cell in cells(config, name)} for name in ("cpu", "nvidia-h200"))
    assert here and here != there


@pytest.mark.parametrize(("platform", "divided"), [("cpu", True), ("nvidia-h200", False)])
def test_each_of_the_ten_shapes_of_000_meets_its_own_cell(platform, divided):
    table = section(
        layers(platform, {"torch_loop": 300.0, "torch_gather_loop": 100.0, "transformers_eager": 150.0}), "seed-000"
    ).tables[0]
    assert [line["test"] for line in lines(table)] == [str(i) for i in range(1, 11)]
    for line in lines(table):
        assert (line["torch_loop µs"], line["fastest other"], line["µs"]) == ("300", "torch_gather_loop", "100")
        assert (line["by their formula"], line["naive / other"], line["allclose"]) == ("200 %", "3x", "yes")
    assert lines(table)[0]["their speed-up"] == "1628.55 %" and lines(table)[0]["naive / custom"] == "17.29x"
    assert ("divided by 16" in table.note) == divided


def test_a_gpu_has_a_table_in_bf16_too():
    found = section(layers("nvidia-h200", {"torch_loop": 300.0, "cute": 100.0}), "seed-000").tables
    assert [table.title[:23] for table in found] == ["Ten shapes in fp32, the", "Ten shapes in bf16, the"]


def test_what_did_not_run_has_no_time_and_an_error_that_is_too_large_tells_nothing():
    rows = layers("cpu", {"torch_loop": 300.0, "torch_gather_loop": 100.0}, max_abs_error=2e-5)
    rows.loc[rows["implementation"] == "torch_gather_loop", ["status", "median_us"]] = ["crashed", None]
    first = lines(section(rows, "seed-000").tables[0])[0]
    assert first["torch_loop µs"] == "300" and {first[name] for name in ("fastest other", "µs", "naive / other")} == {
        ABSENT
    }
    assert first["allclose"] == "not told by the largest error"


def test_sizes_that_are_not_all_divided_by_one_number_are_of_another_shape():
    known = {"hidden": 7168, "intermediate": 256}
    assert seeds.divisor(known, {"hidden": 448, "intermediate": 16}) == 16
    for other in (
        {"hidden": 448, "intermediate": 32},
        {"hidden": 14336, "intermediate": 512},
        {"hidden": 5000, "intermediate": 16},
    ):
        assert seeds.divisor(known, other) is None


def test_other_runs_have_no_such_section(tmp_path):
    rows = layers("cpu", {"torch_loop": 300.0})
    assert section(rows, "layers") is None and section(rows, "") is None
    for run, there in (("layers", False), ("seed-000", True)):
        render(rows, {}, tmp_path / "index.html", run=run)
        assert ('id="seeds"' in (tmp_path / "index.html").read_text()) == there


def profile(dtype: str, *names: str) -> dict:
    """A profile of a cell of seed 004 at an eighth of its size: two operators each, and one that failed."""
    operator = {
        "operator": "aten::mm",
        "kind": "operator",
        "self_cpu_us": 7.0,
        "cpu_total_us": 8.0,
        "self_device_us": 5.0,
        "device_total_us": 5.0,
        "calls": 9,
    }
    ran = {
        "self_cpu_us": 70.0,
        "self_device_us": 50.0,
        "operators": [operator, operator | {"operator": "k", "kind": "kernel"}],
    }
    pairs = [{"first": a, "second": b, "max_diff": 1e-7} for a in names for b in names if a < b]
    axes = {"dtype": dtype, "hidden": 256, "intermediate": 176}
    found = dict.fromkeys(names, ran) | {"cute_gather": {"error": "no kernel"}}
    return {"cell": "c", "axes": axes, "implementations": found, "differences": pairs}


def test_each_block_of_004_stands_beside_what_was_profiled_for_it():
    rows = frame(one("layer", "torch_loop", cell="c", median_us=33.0, cpu_model="C"))
    profiles = [profile("fp32", "transformers_eager", "torch_loop", "torch_gather_loop")]
    totals, *operators = section(rows, "seed-004", profiles).tables
    eager, manual, fused = totals.rows
    assert eager == ["eager", "4,227,000", "4,234,000", ABSENT, "transformers_eager", "70", "50", ABSENT, ABSENT]
    assert manual == ["manual", "829,292", "849,695", "1.77e-08", "torch_loop", "70", "50", "1e-07", "33"]
    assert fused[4] == "torch_gather_loop", "cute_gather failed"
    assert "divided by 8" in totals.note
    assert [table.title for table in operators] == [
        f"Operators of the {name} block, fp32" for name in ("eager", "manual", "cuda")
    ]
    first, second, third, *_ = operators[0].rows
    assert first == ["1", "aten::index_add_", "1,074", "355", "64", "aten::mm", "7", "5", "9"]
    assert (
        second[1] == "aten::scatter_add_"
        and second[5] == "k"
        and third[5:] == [ABSENT] * 4
        and len(operators[0].rows) == 10
    )


def test_a_block_for_which_nothing_was_profiled_has_no_operators():
    rows = frame(one("layer", cell="c", cpu_model="C"))
    totals, only = section(rows, "seed-004", [profile("fp32", "torch_loop")]).tables
    assert only.title == "Operators of the manual block, fp32"
    assert [line["implementation"] for line in lines(totals)] == [ABSENT, "torch_loop", ABSENT]


def test_a_column_of_numbers_is_told_from_one_of_texts():
    rows = [["1,234", "torch 5 µs", "17.3x", "-92.48 %", ABSENT], ["1e-07", ABSENT, ABSENT, "3 µs", ABSENT]]
    table = Table("t", (Group("a", ("b", "c")), Group("d", ("e", "f", "g"))), rows)
    assert table.columns == [("b", "n"), ("c", ""), ("e", "n"), ("f", "n"), ("g", "n")]
    assert Table("t", (Group("a", ("b",)),)).columns == [("b", "n")]
    assert Table("t", (Group("a", ("b",)),), [["x" * 33], ["1"]]).columns == [("b", "wide")]
