"""What the page of a report is given of its rows: ids, commands that measure the same cell again, every field in few bytes."""

import json
import sys
from pathlib import Path

import pandas as pd
import pytest
from rows import frame, one, rows

from moe_routing_bench.answers.command import again
from moe_routing_bench.cli import main as cli
from moe_routing_bench.cli import report
from moe_routing_bench.config import axes
from moe_routing_bench.config.expand import expand
from moe_routing_bench.config.load import load
from moe_routing_bench.config.presets import load as presets
from moe_routing_bench.measure import supervisor
from moe_routing_bench.report import packing
from moe_routing_bench.report import row_data as pages
from moe_routing_bench.report.row_fields import LEFT_OUT, fields
from moe_routing_bench.store.records import COLUMNS
from moe_routing_bench.study import last

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
GRID = [
    {"benches": ["gate", "pack"], "tokens": [64], "hidden": [64], "experts": [8], "top_k": [2]},
    {"benches": ["gate"], "tokens": [64], "experts": [32], "top_k": [1], "router": ["llama4"], "dtype": ["fp32"]},
    {
        "benches": ["pack"],
        "tokens": [64],
        "hidden": [64],
        "experts": [8],
        "top_k": [2],
        "capacity_factor": [1.25],
        "skew": [0.7],
        "sampler": ["plackett_luce"],
        "layout": ["padded"],
        "packed": ["fp8_row"],
    },
    {
        "benches": ["permute"],
        "tokens": [512],
        "experts": [32],
        "top_k": [2],
        "sampler": ["trace"],
        "trace": "config/traces/softk-e32-k2.parquet",
    },
    {"benches": ["layer"], "model": ["qwen3-30b-a3b", "gpt-oss-120b"], "tokens": [1], "phase": "decode"},
]


@pytest.fixture
def measured(monkeypatch):
    """The job of a command line, which is not measured."""
    monkeypatch.chdir(ROOT)
    found = []

    def run(line):
        monkeypatch.setattr(supervisor, "measure", lambda job, *_: found.append(job) or [])
        monkeypatch.setattr(sys, "argv", line)
        with pytest.raises(SystemExit) as caught:
            cli.main()
        assert not caught.value.code, line
        return found.pop()

    return run


def _jobs():
    return expand(load({"grid": GRID, "seed": 3}), presets(ROOT / "config/models.yaml"))


def test_a_command_measures_the_same_cell(measured, monkeypatch):
    """Sizes, models, formats, samplers, recorded routing; the other implementations are those of the row's ratios."""
    monkeypatch.chdir(ROOT)
    jobs = _jobs()
    assert len(jobs) == 7
    for job in jobs:
        first, *others = job.implementations
        row = one(
            job.cell.bench, first, **dict(job.cell.values), best_other=others[-1], best_speedup=2.0, cell=job.cell.key
        )
        (record,) = frame(row).to_dict("records")
        program, *arguments = again(record).split()
        assert program == "moe-routing-bench"
        found = measured([program, *arguments])
        assert found.cell == job.cell
        assert set(found.implementations) == {first, others[-1]}


def test_a_command_says_no_more_than_it_must():
    row = one(
        "gate",
        "cute",
        tokens=64,
        experts=8,
        top_k=2,
        router="softmax_topk_renorm",
        dtype="bf16",
        phase="prefill",
        seed=17,
    )
    (record,) = frame(row).to_dict("records")
    assert again(record) == "moe-routing-bench measure gate --implementations cute --tokens 64 --experts 8 --top-k 2"
    (compared,) = frame(row | {"speedup": 2.0}).to_dict("records")
    assert " --implementations cute,torch " in again(compared)


def test_a_command_says_other_threads_than_the_usual_ones_of_a_cpu():
    """A GPU's time does not depend on them."""
    sizes = {"tokens": 64, "experts": 8, "top_k": 2}
    for platform, threads, said in (("cpu", 4, True), ("cpu", 1, False), ("nvidia-h200", 32, False)):
        (record,) = frame(one("gate", "torch", platform=platform, cpu_threads=threads, **sizes)).to_dict("records")
        assert again(record).endswith(" --cpu-threads 4") == said


def test_a_command_names_the_modules_of_other_packages():
    """Of every implementation that it compares."""
    row = one("pack", "cute", best_other="mine", best_speedup=2.0, tokens=64)
    table = frame(row, one("pack", "mine", plugin="made.kernels:PACK"), one("pack", "torch"))
    compared, own, other = pages.page_data(table)["commands"].value["each"]
    assert " --implementations cute,mine --plugin made.kernels --tokens" in compared
    assert " --implementations mine --plugin made.kernels" in own and "--plugin" not in other


def test_a_command_names_the_file_of_a_preset_of_one_s_own():
    """Of rows of that preset alone."""
    table = frame(*(one("gate", "torch", model=name, tokens=64) for name in ("my-moe", "mixtral-8x7b", None)))
    own, shipped, none = pages.page_data(table, {"my-moe": "my models.yaml"})["commands"].value["each"]
    assert " --models 'my models.yaml' --model my-moe" in own
    assert "--models" not in shipped + none and " --model mixtral-8x7b" in shipped


def test_the_file_of_own_presets_is_the_one_that_the_workflow_was_run_with(tmp_path, monkeypatch):
    """What is in the project's file as well is left out: `measure` finds it anyway."""
    preset = (ROOT / "config/models.yaml").read_text().partition("mixtral-8x7b:\n")[2].partition("\n\n")[0]
    (tmp_path / "mine.yaml").write_text(f"my-moe:\n{preset}\n")
    monkeypatch.chdir(tmp_path)
    assert report._own_presets("cpu") == {}
    kept = last("cpu")
    kept.parent.mkdir(parents=True)
    kept.write_text(json.dumps({"models": "mine.yaml"}))
    assert report._own_presets("cpu") == {"my-moe": "mine.yaml"}


def test_a_command_quotes_what_a_shell_would_read(measured):
    row = one("gate", "cute", tokens=64, experts=8, top_k=2, trace="a; rm $(b)")
    (record,) = frame(row).to_dict("records")
    assert again(record).endswith("--trace 'a; rm $(b)'")


def test_ids_are_of_cell_and_implementation_alone():
    table = rows()
    ids = [pages.row_id(record) for record in table.to_dict("records")]
    assert len(set(ids)) == len(ids) and all(len(one) == 10 for one in ids)
    later = table.assign(median_us=1.0, git_sha="f", started_at="x")
    assert [pages.row_id(record) for record in later.to_dict("records")] == ids


def test_a_row_opens_to_every_field_but_the_lists():
    names = [one["name"] for one in fields()]
    assert sorted([*names, *LEFT_OUT]) == sorted(COLUMNS)
    assert all(one["says"] for one in fields()) and set(axes.AXES) <= set(names)


@pytest.mark.parametrize(
    "values", [[1, 1, 1], [None, None], [1, True, 1.5], ["long text", "long text", "b"], [{"a": 1}, None]]
)
def test_packed_columns_hold_the_values(values):
    found = pages.packed(values)
    if "all" in found:
        back = [found["all"]] * len(values)
    else:
        back = found.get("each") or [found["of"][place] for place in found["at"]]
    assert json.dumps(back) == json.dumps(values)


def test_plain_values():
    (record,) = frame(one("layer", stage_us=[("gate", 1.23456789), ("pack", 2.0)], check_nonce=2**60)).to_dict(
        "records"
    )
    assert packing.plain(record["stage_us"]) == {"gate": 1.2346, "pack": 2}
    assert packing.plain(record["check_nonce"]) == str(2**60)
    assert packing.plain(float("inf")) is None and packing.plain(pd.NA) is None
