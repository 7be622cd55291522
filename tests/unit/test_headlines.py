"""Each rule of what a report says first, on a few rows whose numbers are known: what it says, and where it must be silent."""

import math
import re

import pandas as pd
import pyarrow.parquet as pq
import pytest
from rows import frame, one
from scipy import stats

from moe_routing_bench.packages import PACKAGE
from moe_routing_bench.quantities import ANY_FLOOR, times
from moe_routing_bench.report import costs, headlines, page, trained_rules
from moe_routing_bench.report.row_data import row_id


def ran(cell, implementation, us, verdict=None, ratio=None, bench="routing", **values):
    """A row with an interval of 1 % to both sides and what is stored of it against the best other."""
    against = (
        {}
        if ratio is None
        else {
            "best_other": "triton",
            "best_speedup": ratio,
            "best_speedup_ci_low": ratio - 0.01,
            "best_speedup_ci_high": ratio + 0.01,
        }
    )
    known = {
        "median_us": us,
        "ci_low_us": us * 0.99,
        "ci_high_us": us * 1.01,
        "best_verdict": verdict,
        "skew": 0.0,
        "tokens": 64,
        "experts": 8,
    }
    return one(bench, implementation, **known | against | {"cell": cell} | values)


def pair(cell, ratio, verdict: str | None = "faster", **values):
    """Two implementations of a cell; cute is so many times as fast."""
    turned = "slower" if verdict == "faster" else verdict
    return [
        ran(cell, "cute", 10.0, verdict, ratio, **values),
        ran(cell, "triton", 10.0 * ratio, turned, 1 / ratio, **values),
    ]


def sound(*rows):
    return headlines.sound(frame(*rows))


def said(rule, *rows):
    found = rule(sound(*rows), frame(*rows)) if rule is headlines.fastest else rule(sound(*rows))
    return found.text if found else ""


@pytest.mark.parametrize(
    ("other", "rivals", "text"),
    [
        ("triton", {"torch": 50.0, "vllm": 30.0}, "(ours, too; vllm, the fastest rival there, takes 3.00x as long)"),
        ("triton", {}, "(ours, too)"),
        ("vllm", {"torch": 50.0}, ""),
    ],
)
def test_a_lead_over_another_kernel_of_ours_says_so_and_names_the_fastest_rival(other, rivals, text):
    first = ran("a", "cute", 10.0, "faster", 1.4, best_other=other)
    rest = [ran("a", name, us, "slower", 0.5) for name, us in ({other: 14.0} | rivals).items()]
    rest += [ran("a", "vllm", 11.0, gpu_uuid="GPU-2"), ran("b", "vllm", 12.0)]
    found = said(headlines.fastest, first, *rest)
    assert f"as fast as {other}" in found and (text in found if text else "ours" not in found)


def drawn(found):
    """Name, marks and value of every dot of a headline's picture."""
    return [
        (name, kind, float(value))
        for kind, name, value in re.findall(r'<g class="(.*?)"><title>(.*?): ([\d.]+)', page.drawn(found.picture))
    ]


def test_which_rows_are_sound():
    """Not suspect; converged, or told apart by a stored verdict; of cells whose quickest row is."""
    rows = [
        *pair("a", 1.5),
        *pair("b", 1.5, converged=False),
        *pair("c", 1.5, "undecided", converged=False),
        *pair("d", 1.5, suspect=True),
        ran("e", "cute", 1.0, converged=False),
        ran("e", "torch", 2.0),
        ran("f", "cute", 1.0),
        ran("f", "torch", 2.0, suspect=True),
        ran("f", "triton", 1.0, status="crashed"),
    ]
    found = sound(*rows)
    assert [*zip(found["cell"], found["implementation"], strict=True)] == [
        ("a", "cute"),
        ("a", "triton"),
        ("b", "cute"),
        ("b", "triton"),
        ("f", "cute"),
    ]


def test_the_fastest():
    """Cells that a verdict tells apart, of the widest bench; the middle one's ratio with its stored interval."""
    rows = [
        *pair("a", 1.2),
        *pair("b", 1.4, tokens=512),
        *pair("c", 1.9),
        *pair("d", 1.001, "same"),
        *pair("g", 9.0, bench="gate"),
    ]
    rows_there = [*rows, ran("unjudged", "cute", 1.0)]
    found = headlines.fastest(sound(*rows_there), frame(*rows_there))
    assert found and found.text == (
        "routing: cute is faster than the best other implementation, beyond noise, in 3 of 4 cells; in the median one of these it is 1.40x [1.39, 1.41] as fast as triton (ours, too), at T=512 E=8."
    )
    assert found.link == "rows?filter=bench%3Drouting+implementation%3Dcute+best_verdict%3Dfaster&sort=best_speedup"
    assert drawn(found) == [
        ("T64 E8", "", 1.9),
        ("T512 E8", "chosen", 1.4),
        ("T64 E8", "", 1.2),
        ("T64 E8", "hollow", 1),
    ]
    doubtful = [row | {"suspect": True} for row in rows]
    assert said(headlines.fastest, *rows[6:8]) == said(headlines.fastest, *doubtful) == ""
    assert said(headlines.fastest, *(row | {"best_verdict": None} for row in rows)) == "", "no verdict, no winner"
    assert said(headlines.fastest, *doubtful[:8], *rows[8:]).startswith("gate: cute")


DRIFTED = {"suspect": True, "suspect_reason": "ceilings drifted 5.0% during the cell"}


def test_a_drift_of_the_ceilings_is_in_no_ratio_of_a_cell():
    """Rows that are suspect for a drift alone decide who is faster, and count; they are not sound for shares. Those with another reason are out."""
    rows = [row | DRIFTED for row in (*pair("a", 1.2), *pair("b", 1.4), *pair("c", 1.9))]
    text = said(headlines.fastest, *pair("a", 1.2), *pair("b", 1.4), *pair("c", 1.9))
    assert headlines.headlines(frame(*rows))[0].text == text and " in 3 of 3 cells; " in text
    both = [
        row | DRIFTED | {"suspect_reason": f"{DRIFTED['suspect_reason']}; other processes on the GPU: 2"}
        for row in rows
    ]
    assert not headlines.headlines(frame(*both)) and sound(*rows).empty
    mixed = headlines.headlines(frame(*both[:2], *rows[2:]))[0].text
    assert " in 2 of 2 cells (1 more is suspect); " in mixed
    limits = [row | {"share_of_roofline": 0.5} for row in rows]
    assert not any("roofline" in one.text for one in headlines.headlines(frame(*limits))), "a share of what drifted"


def test_more_benches_speak_where_there_is_little_else_to_say(monkeypatch):
    """The fastest of up to three benches, the widest first; with three other sentences only that of the widest."""
    rows = [*pair("a", 1.2), *(one for bench in ("gate", "pack", "combine") for one in pair(bench, 1.5, bench=bench))]
    found = [one.text.partition(":")[0] for one in headlines.headlines(frame(*rows))]
    assert found == ["routing", "combine", "pack"]
    why = headlines.Sentence(f"Quality (mini): {headlines.NOT_JUDGED} of one seed.", "quality")
    monkeypatch.setattr(headlines, "quality", lambda _: why)
    monkeypatch.setattr(headlines, "left_over", lambda _: None)
    monkeypatch.setattr(headlines.compare, "finals", lambda trained: trained)
    found = [one.text.partition(":")[0] for one in headlines.headlines(frame(*rows), frame(rows[0]))]
    assert found == ["routing", "combine", "pack", "Quality (mini)"], "that something is not judged says nothing"
    costly = [
        ran("s", "cute", 20.0, tokens=512, skew=1.0, bench="pack"),
        ran("p", "cute", 10.0, tokens=512, bench="pack"),
    ]
    near = [row | {"share_of_roofline": 0.5} for row in pair("a", 1.2)]
    texts = [one.text for one in headlines.headlines(frame(*near, *pair("gate", 1.5, bench="gate"), *costly))]
    assert [text.partition(":")[0] for text in texts] == ["routing", "routing", "pack"] and "skew" in texts[2]


def test_the_fastest_is_counted_over_all_cells_that_can_decide():
    """Also those whose times did not converge and that no verdict tells apart: without them, only cells that somebody wins would count. Suspect ones are said to be left out."""
    rows = [
        *pair("a", 1.2, converged=False),
        *pair("b", 1.4),
        *pair("u", 1.02, "undecided", converged=False),
        *pair("o", 1.1, "slower", converged=False),
    ]
    assert " in 2 of 4 cells; " in said(headlines.fastest, *rows)
    assert " in 2 of 4 cells (1 more is suspect); " in said(headlines.fastest, *rows, *pair("s", 1.5, suspect=True))
    assert " in 2 of 4 cells (2 more are suspect); " in said(
        headlines.fastest,
        *rows,
        *pair("s", 1.5, suspect=True),
        *pair("t", 1.5, suspect=True),
        *pair("v", 1.5, bench="gate"),
    )
    found = headlines.fastest(sound(*rows), frame(*rows))
    assert found and [(kind, value) for _, kind, value in drawn(found)] == [
        ("", 1.4),
        ("chosen", 1.2),
        ("", 1.1),
        ("hollow", 1.02),
    ]


def test_a_sentence_names_all_that_its_cell_is_asked_for():
    """Skew, a capacity and other formats, but nothing that is the usual: a cell of them is no cell without."""
    rows = pair("a", 1.2, skew=1.7, capacity_factor=1.25, dtype="fp32", router="deepseek_v3")
    assert said(headlines.fastest, *rows).endswith(", at T=64 E=8 cf1.25 skew1.7 deepseek_v3 fp32.")
    assert said(headlines.near_the_limit, *(row | {"share_of_roofline": 0.5} for row in rows)).endswith(
        ", at T=64 E=8 cf1.25 skew1.7 deepseek_v3 fp32."
    )


def test_near_the_limit():
    """The middle cell's share, its interval from that of the time; of the fastest alone; nothing on a CPU, or where a share is none."""
    rows = [
        row | {"share_of_roofline": share}
        for name, share in (("a", 0.5), ("b", 0.8), ("c", 0.9))
        for row in pair(name, 1.5)
    ]
    found = headlines.near_the_limit(sound(*rows))
    assert (
        found
        and found.text
        == "routing: cute reaches 80.0% [79.2%, 80.8%] of the roofline in the median one of 3 converged cells, at T=64 E=8."
    )
    assert found.link == f"row-{row_id(rows[2])}"
    assert [(kind, value) for _, kind, value in drawn(found)] == [("", 90.0), ("chosen", 80.0), ("", 50.0)]
    assert "in its one converged cell, at" in said(headlines.near_the_limit, *rows[:2])
    others = [rows[0] | {"cell": cell, "implementation": "quack"} for cell in ("d", "e")]
    loose = [row | {"converged": False} for row in rows]
    assert said(headlines.near_the_limit, *loose, *others) == "", (
        "the others are told faster in fewer cells, although in more converged ones"
    )
    for values in (
        {"gpu_uuid": None},
        {"share_of_roofline": 3.79},
        {"share_of_roofline": None},
        {"converged": False},
        {"suspect": True},
    ):
        assert said(headlines.near_the_limit, *(row | values for row in rows)) == "", values


def test_formats():
    """The middle one of all pairs of a quantised format and unquantised weights of one shape, size and card; the fastest of ours in each."""

    def of(name, us, weights="int4_g128", tokens=8, **values):
        sizes = {"hidden": 2048, "intermediate": 768, "experts": 128, "top_k": 8, "dtype": "bf16", "packed": "bf16"}
        return ran(
            f"{weights}{tokens}", name, us, bench="experts", **sizes | {"weights": weights, "tokens": tokens} | values
        )

    rows = [
        of("cute", 100.0, "bf16"),
        of("triton", 120.0, "bf16"),
        of("cute_quantised", 40.0),
        of("marlin", 30.0),
        of("dequant", 900.0),
        of("cute_quantised", 60.0, "int8_g128", converged=False),
        of("cute", 200.0, "bf16", 64),
        of("cute_quantised", 70.0, tokens=64),
        of("cute", 50.0, "bf16", packed="fp8_row"),
    ]
    found = costs.formats(frame(*rows))
    assert found and found.text in [one.text for one in headlines.headlines(frame(*rows))]
    assert found.text == (
        "experts: with weights of int4_g128, cute_quantised takes 0.400x [0.392, 0.408] the time of cute with bf16 (the fastest of ours or torch in each), "
        "the median of 3 formats and sizes, at T=8 H=2048 I=768 E=128 k=8 weights-int4_g128."
    )
    assert found.link == f"row-{row_id(rows[2])}"
    sizes = "H2048 I768 E128 k8"
    assert drawn(found) == [
        (f"T64 {sizes} weights-int4_g128", "", 0.35),
        (f"T8 {sizes} weights-int4_g128", "chosen", 0.4),
        (f"T8 {sizes} weights-int8_g128", "", 0.6),
    ]
    alone = costs.formats(frame(rows[0], rows[2]))
    assert alone and "median" not in alone.text and not alone.picture
    two = costs.formats(frame(rows[0], rows[2], rows[5]))
    assert two and "takes 0.400x" in two.text and "the median of 2" in two.text, "the lower one"
    for change in (
        {"gpu_uuid": "GPU-2"},
        {"suspect": True},
        {"status": "incorrect"},
        {"hidden": 1024},
        {"implementation": "marlin"},
        {"ci_low_us": None},
        {"median_us": 99.0, "ci_low_us": 98.0, "ci_high_us": 100.0},
    ):
        assert costs.formats(frame(rows[0], rows[2] | change)) is None, change
    assert costs.formats(frame(*rows[:2])) is None and costs.formats(frame(*rows[2:6])) is None


def test_skew():
    """The widest range that one card measured, in cells equal otherwise; nothing where both intervals and the drift allow that nothing changed."""
    rows = [
        ran(f"{skew}{tokens}", "cute", us, skew=skew, tokens=tokens)
        for skew, tokens, us in (
            (0.0, 64, 10.0),
            (1.7, 64, 20.0),
            (0.0, 512, 100.0),
            (0.7, 512, 110.0),
            (1.7, 512, 150.0),
        )
    ]
    narrower = [ran(f"{skew}", "cute", us, skew=skew, tokens=4096) for skew, us in ((0.0, 800.0), (0.7, 1600.0))]
    found = costs.skew(sound(*rows, *narrower))
    assert found and found.text == (
        "routing: at skew 1.7 cute takes 1.50x [1.47, 1.53] its time at skew 0, in cells equal otherwise on one card, at T=512 E=8."
    )
    assert drawn(found) == [("skew 0.7", "", 1.1), ("skew 1.7", "chosen", 1.5)]
    alone = costs.skew(sound(rows[2], rows[4]))
    assert alone and not alone.picture, "one skew above the lowest: nothing that the sentence does not say"
    more = costs.skew(sound(*rows, ran("1512", "cute", 120.0, skew=1.0, tokens=512)))
    assert more and drawn(more) == [("skew 0.7", "", 1.1), ("skew 1", "", 1.2), ("skew 1.7", "chosen", 1.5)]
    assert (
        found.link
        == "rows?filter=bench%3Drouting+implementation%3Dcute+tokens%3D512+experts%3D8+capacity_factor%3Anone&sort=skew"
    )
    low, _, high = rows[2:]
    for change in (
        {"gpu_uuid": "GPU-2"},
        {"dtype": "fp32"},
        {"capacity_factor": 1.0},
        {"suspect": True},
        {"converged": False},
        {"implementation": "torch"},
        {"tokens": 1024},
        {"median_us": 103.0, "ci_low_us": 101.9, "ci_high_us": 104.0},
    ):
        assert said(costs.skew, low, high | change) == "", change
    assert said(costs.skew, *(row | {"capacity_factor": 1.0} for row in (low, high))) == "", (
        "what is dropped takes no time"
    )
    assert said(costs.skew, low, high | {"median_us": 50.0, "ci_low_us": 49.0, "ci_high_us": 51.0}).startswith(
        "routing: at skew 1.7 cute takes 0.500x"
    )


def test_the_implementation_that_leads_in_most_cells_is_named():
    """Not the first of the rows; each cell of each card counts, and suspect ones are not drawn."""
    rows = [ran("z", "quack", 10.0, "faster", 1.7), *pair("a", 1.2), *pair("b", 1.4), *pair("a", 1.3, gpu_uuid="GPU-2")]
    assert "cute is faster than the best other implementation, beyond noise, in 3 of 4 cells" in said(
        headlines.fastest, *rows
    )
    found = headlines.fastest(sound(*rows), frame(*rows, *pair("s", 9.0, suspect=True)))
    assert found and [value for *_, value in drawn(found)] == [1.4, 1.3, 1.2]


def test_a_share_has_the_interval_of_its_time():
    """The longer the time, the smaller the share; an interval that is not symmetric has ends of its own."""
    row = pd.Series({"share_of_roofline": 0.6, "median_us": 10.0, "ci_low_us": 8.0, "ci_high_us": 15.0})
    assert headlines._of_roofline(row) == pytest.approx((0.6, 0.4, 0.75))


def test_no_more_than_five_sentences(monkeypatch):
    """Of six rules that speak the last is silent."""
    rows = frame(*pair("a", 1.2))
    for name in ("near_the_limit", "formats", "skew", "quality", "left_over"):
        rule = lambda _, name=name: headlines.Sentence(f"{name}.", "rows")  # noqa: E731
        rule.__name__ = name
        monkeypatch.setattr(headlines, name, rule)
    monkeypatch.setattr(headlines.compare, "finals", lambda trained: trained)
    texts = [one.text.partition(":")[0] for one in headlines.headlines(rows, rows)]
    assert texts == ["routing", "near_the_limit.", "formats.", "skew.", "quality."]


def test_why_nothing_is_found():
    """Verdicts against the best other count, and not those against the baseline; twins and cells are told in words."""
    rows = [
        row | {"verdict": "faster", "best_speedup": ratio}
        for row, ratio in zip(pair("a", 1.01, None), (1.01, 0.99), strict=True)
    ]
    assert headlines.unfound(frame(*rows)).startswith(
        "no implementation was entered twice, so that differences up to 11 %"
    )
    twins = [row | {"twin_speedup": 1.0} for row in rows]
    assert headlines.unfound(frame(*twins)).startswith("2 implementations were entered twice, and ")
    assert headlines.unfound(frame(rows[0], twins[1])).startswith("1 implementation was entered twice, and ")
    same = pair("a", 1.01, "same")
    assert headlines.unfound(frame(*same)).startswith("of 2 rows with a verdict, none that is sound ")
    assert headlines.unfound(frame(*pair("a", 1.5))).startswith(
        "no rule has something to say of these rows, 1 of which is faster"
    )
    alone = ran("a", "cute", 1.0)
    assert headlines.unfound(frame(alone)) == "no cell has times of two implementations to compare."


def test_skew_is_told_of_the_widest_bench_and_of_the_fastest_there():
    """A stage of its own says nothing where a composite has rows; equal ranges and sizes, so the time decides. What did not converge is out."""

    def of(us, skew, name="cute", bench="routing", **values):
        return ran(f"{bench}{skew}", name, us, skew=skew, bench=bench, **values)

    stage = [of(1.0, 0.0, bench="pack"), of(9.0, 1.5, bench="pack")]
    slow = [of(20.0, 0.0, "triton"), of(60.0, 1.5, "triton")]
    quick = [of(10.0, 0.0), of(20.0, 1.5)]
    found = costs.skew(frame(*stage, *slow, *quick))
    assert found and found.text.startswith("routing: at skew 1.5 cute takes 2.00x ")
    assert costs.skew(frame(quick[0], quick[1] | {"converged": False, "best_verdict": "faster"})) is None
    for us, told_apart in ((100.0, False), (99.0, False), (97.0, True), (101.0, False), (103.1, True)):
        ends = {"ci_low_us": us - 0.1, "ci_high_us": us + 0.1}
        pair_ = [of(100.0, 0.0, ci_low_us=99.9, ci_high_us=100.1), of(us, 1.5, **ends)]
        assert (costs.skew(frame(*pair_)) is not None) == told_apart, us


def trained(name, losses, causal=True, left=(0.2, 0.1), label="e8", **values):
    """Final evaluations of a rule, a seed each."""
    return [
        {
            "label": label,
            "contestant": name,
            "seed": seed,
            "bits_per_byte": loss,
            "causal": causal,
            "learns": True,
            "purpose": "final",
            "step": 1,
            "run": f"{label}{name}{seed}",
            "router": name,
            "network": "linear",
            "capacity_factor": 1.25,
            "drop_policy": "drop",
            "train_mode": "joint",
            "lr": 0.001,
            "tokens_seen": 2e7,
            "active_params": 1e7,
            "validation_batches": "mixed",
            "capacity_factors": [1.0, 1.25],
            "drop_rate_by_factor": [share + seed / 100 for share in left],
        }
        | values
        for seed, loss in enumerate(losses)
    ]


def told(rule, *runs):
    found = rule(pd.DataFrame([run for runs_of_one in runs for run in runs_of_one]))
    return found.text if found else ""


A, B, C = trained("a", (1.0, 1.01, 1.02)), trained("b", (2.0, 2.02, 2.01)), trained("c", (1.001, 1.02, 1.012))


def test_quality():
    """Of causal rules, by the ranking's own tests; nothing where the seeds tell nobody from the first."""
    assert told(
        trained_rules.quality,
        A,
        B,
        C,
        trained("d", (0.1, 0.2, 0.3), causal=False),
        trained("a", (9.0, 9.1), label="other"),
    ).startswith(
        "Quality (e8): a has the least loss of 3 causal rules, 1.0100 ± 0.0248 bits per byte over 3 seeds; less than 1 of the 2 others"
    )
    said = told(trained_rules.quality, A, B, C)
    assert (
        "undecided against 1" in said and "a and c are undecided" in said and "margin 0.01" in said and "n = 3" in said
    )
    found = trained_rules.quality(pd.DataFrame([*A, *B, *C]))
    assert found and drawn(found) == [("a", "chosen", 1.01), ("c", "hollow", 1.01), ("b", "", 2.01)]
    assert told(trained_rules.quality, A, C) == told(trained_rules.quality, A) == ""
    half = stats.t.ppf(0.975, 2) * 0.01 / 3**0.5
    assert found.picture
    first = found.picture.dots[0]
    assert (first.low, first.high) == pytest.approx((1.01 - half, 1.01 + half), rel=1e-3)
    many = [trained(name, [1.0 + i / 100 for i in range(9)], label="more runs") for name in ("a", "b")]
    assert told(trained_rules.quality, A, B, C, *many).startswith("Quality (e8)"), "of most rules, not of most runs"
    assert (
        told(trained_rules.quality, A[:1], B[:1])
        == told(trained_rules.quality, trained("a", (1.0,), causal=False))
        == ""
    )


def test_what_trained_rules_leave_over():
    """At a factor of 1, the middle rule's mean over seeds with its test; nothing of batches of one domain each, or without a second seed or that factor."""
    middle = trained("m", (1.0, 1.01, 1.02), left=(0.3, 0.1))
    reach = 100 * stats.t.ppf(1 - 0.05 / 6, 2) * 0.01 / 3**0.5
    interval = f"31.0% ({31 - reach:.1f}% to {31 + reach:.1f}%)"
    text = f"Capacity (e8): with a factor of 1, {interval} of the choices of trained m go over the capacity, the median of 3 rules; different from none (t; margin 1%; n = 3 seeds)"
    high = trained("h", (1.0, 1.01, 1.02), left=(0.4, 0.1))
    assert told(trained_rules.left_over, A, middle, high) == text + "."
    assert "31.0% (" in told(trained_rules.left_over, middle, high), "of two the lower one"
    two = trained_rules.left_over(pd.DataFrame([*A[:2], *middle, *high[:1]]))
    half = stats.t.ppf(0.975, 1) * 0.005
    assert two and two.picture and [dot.name for dot in two.picture.dots] == ["a", "m"], "one seed has no interval"
    assert (two.picture.dots[0].low, two.picture.dots[0].high) == pytest.approx((0.205 - half, 0.205 + half))
    wild = trained("w", (1.0, 1.01, 1.02), left=(0.0, 0.1))
    wild[0] |= {"drop_rate_by_factor": [0.7, 0.1]}  # the largest of all in one seed, the least in the mean
    assert "31.0% (" in told(trained_rules.left_over, wild, middle, high), "rules are ordered by their means over seeds"
    few = trained("m", (1.0, 1.01, 1.02), left=(-0.0095, 0.1))
    assert (
        "0.1% (" in (said := told(trained_rules.left_over, few))
        and "undecided against none (neither t nor TOST" in said
    )
    assert told(trained_rules.left_over, [run | {"drop_rate_by_factor": [0.2, 0.1]} for run in middle]) == "", (
        "no noise"
    )
    old = [[run | {"validation_batches": "by_domain"} for run in runs] for runs in (A, middle, high)]
    assert told(trained_rules.left_over, *old) == "", "withdrawn: it is of the batches, not of the rules"
    assert (
        told(trained_rules.left_over, A[:1])
        == told(trained_rules.left_over, trained("a", (1.0, 1.1), causal=False))
        == ""
    )
    assert told(trained_rules.left_over, [run | {"capacity_factors": [1.5, 2.0]} for run in A]) == ""
    assert told(trained_rules.left_over, [run | {"learns": False} for run in A]) == "", "a fixed rule was not trained"
    assert told(trained_rules.left_over, [run | {"drop_rate_by_factor": None} for run in A]) == ""


@pytest.mark.parametrize("with_runs", [False, True])
def test_at_most_five(with_runs):
    """All rules, in their order; an empty table and one of crashes have none."""
    rows = [row | {"share_of_roofline": 0.5} for row in pair("a", 1.5)] + [
        ran("b", "cute", 40.0, "faster", 1.5, skew=1.0)
    ]
    runs = pd.DataFrame([*A, *B]) if with_runs else None
    found = [headline.text.split()[0] for headline in headlines.headlines(frame(*rows), runs)]
    assert found == ["routing:"] * 3 + ["Quality", "Capacity"] * with_runs and len(found) <= headlines.MOST
    crashed = frame(*(row | {"status": "crashed", "median_us": None} for row in rows))
    assert headlines.headlines(crashed) == headlines.headlines(crashed.iloc[:0]) == []


def test_of_one_cell_there_is_no_median():
    """It is named as what it is; without a stored interval nothing is said."""
    alone = pair("a", 1.4)
    assert said(headlines.fastest, *alone).endswith(
        "in 1 of 1 cell; there it is 1.40x [1.39, 1.41] as fast as triton (ours, too), at T=64 E=8."
    )
    assert said(headlines.fastest, *(row | {"best_speedup_ci_low": None} for row in alone)) == ""
    near = said(headlines.near_the_limit, *(row | {"share_of_roofline": 0.5} for row in alone))
    assert near.endswith("of the roofline in its one converged cell, at T=64 E=8.")


def test_an_interval_has_the_digits_that_tell_its_ends_apart():
    """From each other, and from 1 where they do not hold it: three where they suffice, five at most; equal numbers have three."""
    known = (
        (1.4, 1.39, 1.41),
        (1.0815, 1.0808, 1.0822),
        (1.003, 1.001, 1.005),
        (0.98271, 0.96539, 1.0003),
        (2.0, 2.0, 2.0),
        (1.0000001, 1.0, 1.0000002),
    )
    said = [
        "1.40x [1.39, 1.41]",
        "1.081x [1.081, 1.082]",
        "1.003x [1.001, 1.005]",
        "0.983x [0.965, 1.00]",
        "2.00x [2.00, 2.00]",
        "1.0000x [1.0000, 1.0000]",
    ]
    assert [times(*one) for one in known] == said
    assert [times(one, math.nan, math.nan) for one in (2.0, 123.4)] == ["2.00x", "123x"], "without an interval"
    assert headlines._apart(0.9028, 0.9026, 0.903) == "90.28% [90.26%, 90.30%]"


def test_the_middle_of_an_even_number_is_the_lower_one():
    table = pd.DataFrame({"best_speedup": [4.0, 1.0, 3.0, 2.0]})
    assert headlines._middle(table, "best_speedup")["best_speedup"] == 2
    assert headlines._middle(table.iloc[1:], "best_speedup")["best_speedup"] == 2


def test_without_twins_large_gaps_are_told_and_small_ones_are_not():
    """34 against 1880 us is no "no finding"; a gap within any noise floor that was measured counts as not told apart."""
    rows = [*pair("far", 54.8, None), *pair("near", 1.08, None)]
    found = headlines.headlines(frame(*rows))[0]
    assert "cute is faster than the best other implementation, by more than 11 %, in 1 of 2 cells" in found.text
    assert "54.8" in found.text and "differences up to 11 % are not judged" in found.text
    assert "best_verdict" not in found.link, "the rows hold no verdict to filter by"
    assert found.picture
    assert [dot.hollow for dot in found.picture.dots] == [False, True]
    for but in ({"suspect": True}, {"gpu_uuid": None}):
        assert headlines.headlines(frame(*pair("far", 54.8, None, **but))) == []
    assert headlines.headlines(frame(*pair("near", 1.1, None))) == []


def test_the_assumed_floor_is_far_above_all_that_were_measured():
    """More than twice the largest noise floor of the published runs of GPUs."""
    files = (PACKAGE.parents[1] / "results").glob("nvidia-*/measurements.parquet")
    floors = [pq.read_table(file, columns=["noise_floor"])["noise_floor"].drop_null().to_pylist() for file in files]
    assert len(floors) > 10 and 0.005 < max(map(max, filter(None, floors))) < ANY_FLOOR / 2
