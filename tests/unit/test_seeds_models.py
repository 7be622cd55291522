"""The report of seed 003's whole models and of its dispatcher: a line for everything that was asked for, also for what has no time."""

from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import rows as synthetic

from moe_routing_bench.comparison import anomalies
from moe_routing_bench.config import presets
from moe_routing_bench.config.expand import expand
from moe_routing_bench.config.load import load, on
from moe_routing_bench.report.parts import ABSENT
from moe_routing_bench.report.seeds.section import section
from moe_routing_kernels.formats.weights import WEIGHTS

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
MODELS = presets.load(ROOT / "config/models.yaml")
FAST = {
    "transformers_grouped_mm": 8000.0,
    "ops": 5000.0,
    "cute_quantised": 4000.0,
    "torch_grouped_mm": 900.0,
    "cute": 600.0,
}


def rows(config: str, platform: str) -> pd.DataFrame:
    """A row for each implementation of each cell: prefill takes ten times as long as decoding, other implementations 20 ms."""
    found = []
    for job in expand(on(load(ROOT / f"config/seeds/{config}.yaml"), platform), MODELS):
        cell = job.cell
        if cell.bench not in ("model", "layer"):
            continue
        for name in job.implementations:
            us = FAST.get(name, 20000.0) * (10 if cell.phase == "prefill" else 1)
            needs = {"compulsory_bytes": 10**6, "flops": 10**6, "q1_us": us, "q3_us": us * 1.01}
            told = {"gpu_name": "NVIDIA H200", "configuration": "cute; tiles" if name == "auto" else ""}
            found.append(
                synthetic.one(cell.bench, name, **dict(cell.values), cell=cell.key, median_us=us, **needs, **told)
            )
    return synthetic.frame(*found)


def lines(table) -> list[dict[str, str]]:
    """The rows of a table by the headings of its columns."""
    headings = [name for group in table.groups for name in group.columns]
    return [dict(zip(headings, row, strict=True)) for row in table.rows]


def models(found: pd.DataFrame) -> list[dict[str, str]]:
    (table,) = section(found, "seed-003-models").tables
    return lines(table)


def dispatch(found: pd.DataFrame) -> list[dict[str, str]]:
    return lines(section(found, "seed-003-layers").tables[-1])


def test_every_model_format_and_implementation_has_a_line_with_both_phases():
    found = models(rows("003-models", "nvidia-h200"))
    assert len(found) == 2 * 2 * (4 + 2 * 4)
    assert {(one["model"], one["activations"]) for one in found} == {
        (name, dtype) for name in ("qwen1.5-moe-a2.7b", "deepseek-v2-lite") for dtype in ("fp16", "bf16")
    }
    ours = [one for one in found if one["implementation"] == "cute_quantised"]
    assert {one["weights"] for one in ours} == {"int8_g128", "int4_g128"}
    for one in ours:
        assert (one["prefill ms"], one["decode ms per token"], one["tokens/s"]) == ("40", "4", "250")
        assert (one["prefill, speed-up"], one["decode, speed-up"], one["within the guard"]) == ("2x", "2x", "yes")
        assert (one["guard of decoding: at most"], one["not measured, because"]) == ("2x", ABSENT)
    slow = [one for one in found if one["implementation"] == "dequant"]
    assert {(one["decode, speed-up"], one["within the guard"]) for one in slow} == {("0.4x", "no")}
    plain = [one for one in found if one["implementation"] == "ops"]
    assert {
        (one["decode, speed-up"], one["within the guard"], one["weights"] == one["activations"]) for one in plain
    } == {("1.6x", ABSENT, True)}


def test_the_guard_is_of_decoding_alone():
    """A kernel that is slow in one phase is slow there: 8 ms a token at full precision, 4 with it."""
    table = rows("003-models", "nvidia-h200")
    for phase, said in (("prefill", "yes"), ("decode", "no")):
        slow = (table["implementation"] == "cute_quantised") & (table["phase"] == phase)
        found = models(table.assign(median_us=table["median_us"].mask(slow, 1e6)))
        mine = [one for one in found if one["implementation"] == "cute_quantised"]
        assert mine and {one["within the guard"] for one in mine} == {said}


def test_full_precision_is_the_fastest_of_the_librarys_own_forms_phase_by_phase():
    found = rows("003-models", "nvidia-h200")
    prefill = (found["implementation"] == "transformers_batched_mm") & (found["phase"] == "prefill")
    found.loc[prefill, "median_us"] = 20000.0
    ours = [one for one in models(found) if one["implementation"] == "cute_quantised"]
    assert {(one["prefill, speed-up"], one["decode, speed-up"]) for one in ours} == {("0.5x", "2x")}


def test_what_has_no_time_says_why_and_a_phase_in_doubt_is_named():
    found = rows("003-models", "cpu")
    lacking = found["implementation"].isin(["cute_quantised", "dequant_cute"])
    found.loc[lacking, ["status", "reason", "median_us"]] = ["unsupported", "needs an NVIDIA GPU", None]
    found.loc[(found["implementation"] == "dequant") & (found["phase"] == "decode"), "anomaly"] = "too long"
    told = models(found)
    assert {one["model"] for one in told} == {"H=128, I=88, E=60, k=4"}
    why = {one["implementation"]: one["not measured, because"] for one in told}
    assert (
        why["cute_quantised"] == why["dequant_cute"] == "unsupported: needs an NVIDIA GPU" and why["dequant"] == ABSENT
    )
    assert {one["implementation"]: one["in doubt"] for one in told if one["in doubt"] != ABSENT} == {
        "dequant": "decode"
    }
    assert {one["prefill ms"] for one in told if one["implementation"] == "cute_quantised"} == {ABSENT}
    assert "a sixteenth" in section(found, "seed-003-models").tables[0].note


@pytest.mark.parametrize("config", ["003-layers", "003-models"])
def test_a_time_that_is_off_by_a_factor_of_a_thousand_is_caught_wherever_it_is(config: str):
    """Each quantised row of models and layers, one at a time; the honest rows around it are not doubted, and neither are they without it."""
    found = rows(config, "nvidia-h200")
    assert anomalies.found(found).isna().all()
    quantised = found.index[found["weights"].isin(WEIGHTS)]
    for index in np.random.default_rng(3).choice(quantised, 12, replace=False):
        planted = found.copy()
        planted.loc[index, ["median_us", "q1_us", "q3_us"]] *= 1000
        said = anomalies.found(planted).dropna()
        assert list(said.index) == [index]
        if config == "003-models":
            told = [line["in doubt"] for line in models(planted.assign(anomaly=anomalies.found(planted)))]
            assert [one for one in told if one != ABSENT] == [found.loc[index, "phase"]]


def test_strategies_of_the_dispatcher_are_made_of_rows():
    """Where one implementation is fastest in prefill and another in decoding, as `always` this or that is slow in the other phase."""
    found = rows("003-layers", "nvidia-h200")
    chosen = found["weights"] == "int4_g128"
    found.loc[chosen & (found["implementation"] == "cute_dequant") & (found["phase"] == "prefill"), "median_us"] = (
        1000.0
    )
    found.loc[chosen & (found["implementation"] == "auto"), "median_us"] = [7000.0] * int(
        (chosen & (found["implementation"] == "auto")).sum()
    )
    told = [
        one
        for one in dispatch(found)
        if (one["model"], one["activations"], one["weights"]) == ("deepseek-v2-lite", "bf16", "int4_g128")
    ]
    assert [one["strategy"] for one in told] == [
        "always_prefill",
        "always_decode",
        "manual_branch",
        "unified_auto",
        "unified_hinted",
    ]
    prefill, decode, manual, auto, hinted = told
    assert (prefill["prefill by"], prefill["decode by"], prefill["prefill + 32 x decode, ms"]) == (
        "cute_dequant",
        "cute_dequant",
        "641",
    )
    assert (decode["prefill by"], decode["decode µs"], decode["prefill + 32 x decode, ms"]) == (
        "cute_quantised",
        "4,000",
        "168",
    )
    assert (manual["prefill by"], manual["decode by"], manual["over manual_branch"]) == (
        "cute_dequant",
        "cute_quantised",
        "1x",
    )
    assert (auto["prefill by"], auto["over manual_branch"]) == ("auto: cute", "1.791x")
    assert hinted["prefill by"] == hinted["decode by"] == "cute_quantised", (
        "as in the cells of the table that have quantised weights"
    )


def test_what_auto_alone_ran_takes_part():
    """Where nothing else ran, every strategy has the implementation that the row of `auto` names."""
    found = rows("003-layers", "nvidia-h200")
    found.loc[found["implementation"] == "auto", ["median_us", "configuration"]] = [100.0, "cute_dependent; tiles"]
    told = [one for one in dispatch(found) if (one["model"], one["weights"]) == ("deepseek-v2-lite", "bf16")]
    assert [one["prefill by"] for one in told] == [*["cute_dependent"] * 3, "auto: cute_dependent", "cute_dependent"]
    assert {one["decode µs"] for one in told} == {"100"}
    found.loc[found["implementation"] == "auto", "configuration"] = "cute"
    found.loc[found["implementation"] == "cute", ["status", "reason", "median_us"]] = ["crashed", "killed", None]
    told = [one for one in dispatch(found) if (one["model"], one["weights"]) == ("deepseek-v2-lite", "bf16")]
    assert {(one["prefill by"], one["decode µs"]) for one in told[:3]} == {("cute", "100")}, "its own row has no time"


def test_a_strategy_without_a_time_says_why():
    found = rows("003-layers", "cpu")
    found.loc[found["implementation"] == "auto", ["status", "reason", "median_us"]] = ["crashed", "out of memory", None]
    auto = [one for one in dispatch(found) if one["strategy"] == "unified_auto"]
    assert len(auto) == 3 and {one["model"] for one in auto} == {"H=128, I=88, E=60, k=4"}
    assert {(one["prefill by"], one["decode µs"], one["over manual_branch"]) for one in auto} == {
        ("auto, crashed: out of memory", ABSENT, ABSENT)
    }


def test_a_run_without_layers_has_no_dispatcher():
    found = rows("003-layers", "cpu")
    titles = [table.title for table in section(found, "seed-003-layers").tables]
    assert titles[-2:] == ["Layers of its two models", "A dispatcher between kernels"]
    decoding = found[found["phase"] == "decode"]
    assert [table.title for table in section(decoding, "seed-003-layers").tables][-1] == "Layers of its two models"
