"""The report of a seed's run: what was published on the left, what this run measured on the right, and nothing made of both."""

from pathlib import Path

import pandas as pd
import pytest
from rows import frame, one

from moe_routing_bench.config import presets
from moe_routing_bench.config.expand import expand
from moe_routing_bench.config.load import load, on
from moe_routing_bench.report.render import render
from moe_routing_bench.report.seeds import published
from moe_routing_bench.report.seeds.section import section
from moe_routing_bench.report.seeds.tables import ABSENT

ROOT = Path(__file__).parents[2]
CONFIGS = sorted((ROOT / "config/seeds").glob("*.yaml"))
MODELS = presets.load(ROOT / "config/models.yaml")


def cells(config: Path, platform: str) -> list:
    return [job.cell for job in expand(on(load(config), platform), MODELS)]


def layers(platform: str, times: dict[str, float], **values) -> pd.DataFrame:
    """Rows of every cell of seed 000, with these times."""
    return frame(*(
        one("layer", name, **dict(cell.values), cell=cell.key, median_us=us, max_abs_error=2e-6, gpu_name="NVIDIA H200") | values
        for cell in cells(ROOT / "config/seeds/000.yaml", platform) for name, us in times.items()
    ))  # fmt: skip


def lines(table) -> list[dict[str, str]]:
    """The rows of a table by the headings of its columns, of which the second of one name counts."""
    return [
        dict(zip([name for group in table.groups for name in group.columns], row, strict=True)) for row in table.rows
    ]


@pytest.mark.parametrize("config", CONFIGS, ids=lambda path: path.stem)
def test_every_seed_is_a_config_of_its_own_run_with_fewer_or_smaller_cells_on_a_cpu(config):
    assert load(config)["run"] == f"seed-{config.stem}" and config.stem in published.sources()
    here, there = ({cell.key for cell in cells(config, name)} for name in ("cpu", "nvidia-h200"))
    assert here and here != there


@pytest.mark.parametrize(("platform", "divided"), [("cpu", True), ("nvidia-h200", False)])
def test_each_of_the_ten_shapes_of_000_meets_its_own_cell(platform, divided):
    table = section(layers(platform, {"torch_loop": 300.0, "torch_gather_loop": 100.0, "transformers_eager": 150.0}), "seed-000")["tables"][0]  # fmt: skip
    assert [line["test"] for line in lines(table)] == [str(i) for i in range(1, 11)]
    for line in lines(table):
        assert (line["torch_loop µs"], line["fastest other"], line["µs"]) == ("300", "torch_gather_loop", "100")
        assert (line["by their formula"], line["naive / other"], line["allclose"]) == ("200 %", "3x", "yes")
    assert lines(table)[0]["their speed-up"] == "1628.55 %" and lines(table)[0]["naive / custom"] == "17.29x"
    assert ("divided by 16" in table.note) == divided


def test_a_gpu_has_a_table_in_bf16_too():
    found = section(layers("nvidia-h200", {"torch_loop": 300.0, "cute": 100.0}), "seed-000")["tables"]
    assert [table.title[:23] for table in found] == ["Ten shapes in fp32, the", "Ten shapes in bf16, the"]


def test_what_did_not_run_has_no_time_and_an_error_that_is_too_large_tells_nothing():
    rows = layers("cpu", {"torch_loop": 300.0, "torch_gather_loop": 100.0}, max_abs_error=2e-5)
    rows.loc[rows["implementation"] == "torch_gather_loop", ["status", "median_us"]] = ["crashed", None]
    first = lines(section(rows, "seed-000")["tables"][0])[0]
    assert first["torch_loop µs"] == "300" and {first[name] for name in ("fastest other", "µs", "naive / other")} == {
        ABSENT
    }
    assert first["allclose"] == "not told by the largest error"


def test_sizes_that_are_not_all_divided_by_one_number_are_of_another_shape():
    known = {"hidden": 7168, "intermediate": 256}
    assert published.divisor(known, {"hidden": 448, "intermediate": 16}) == 16
    for other in (
        {"hidden": 448, "intermediate": 32},
        {"hidden": 14336, "intermediate": 512},
        {"hidden": 5000, "intermediate": 16},
    ):
        assert published.divisor(known, other) is None


def test_other_runs_have_no_such_section(tmp_path):
    rows = layers("cpu", {"torch_loop": 300.0})
    assert section(rows, "layers") is None and section(rows, "") is None
    for run, there in (("layers", False), ("seed-000", True)):
        render(rows, {}, tmp_path / "index.html", run=run)
        assert ('id="seeds"' in (tmp_path / "index.html").read_text()) == there
