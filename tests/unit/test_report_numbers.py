"""Numbers of pages and of replayed seed documents, each by itself: which row, over which, in what unit, of values that all differ."""

import math
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
from rows import frame, one

from moe_routing_bench.comparison import claim_verdicts, regret
from moe_routing_bench.config import claims
from moe_routing_bench.report import (
    packing,
    page,
    quantised_weights,
    render,
    row_data,
    run_pages,
    section_tables,
    seeds,
    site,
    words,
)
from moe_routing_bench.report.document import Dot
from moe_routing_bench.report.seeds import block_profiles, dispatch, kernels, models, predecessor, products
from moe_routing_kernels import choices


def both(name, one_us, other_us, **values):
    known = {"bench": "gate", "cell": "a", "label": "T8", "implementation": name, "doubt": False}
    for side, us in (("one", one_us), ("other", other_us)):
        known |= {f"median_us_{side}": us, f"ci_low_us_{side}": us - 1, f"ci_high_us_{side}": us + 3}
        known |= {f"best_verdict_{side}": "slower"}
    return known | values


def test_each_platform_has_its_own_fastest():
    """The ratio of both times, as wide as the intervals make it; a doubt about either is one."""
    rows = [
        both("cute", 10.0, 30.0, best_verdict_one="faster"),
        both("triton", 20.0, 5.0, best_verdict_other="faster", doubt=True),
        both("torch", 40.0, 50.0),
    ]
    (best,) = run_pages.cells(pd.DataFrame(rows)).to_dict("records")
    assert {name: best[name] for name in ("one", "other", "one_us", "other_us", "one_told", "other_told", "doubt")} == {
        **{"one": "cute", "other": "triton", "one_us": 10.0, "other_us": 5.0},
        **{"one_told": True, "other_told": True, "doubt": True},
    }
    assert (best["ratio"], best["low"], best["high"]) == (2.0, 9 / 8, 13 / 4)
    plain = run_pages.cells(pd.DataFrame([rows[0], rows[2]]))
    assert not plain["doubt"].any() and not plain["other_told"].any()


def test_in_how_many_cells_both_runs_agree():
    best = pd.DataFrame(
        [
            ("a", "a", True, True),
            ("a", "a", True, True),
            ("a", "b", True, True),
            ("a", "a", True, False),
            ("a", "b", False, True),
        ],
        columns=["one", "other", "one_told", "other_told"],
    )
    assert run_pages.agreed(best) == (
        "In 2 of 5 cells both runs tell the same implementation from the best other as the fastest; in 1 they tell different ones; in 2 at least one of them tells none (≈)."
    )
    assert run_pages.agreed(best.iloc[:2]).endswith("as the fastest.")


def test_ceilings_of_two_platforms_are_medians_and_their_ratio():
    """Above 1 where the other is faster; of those that both have."""
    left, right = (
        frame(*(one("gate", copy_gb_per_s=rate, launch_us=us) for rate, us in zip(rates, launches, strict=True)))
        for rates, launches in (((1000.0, 2000.0, 9000.0), (2.0, 2.0, 4.0)), ((4000.0, 5000.0, 6000.0), (None,) * 3))
    )
    assert run_pages.ceilings(left, right) == [("copy_gb_per_s", 2000.0, 5000.0, 2.5)]


def test_a_change_is_told_before_what_is_lost_or_the_same():
    verdicts = {"same": 1, "undecided": 1, "faster": 0, "slower": 0, run_pages.ONLY_BEFORE: 2, run_pages.ONLY_AFTER: 2}
    assert {name: run_pages._LATER.get(name, 0) for name in verdicts} == verdicts
    row = dict.fromkeys(("bench", "implementation", "cell", "verdict"), "x") | {"before_us": 2.0, "after_us": math.nan}
    found = run_pages._change(row | {"ratio": math.nan, "reason": None})
    assert (found["before_us"], found["after_us"], found["ratio"], found["reason"]) == ("2.000 µs", "–", "–", "")
    full = run_pages._change(row | {"ratio": 1.5, "ratio_ci_low": 1.25, "ratio_ci_high": 1.75, "reason": "r"})
    assert (full["ratio"], full["reason"]) == ("1.50x [1.25, 1.75]", "r")


def test_a_picture_has_the_largest_ratio_first(monkeypatch):
    drawn = []
    monkeypatch.setattr(
        run_pages.page, "picture", lambda dots, what, unit, reference: drawn.append((dots, what)) or "p"
    )
    rows = [("gate", "a", 1.0), ("gate", "b", 3.0), ("pack", "c", 9.0), ("gate", "d", 2.0)]
    best = pd.DataFrame(rows, columns=["bench", "label", "ratio"]).assign(
        low=lambda t: t["ratio"] - 0.5, high=lambda t: t["ratio"] + 2
    )
    assert run_pages._picture(best, "gate", "H100") == "p"
    assert drawn == [
        ([Dot("b", 3.0, 2.5, 5.0), Dot("d", 2.0, 1.5, 4.0), Dot("a", 1.0, 0.5, 3.0)], "times as fast on H100")
    ]


def test_formats_on_the_frontier():
    """None is as fast and as exact and better in one; equals stay, and what has no loss takes no part."""
    rows = [
        ("bf16", 10.0),
        ("int8_g128", 6.0),
        ("int4_g128", 4.0),
        ("int2_g128", 5.0),
        ("e4m3_g128", 6.0),
        ("nvfp4", 1.0),
    ]
    group = pd.DataFrame(
        [{"format": form, "weights": form, "dtype": "bf16", "packed": "bf16", "median_us": us} for form, us in rows]
    )
    losses = {
        (form, "bf16"): snr
        for form, snr in (("int8_g128", 40.0), ("int4_g128", 20.0), ("int2_g128", 10.0), ("e4m3_g128", 40.0))
    }
    assert quantised_weights._frontier(group, losses) == {"bf16", "int8_g128", "int4_g128", "e4m3_g128"}
    assert quantised_weights._frontier(group, {}) == set()
    for slower, snr, kept in ((6.5, 40.0, False), (6.0, 39.0, False), (6.0, 40.0, True), (5.9, 39.0, True)):
        other = group.assign(median_us=group["median_us"].where(group["format"] != "e4m3_g128", slower))
        found = quantised_weights._frontier(other, losses | {("e4m3_g128", "bf16"): snr})
        assert ("e4m3_g128" in found) == kept, "as exact and slower, or as fast and less exact, is beaten"
        assert found - {"e4m3_g128"} == {"bf16", "int8_g128", "int4_g128"}
    peers = pd.DataFrame({"implementation": ["a", "b"], "median_us": [30.0, 20.0]})
    assert (
        quantised_weights._against(peers, 8.0) == "2.50x b" and quantised_weights._against(peers.iloc[:0], 8.0) == "–"
    )


def shape(**values):
    sizes = {"tokens": 8, "experts": 4, "top_k": 2, "hidden": 64, "intermediate": 32, "activation": "swiglu"}
    formats = {"dtype": "bf16", "packed": "bf16", "weights": "bf16", "capacity_factor": None, "architecture": "sm_90"}
    return choices.Shape(**sizes | formats | values)


def test_a_choice_is_held_against_the_best_of_ours_and_of_all():
    """`auto` has a row of its own, whose regret is against the candidates; where it has none there is a dash."""
    times = {"cute": 10.0, "triton": 12.5, "sonicmoe": 8.0}
    why = {"cute": "it drifted", "triton": "it drifted", "sonicmoe": "others ran"}
    entry = choices.Entry("c", "prefill", shape(), times, suspect=why)
    made = (regret.Choice("triton", 0.25, 0.5625, None), regret.Choice("cute", 0.0, 0.25, "cute_gather"))
    line = regret.Line(entry, "cute", "sonicmoe", made)
    found = section_tables._choice(line, "layer T8", pd.Series({"c": 11.0, "d": 99.0}))
    assert (found.cell, found.key) == ("layer T8", "c")
    assert (found.best_own, found.best) == ("cute, 10 µs", "sonicmoe, 8 µs")
    assert found.choices == [("triton", "25.0%", "56.2%"), ("cute", "0.0%", "25.0%")] and found.auto == "10.0%"
    assert found.notes == "cute_gather has no time here; suspect: it drifted; suspect: others ran"
    assert section_tables._choice(line, "", pd.Series({"d": 99.0})).auto == "–"
    met = [regret.Summary("a", 3, mean, worst) for mean, worst in ((0.03, 0.15), (0.0301, 0.15), (0.03, 0.1501))]
    assert [section_tables._summary(one).met for one in met] == [True, False, False]
    one = section_tables._summary(met[1])
    assert (one.what, one.cells, one.mean, one.worst) == ("a", "3 cells", "3.0%", "15.0%")


def held(verdict, figure=2.0, ours=1.5, cells=3, unit="x", **values):
    known = {"id": "i", "who": "w", "source": "s", "statement": verdict, "boundary": "b", "within": 0.1}
    claim = claims.Claim(**known, figure=figure, unit=unit, not_runnable="no", **values)
    return claim_verdicts.Held(claim, verdict, ours, cells, "because")


def test_claims_that_rows_were_held_against_stand_in_the_order_of_verdicts():
    """First those that are not reproduced; without a cell there is nothing to show."""
    order = ("not reproduced", "reproduced", "not held", "held")
    given = [held(name) for name in ("held", "reproduced", "not held", "not reproduced")]
    found = section_tables.judged([*given, held("reproduced", cells=0), held("no rows", cells=0)])
    assert [one.verdict for one in found] == list(order) and {one.hardware for one in found} == {"not said"}
    one = section_tables.claim_line(held("held", 1234.5, float("nan"), 0, "us", hardware="H100"))
    assert (one.published, one.ours, one.cells, one.hardware, one.why) == ("1234.5\xa0µs", "–", "–", "H100", "because")
    one = section_tables.claim_line(held("held", 40, 41.238, 1, "%"))
    assert (one.published, one.ours, one.cells) == ("40\xa0%", "41.24\xa0%", 1)


def test_numbers_of_what_is_stored_with_rows_are_in_their_own_units():
    values = [(1234.5678, "us"), (0.126, "share"), (57.26, "%"), (1536.04, "MB"), (math.nan, "us")]
    assert [section_tables._number(*one) for one in values] == ["1,234.57 µs", "13%", "57.3 %", "1,536.0 MB", "–"]
    row = pd.Series(
        {
            "tokens": 4096.0,
            "hidden": 2048.0,
            "experts": math.nan,
            "top_k": 8.0,
            "dtype": "bf16",
            "capacity_factor": 1.25,
        }
    )
    assert section_tables._shape(row) == "T=4096 H=2048 k=8 bf16 cf1.25"
    assert section_tables._shape(row.drop(["dtype", "capacity_factor"])) == "T=4096 H=2048 k=8"
    assert (section_tables._text("pack_fp8"), section_tables._text(math.nan)) == ("pack fp8", "–")


def test_losses_are_those_of_normal_weights():
    matrix = pd.DataFrame(
        [
            ("int4_g128", "bf16", "normal", 20.0),
            ("int4_g128", "bf16", "outliers", 5.0),
            ("int8_g128", "fp16", "normal", np.nan),
        ],
        columns=["weights", "activations", "drawn", "output_snr_db"],
    )
    assert quantised_weights._losses(matrix) == {("int4_g128", "bf16"): 20.0} and quantised_weights._losses(None) == {}


def test_exactness_of_a_format():
    """Kernels that were tried, those that are right, and the largest share of the limit among them."""
    rows = pd.DataFrame(
        [
            ("normal", "ok", 1.0, 4.0, 0.5, "cute", None),
            ("normal", "ok", 3.0, 4.0, 0.75, "torch", None),
            ("outliers", "incorrect", 9.0, 4.0, 0.25, "triton", "row 3"),
            ("outliers", None, None, None, 0.125, None, None),
        ],
        columns=["drawn", "status", "kernel_error", "tolerance", "of_bound", "implementation", "reason"],
    ).assign(
        weights="int4_g128",
        activations="bf16",
        weight_snr_db=[21.25, 9.0, 7.0, 7.0],
        output_snr_db=[19.5, 1.0, np.nan, 1.0],
    )
    (found,) = quantised_weights.exactness(rows.assign(output_cosine=0.98765))
    assert (found.right, found.most, found.bound, found.wrong) == (
        "2 of 3",
        "75%",
        "75%",
        ["triton is incorrect: row 3"],
    )
    assert found.costs[0] == ("21.2", "19.5", "0.98765") and found.costs[1] == ("7.0", "exact", "0.98765")


def test_a_badge_has_ratio_cells_and_rivals():
    lead = site.Lead("H200", 1.2345, 11, ["sglang", "vllm"])
    assert site.badge(lead)["message"] == "1.23x in 11 cells"
    assert site.badge(lead)["label"].endswith("on H200, bf16 prefill, against the fastest of sglang, vllm")


def test_an_entry_of_the_feed_is_as_new_as_its_latest_rows():
    known = {
        "machine": "H200",
        "days": "d",
        "benches": "gate",
        "rows": "3 rows",
        "findings": [],
        "unfound": "none",
        "by": "me",
    }
    groups = [
        {"last": last, "version": version, "commit": commit * 8, "cards": cards}
        for last, version, commit, cards in (
            ("2026-11-22T01:00:00", "1.0", "ab", ["A"]),
            ("2026-11-29T01:00:00+00:00", None, "cd", ["A", "B"]),
            (None, "1.0", "ab", ["B"]),
        )
    ]
    listed = type("Listed", (), known | {"folder": "gpu"})()
    found = site._entry(listed, {"tables": {"measurements": {"measured": groups}}}, ["gpu"])
    assert found["updated"] == "2026-11-29T01:00:00+00:00" and found["address"] == "gpu/report.html"
    assert "moe-routing-bench 1.0, unknown version, commit abababa, cdcdcdc, on 2 cards." in found["text"]
    old = {"tables": {"measurements": {"measured": groups[:1]}}}
    assert site._entry(listed, old, [])["updated"] == "2026-11-22T01:00:00+00:00"
    assert site._entry(listed, old, [])["address"] == "gpu/index.html"


def test_what_sizes_were_divided_by():
    published = {"hidden": 2048, "intermediate": 1024}
    for measured, by in (
        ((2048, 1024), 1),
        ((128, 64), 16),
        ((128, 128), None),
        ((4096, 2048), None),
        ((2000, 1000), None),
    ):
        assert seeds.divisor(published, dict(zip(published, measured, strict=True))) == by, measured
    assert seeds.ratio(6.0, 4.0) == 1.5 and math.isnan(seeds.ratio(None, 4.0)) and math.isnan(seeds.ratio(6.0, None))
    assert (
        seeds.gain(1.25) == 25.0
        and seeds.number(None) == "–" == seeds.number(math.nan)
        and seeds.number(1.5, "x") == "1.5x"
    )


def row(name, us, status="ok", **values):
    return {
        "implementation": name,
        "median_us": us,
        "status": status,
        "reason": "why",
        "anomaly": None,
        "tflops": 1.0,
    } | values


def test_ratios_of_a_replayed_shape():
    """Over the fastest that is no baseline; of unquantised weights the loop counts twice."""
    rows = [
        row("torch_loop", 9000.0),
        row("dequant", 8000.0),
        row("dequant_cute", 6000.0),
        row("dequant_loop", 12000.0),
    ]
    rows += [
        row("cute_quantised", 2000.0, tflops=7.0, anomaly="scatters"),
        row("triton", 3000.0),
        row("marlin", 1.0, "crashed"),
    ]
    found = {one_["implementation"]: one_ for one_ in rows}
    assert kernels.ratios(found) == (6.0, 3.0) and kernels.workspace(found) == 6.0
    times = ["9", "12", "6", "cute_quantised", "2"]
    assert kernels.texts(found) == [*times, "6x", "3x", "7", "cute_quantised"]
    assert kernels.ratios({name: one_ for name, one_ in found.items() if name != "dequant_loop"}) == (4.5, 4.5)
    failed = {"marlin": rows[-1], "torch_loop": rows[0]}
    assert kernels.kernel(failed.values()) is None and kernels.without(failed.values()) == "marlin, crashed: why"


def test_means_of_speed_ups_leave_out_what_is_missing():
    assert products._mean([2.0, math.nan, 8.0]) == "4x" and products._mean([math.nan]) == "–"


def test_means_of_a_format_are_over_all_its_rows_and_over_those_of_a_steady_machine():
    rows = [("int4", "steady", 2.0), ("int4", "shared", 8.0), ("int8", "shared", 3.0)]
    known = [
        ({"format": form, "activations": "bf16", "machine": machine, "speedup": speedup}, {}, 1)
        for form, machine, speedup in rows
    ]
    lines = products._means(known, {"short": "s"}, "cpu").rows
    assert lines == [["int4", "bf16", "4x", "2x", "–", "–", "2"], ["int8", "bf16", "3x", "–", "–", "–", "1"]]


def test_times_of_models_are_in_milliseconds_and_reasons_are_said_once():
    rows = pd.DataFrame(
        [row("a", 4000.0, phase="decode"), row("b", 2000.0, phase="decode"), row("c", 1.0, "hung", phase="decode")]
    )
    assert models._fastest(rows, "decode") == 2.0 and models._fastest(rows, "prefill") is None
    assert models.milliseconds(row("a", 2500.0)) == 2.5 and models.milliseconds(row("a", 1.0, "hung")) is None
    assert models.why([row("a", 1.0, "hung"), row("b", 1.0, "hung"), row("c", 1.0)]) == "hung: why"
    sizes = {"model": None, "hidden": 1.0, "intermediate": 2.0, "experts": 3.0, "top_k": 4.0}
    assert models.label(sizes) == "H=1, I=2, E=3, k=4" and models.label(sizes | {"model": "m"}) == "m"


def test_a_profile_has_its_operators_line_by_line():
    operators = [{"operator": "a" * 70, "self_cpu_us": 1.5, "self_device_us": 2.5, "self_cuda_us": 3.5, "calls": 4}]
    assert block_profiles._line(operators, 0, "self_cuda_us") == ["a" * 60, "1.5", "3.5", "4"]
    assert block_profiles._line(operators, 1, "self_device_us") == ["–"] * 4
    profile = {
        "implementations": {
            "torch_loop": {"operators": []},
            "cute_gather": {"error": "x"},
            "torch_gather_loop": {"operators": []},
        },
        "differences": [{"first": "b", "second": "a", "max_diff": 0.5}],
    }
    assert block_profiles._standing(profile) == {"manual": "torch_loop", "cuda": "torch_gather_loop"}
    assert (
        block_profiles._difference(profile, "a", "b") == 0.5 and block_profiles._difference(profile, "a", "c") is None
    )


def test_the_first_operators_of_a_profile_are_shown():
    """As many as were published, in their order."""
    times = {"self_cpu_us": 1.0, "self_device_us": 2.0, "calls": 3}
    operators = [times | {"operator": f"o{i}"} for i in range(block_profiles.SHOWN + 2)]
    profile = {"axes": {"dtype": "bf16"}, "implementations": {"torch_loop": {"operators": operators}}}
    (table,) = block_profiles._operators(profile, {"short": "s"}, "cpu")
    assert [line[5] for line in table.rows][: block_profiles.SHOWN] == [f"o{i}" for i in range(block_profiles.SHOWN)]


def test_cells_of_a_predecessors_command():
    """Its values of axes at divided sizes, and the default of others; the least number that explains all hidden sizes."""
    command = predecessor.Command("t", "moe-routing-bench measure pack --tokens 64,128 --hidden 4096,2048", {}, "")
    rows = frame(
        *(one("pack", tokens=tokens, hidden=hidden, capacity_factor=factor, cell=f"{tokens}{hidden}")
          for tokens, hidden, factor in ((64, 256, None), (128, 128, None), (256, 128, None), (64, 128, 1.0), (64, 64, None)))
    )  # fmt: skip
    assert (command.bench, command.axes) == ("pack", {"tokens": [64, 128], "hidden": [4096, 2048]})
    assert list(predecessor._cells(command, rows, 16)["cell"]) == ["64256", "128128"]
    assert (
        predecessor._divided_by([command], rows.iloc[:4]) == 16
        and predecessor._divided_by([command], frame(one("pack", hidden=100))) == 1
        and predecessor._divided_by([command], frame(one("pack", hidden=256))) == 8  # of 2048, not 16 of 4096
    )
    assert predecessor._quotients([4096, 2048], 256) == {16, 8}
    assert predecessor._range("cute", pd.Series([3.0, 1.5, 2.0])) == "cute 1.5 to 3 µs"
    assert predecessor._range("cute", pd.Series([1.5])) == "cute 1.5 µs"


def test_a_dispatch_is_a_prefill_and_all_steps(monkeypatch):
    """Each phase by the kernel that its strategy names; without one of the times there is none."""
    entry = type("Entry", (), {"times": {"a": 100.0, "b": 200.0}})()
    later = type("Entry", (), {"times": {"a": 9.0, "b": 5.0}})()
    phases = {
        "prefill": dispatch.Phase({"a": row("a", 100.0), "b": row("b", 200.0)}, entry),
        "decode": dispatch.Phase({"a": row("a", 9.0), "b": row("b", 5.0)}, later),
    }
    monkeypatch.setattr(dispatch.Phase, "hinted", "b")
    known = {"always": ("prefill", "prefill"), "branch": ("prefill", "decode"), "hinted": ("hinted", "hinted")}
    totals = {
        name: dispatch._total(phases, dict(zip(("prefill", "decode"), ways, strict=True)))
        for name, ways in known.items()
    }
    assert totals == {"always": 100 + 32 * 9, "branch": 100 + 32 * 5, "hinted": 200 + 32 * 5}
    assert dispatch._total(phases, {"prefill": "auto", "decode": "decode"}) is None
    assert dispatch._name(row("auto", 1.0, configuration=None)) == "auto" and dispatch._name(None) == "–"
    assert dispatch._name(row("a", 1.0, "hung")) == "a, hung: why"
    with pytest.raises(KeyError):
        dispatch._row(phases, "decode", "nothing")


def test_two_gpus_are_compared_in_runs_of_one_name():
    """Of other cards, with a row in common; a CPU is none."""

    def table(cell="a", gpu="H200"):
        return frame(one("gate", cell=cell, median_us=1.0, gpu_name=gpu, gpu_uuid=gpu, platform="p"))

    tables = {name: table() for name in ("h100", "h200", "h100.decode", "h200.decode", "h200.layers", "a100.layers")}
    tables |= {"cpu": table(gpu=None), "a100.decode": table("other")}
    assert run_pages.pairs(tables) == [("h100", "h200"), ("h100.decode", "h200.decode"), ("h200.layers", "a100.layers")]


def test_a_dashed_line_leaves_out_names():
    """From 18 below the top of a dot in its way to 4 below that of the next; pieces of at most three are none."""
    found = page._reference("7", 100.0, [20.0, 36.0])
    assert found == [f'<line class="reference" x1="7" x2="7" y1="{a}" y2="{b}"/>' for a, b in ((2, 24), (54, 100))]
    assert len(page._reference("7", 100.0, [20.0, 38.1])) == 3


def test_the_ways_of_stages_are_said_where_they_differ():
    """Stages that an implementation does not name are torch; one way throughout is not said."""
    bench = SimpleNamespace(stages=[SimpleNamespace(name=name) for name in ("router", "permute", "pack", "combine")])

    def made(name="cute", **parts):
        return words._made(
            SimpleNamespace(name=name, parts={key.replace("_", "+"): way for key, way in parts.items()}), bench
        )

    assert made() == made(router="cute", permute_pack="cute", combine="cute") == ""
    assert made(router="cute", permute_pack="experts.tile:gather") == (
        "combine by torch; router by cute; permute+pack by gather of tile"
    )
    assert words._kernel("triton") == "triton" and words._kernel("layer.cute_dependent") == "cute_dependent"


def test_without_quantised_weights_there_is_no_section_of_formats(monkeypatch):
    matrix, seen = pd.DataFrame(), []
    monkeypatch.setattr(render.format_bars, "lines", lambda *given: seen.append(given) or ["bar"])
    for lines, found in (([], None), (["line"], (["line"], ["bar"]))):
        monkeypatch.setattr(render.quantised_weights, "lines", lambda *given, lines=lines: lines)
        got = render._quantised(matrix, None)
        assert (got and (got.lines, got.bars)) == found
    assert len(seen) == 1 and seen[0][1] == {}


def test_samples_are_offsets_from_the_median_of_their_row(monkeypatch):
    """In hundredths of a percent, in their order; of many every second or third is kept, and of many rows fewer."""
    row = {"median_us": 20.0, "samples_us": [20.0, 19.0, 30.0004], "set_aside_samples_us": [40.0]}
    without = [
        row | change
        for change in ({"median_us": None}, {"median_us": math.nan}, {"median_us": 0.0}, {"samples_us": None})
    ]
    found = row_data.samples([row, *without, row | {"set_aside_samples_us": None}])
    assert found == {
        "scale": 10_000,
        "rows": [
            {"every": 1, "at": [0, -500, 5000], "aside": [10_000]},
            *[None] * 4,
            {"every": 1, "at": [0, -500, 5000]},
        ],
    }
    monkeypatch.setattr(row_data, "MOST", 4)
    monkeypatch.setattr(row_data, "LEAST", 2)
    times = [20.0 + n for n in range(9)]
    (many,) = row_data.samples([row | {"samples_us": times[:8], "set_aside_samples_us": times}])["rows"]
    assert (many["every"], many["at"], many["aside"]) == (2, [0, 1000, 2000, 3000], [0, 1500, 3000])
    monkeypatch.setattr(row_data, "ALTOGETHER", 9)
    (few, *_) = row_data.samples([row | {"samples_us": times}] * 3)["rows"]
    assert (few["every"], few["at"]) == (3, [0, 1500, 3000]), "nine samples of three rows"
    (least, *_) = row_data.samples([row | {"samples_us": times}] * 9)["rows"]
    assert (least["every"], least["at"]) == (5, [0, 2500])


def test_a_row_has_one_name_in_every_run_and_cells_and_implementations_have_others():
    names = [{"bench": bench, "cell": cell, "implementation": name} for bench in "ab" for cell in "cd" for name in "ef"]
    found = [row_data.row_id(row | {"median_us": number}) for number, row in enumerate(names)]
    assert len(set(found)) == 8 and {len(name) for name in found} == {10}
    assert found == [row_data.row_id(row) for row in names]


@pytest.mark.parametrize(
    ("time", "said"),
    [
        ("2026-11-28T10:11:12.345+00:00", "2026-11-28T10:11:12+00:00"),
        ("2026-11-28T10:11:12+00:00", "2026-11-28T10:11:12+00:00"),
        ("2026-11-28T10:11:12.999Z", "2026-11-28T10:11:12Z"),
        ("", ""),
        (None, None),
    ],
)
def test_times_of_day_are_to_the_second(time, said):
    assert row_data._to_the_second(time) == said


@pytest.mark.parametrize(
    ("values", "kept"),
    [
        ([3, 3, 3], {"all": 3}),
        ([1, 2, 3], {"each": [1, 2, 3]}),
        (["a", "b", "a"], {"each": ["a", "b", "a"]}),
        (["a long text"] * 3 + ["another"], {"of": ["a long text", "another"], "at": [0, 0, 0, 1]}),
        ([1, True, 1.0, None], {"each": [1, True, 1.0, None]}),
    ],
)
def test_a_column_is_kept_in_the_fewest_bytes(values, kept):
    found = packing.packed(values)
    assert list(map(repr, packing.unpacked("x", {"x": found}, len(values)))) == list(map(repr, values))
    assert found == kept and repr(found) == repr(kept)


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (123456.7, 123460.0),
        (0.000123456, 0.00012346),
        (2.0, 2),
        (math.inf, None),
        (math.nan, None),
        (2**53 - 1, 2**53 - 1),
        (2**53, str(2**53)),
        (-(2**53), str(-(2**53))),
        (np.int64(7), 7),
        (np.float64(0.25), 0.25),
        ([("a", 1.000004), ("b", None)], {"a": 1, "b": None}),
        (True, True),
    ],
)
def test_a_value_is_fit_for_javascript(value, said):
    """Five digits, no number that it lacks, and whole numbers beyond 2**53 as texts."""
    found = packing.plain(value)
    assert found == said and type(found) is type(said)


def test_differences_of_columns_are_in_units_of_the_last_of_five_digits():
    base = packing.Column(pd.Series([100.0, 2.5, 0.031, 7.0]))
    other = packing.Column(pd.Series([101.5, 2.4998, 0.0310012, math.nan]))
    found = packing.differences(other, "median_us", base)
    assert found == {"near": "median_us", "by": [150, -2, 1, None]}
    columns = {"median_us": {"each": [100, 2.5, 0.031, 7]}, "ci_high_us": found}
    assert packing.unpacked("ci_high_us", columns, 4) == [101.5, 2.4998, 0.031001, None]


def test_a_scale_is_logarithmic_where_its_ends_are_far_apart():
    """More than three times apart and above zero: then equal ratios are equally far."""
    for least, most, logarithmic in (
        (10.0, 30.0, False),
        (10.0, 31.0, True),
        (0.0, 100.0, False),
        (-1.0, 100.0, False),
    ):
        place = page._scale(least, most, 0.0, 100.0)
        assert (place(least), place(most)) == ("0.0", "100.0")
        middle = math.sqrt(least * most) if logarithmic else (least + most) / 2
        assert place(middle) == "50.0"
    assert page._scale(5.0, 5.0, 20.0, 60.0)(5.0) == "20.0", "of one value all are at the left"


def test_a_page_says_of_what_its_rows_were_measured():
    """Each commit once, with its version, days and cards; changes only where the tree had some."""
    about = {"gpu_name": "H200", "gpu_uuid": "GPU-12345678-9", "cpu_model": "c", "device": "d"}
    days = {"started_at": "2026-11-22T10:00", "ended_at": "2026-11-23T09:00"}
    rows = [about | days | {"git_sha": "a" * 40, "git_dirty": dirty} for dirty in (False, False, None, True)]
    rows[3] |= {"started_at": "2026-11-24T01:00", "ended_at": "2026-11-24T02:00"}
    card = "on H200 (GPU-12345678)"
    one_commit = words.measured(pd.DataFrame(rows[:2]), {"a" * 40: "1.2.0"})
    assert one_commit == f"Measured by version 1.2.0, commit aaaaaaa (2026-11-22 to 2026-11-23), {card}."
    assert words.measured(pd.DataFrame(rows), said="Taken") == (
        f"Taken by commit aaaaaaa (2026-11-22 to 2026-11-23), {card}: 2 rows; by commit aaaaaaa (2026-11-22 to 2026-11-23), {card}: "
        f"1 row; by commit aaaaaaa with changes (2026-11-24), {card}: 1 row."
    )
    assert words.measured(pd.DataFrame(rows[:0])) == ""
    frame_ = pd.DataFrame(
        {
            "status": ["ok", "crashed", "ok", "ok"],
            "bench": ["a", "a", "b", "b"],
            "cell": list("xxxy"),
            "suspect": [True, True, False, None],
        }
    )
    assert words.scope(frame_) == "4 rows, 3 of them with a time, of 3 cells."
    assert words.suspects(frame_) == "1 of 3 rows with a time is suspect" and words.suspects(frame_[1:]) == ""
    assert words.suspects(frame_.assign(suspect=True)) == "3 of 3 rows with a time are suspect"


def test_a_published_row_says_how_many_ranks_its_layer_was_spread_over():
    line = {
        "model": "m",
        "tokens": 64,
        "weights": "bf16",
        "package": "p",
        "version": "1",
        "kernel": "k",
        "published_us": 1234.0,
    }
    line |= {
        "implementation": "cute",
        "here_us": 20.0,
        "ratio": 0.5,
        "status": "reproduced",
        "why": "",
        "ours": None,
        "ours_us": math.nan,
    }
    for ranks, model in ((1, "m"), (2, "m, one of 2 ranks"), (8, "m, one of 8 ranks")):
        found = section_tables._published_texts(line | {"tensor_parallel": ranks})
        assert found[:7] == [model, "64", "bf16", "p", "1", "k", "1,234 µs"]
        assert found[7:] == ["cute", "20 µs", "0.50x", "reproduced", "–", "–"]
    absent = line | {
        "tensor_parallel": 1,
        "implementation": None,
        "here_us": math.nan,
        "ratio": math.nan,
        "why": "lacking",
    }
    assert section_tables._published_texts(absent)[7:11] == ["–", "–", "–", "reproduced: lacking"]


def test_of_many_dots_some_are_drawn_and_the_one_that_the_sentence_is_of():
    dots = [Dot(f"n{number}", number + 2.0, number + 1.0, number + 3.0, chosen=number == 4) for number in range(130)]
    shown = page.picture(dots, "us")
    assert shown.count("<circle") == 44 + 1 and shown.count('class="chosen"') == 1, "every third, and the fifth"
    assert "n4 6 [5, 7]" in shown and "n5 " not in shown and "us, one in 3" in shown
    assert page.picture(dots[:60], "us").count("<circle") == 60
