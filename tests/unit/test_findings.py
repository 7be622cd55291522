"""Every sentence of the findings, to the letter, on a few rows whose numbers are known."""

import pytest
from rows import frame, one

from moe_routing_bench.report import findings

CI = {"speedup_ci_low": 1.5, "speedup_ci_high": 2.5}


def texts(table):
    """What all findings say."""
    return [one.text for one in findings.findings(table)]


def ran(implementation: str, speedup: float, tokens: int = 1, **values: object) -> dict[str, object]:
    """A row of `pack` in the cell of so many tokens."""
    return one(
        "pack",
        implementation,
        cell=f"T{tokens}",
        tokens=tokens,
        speedup=speedup,
        median_us=100 / (speedup or 1),
        **values,
    )


def base(*tokens: int) -> list[dict[str, object]]:
    return [ran("torch", 1.0, t) for t in tokens or (1, 2)]


def fastest(*rows: dict[str, object]) -> str:
    return findings.fastest(frame(*rows), "pack")


def against_baseline(*rows: dict[str, object]) -> str:
    """The part of the sentence on the baseline, behind that on the best other."""
    return "pack: " + fastest(*rows).partition("against the baseline, ")[2]


def test_the_largest_speed_up() -> None:
    """The geometric mean over the cells that candidates have in common; the others with their own cells."""
    rows = [
        *base(),
        ran("cute", 2.0, 1, **CI),
        ran("cute", 4.5, 2, speedup_ci_low=4.0, speedup_ci_high=5.0),
        ran("triton", 2.5, 1, **CI),
        ran("triton", 2.0, 2, **CI),
        one("combine", "triton", cell="T1", tokens=1, speedup=99.0, median_us=0.1),
    ]
    assert fastest(*rows) == (
        "pack: against the fastest other implementation of each cell, cute is 1.34x as fast in the geometric mean (0.80x to 2.25x); against the "
        "baseline, cute has the largest speed-up, 3.00x torch in the geometric mean (2.00x to 4.50x; the 95 % interval lies above 1 in 2 of 2 cells "
        "that differ in tokens, below 1 in 0, and includes 1 in 0). cute over each of the others, where both ran: triton 1.34x (2 cells)."
    )


def test_candidates_ran_in_half_of_the_cells() -> None:
    """Of four cells two are enough, and one is not; they are ranked where they all ran."""
    wide = [ran("cute", 2.0, t, **CI) for t in (1, 2, 3, 4)]
    quick = [ran("triton", 3.0, t, **CI) for t in (1, 2)]
    assert against_baseline(*base(1, 2, 3, 4), *wide, *quick).startswith("pack: triton has the largest speed-up, 3.00x")
    assert against_baseline(*base(1, 2, 3, 4), *wide, *quick[:1]).startswith(
        "pack: cute has the largest speed-up, 2.00x"
    )
    more = [*wide, ran("cute", 2.0, 5, **CI)]
    assert against_baseline(*base(1, 2, 3, 4, 5), *more, *quick).startswith("pack: cute has"), (
        "two of five are less than half"
    )
    better = [ran("cute", 4.0, 1, **CI), *(ran("cute", 1.1, t, **CI) for t in (2, 3, 4))]
    others = [ran("triton", 3.0, 1, **CI), ran("triton", 1.0, 2, **CI)]
    assert against_baseline(*base(1, 2, 3, 4), *better, *others).startswith("pack: cute has"), (
        "4 and 1.1 against 3 and 1"
    )
    disjoint = [ran("cute", 2.0, 1, **CI), ran("triton", 3.0, 2, **CI)]
    assert against_baseline(*base(), *disjoint).startswith("pack: triton has the largest speed-up, 3.00x"), (
        "no cell in common"
    )


def test_the_geometric_mean_ranks() -> None:
    """8 and 1 against 4 and 3: the arithmetic mean would take the other one."""
    rows = [
        ran("cute", 4.0, 1, **CI),
        ran("cute", 3.0, 2, **CI),
        ran("triton", 8.0, 1, **CI),
        ran("triton", 1.0, 2, **CI),
    ]
    assert against_baseline(*base(), *rows).startswith("pack: cute has the largest speed-up, 3.46x")


def test_what_cannot_be_compared() -> None:
    assert fastest() == fastest(one("combine", "cute", speedup=2.0)) == "pack: not measured."
    assert fastest(ran("cute", 0.0)) == "pack: not measured.", "a speed-up is above 0"
    assert fastest(*base()) == "pack: only the baseline torch ran (2 cells); speed-ups: not measured."
    assert fastest(*base(1)) == "pack: only the baseline torch ran (1 cell); speed-ups: not measured."


def test_nothing_is_claimed_that_no_interval_shows() -> None:
    """A mean of at most 1, or intervals that include it; those that have none are counted by themselves."""
    slow = against_baseline(
        *base(), ran("cute", 0.5, 1, speedup_ci_low=0.4, speedup_ci_high=0.6), ran("cute", 2.0, 2, **CI)
    )
    assert slow.startswith(
        "pack: no implementation has a geometric mean above the baseline torch; the nearest is cute with 1.00x (0.50x to 2.00x; the 95 % interval "
        "lies above 1 in 1 of 2 cells that differ in tokens, below 1 in 1, and includes 1 in 0)"
    )
    unsure = against_baseline(
        *base(), ran("cute", 1.5, 1, speedup_ci_low=1.0, speedup_ci_high=2.0), ran("cute", 1.5, 2)
    )
    assert unsure.startswith(
        "pack: no implementation is shown to be faster than torch; cute has the largest geometric mean, 1.50x (1.50x to 1.50x; the 95 % interval "
        "lies above 1 in 0 of 2 cells that differ in tokens, below 1 in 0, and includes 1 in 1; 1 have too few pairs for an interval)"
    )
    touching = against_baseline(*base(1), ran("cute", 0.9, 1, speedup_ci_low=0.8, speedup_ci_high=1.0))
    assert "in 0 of 1 cell, below 1 in 0, and includes 1 in 1)" in touching
    wide = against_baseline(
        *base(), ran("cute", 2.0, 1, converged=False, **CI), ran("cute", 2.0, 2, converged=True, **CI)
    )
    assert "and includes 1 in 0; in 1 the interval of the time stayed wider than asked)" in wide


def test_verdicts_decide_where_there_are_any() -> None:
    """Whatever the intervals show; the noise is that of the cells."""
    told = [
        ran("cute", 2.0, t, verdict=verdict, noise_floor=noise, **CI)
        for t, verdict, noise in (
            (1, "faster", 0.006),
            (2, "same", 0.02),
            (3, "undecided", 0.01),
            (4, "slower", None),
            (5, "same", 0.006),
        )
    ]
    text = against_baseline(*base(1, 2, 3, 4, 5), *told)
    assert text.startswith(
        "pack: cute has the largest speed-up, 2.00x torch in the geometric mean (2.00x to 2.00x; faster in 1 of 5 cells that differ in tokens, "
        "slower in 1, same in 2, undecided in 1, beyond noise of 0.6% to 2.0%)"
    )
    text = against_baseline(*base(), *told[1:3])
    assert text.startswith("pack: no implementation is shown to be faster than torch; cute")
    assert "beyond noise of 0.6%)" in fastest(*base(1), told[0]) and "in 1 of 1 cell, slower in 0" in fastest(
        *base(1), told[0]
    )


def test_against_the_fastest_other() -> None:
    """The paired ratio where a row holds one, else that of medians on the same card; nothing where nobody else ran."""
    rows = [*base(), ran("cute", 2.0, 1, best_speedup=1.5, **CI), ran("cute", 2.0, 2, **CI)]
    assert "each cell, cute is 1.73x as fast in the geometric mean (1.50x to 2.00x); against the baseline, " in fastest(
        *rows
    )
    quick = ran("triton", 4.0, 2, **CI)
    assert "of each cell, cute is 0.50x as fast in the geometric mean (0.50x to 0.50x); " in fastest(
        *base(2), rows[3], quick | {"speedup": 1.5}
    )
    assert "of each cell, cute is 2.00x as fast in the geometric mean (2.00x to 2.00x); " in fastest(
        *base(2), rows[3], quick | {"speedup": 1.5, "gpu_uuid": "GPU-2"}
    )
    none = [one | {"gpu_uuid": None} for one in (*base(2), rows[3])]
    assert "of each cell, cute is 2.00x" in fastest(*none), "a CPU has no UUID"
    assert fastest(ran("cute", 2.0, 1, **CI)) == (
        "pack: cute has the largest speed-up, 2.00x torch in the geometric mean (2.00x to 2.00x; the 95 % interval lies above 1 in 1 of 1 cell, "
        "below 1 in 0, and includes 1 in 0)."
    )


def shared(bench: str, implementation: str, share: float | None, **values: object) -> dict[str, object]:
    return one(bench, implementation, share_of_copy=share, **{"flops": 0, "median_us": 1.0} | values)


def test_shares_of_the_copy() -> None:
    """The best by its median, its most, and the baseline's; of rows without FLOPs."""
    rows = [
        *(shared("pack", "cute", share, tokens=t) for t, share in ((1, 0.5), (2, 0.9), (3, 0.8))),
        *(shared("pack", "torch", share, tokens=t) for t, share in ((1, 0.7), (2, 0.3), (3, 0.99))),
        shared("pack", "triton", None),
        shared("pack", "triton", 1.5, flops=1),
        shared("combine", "cute", 1.5),
    ]
    begin = "pack: the highest median share of the measured copy bandwidth is cute's, 80.0% (at most 90.0%)"
    over = "medians over cells that differ in tokens."
    assert findings.copy_share(frame(*rows), "pack") == f"{begin}; the baseline torch reaches 70.0%; {over}"
    assert findings.copy_share(frame(*rows[:3]), "pack") == f"{begin}; {over}"
    assert findings.copy_share(frame(*rows[4:5]), "pack") == (
        "pack: the highest median share of the measured copy bandwidth is torch's, 30.0% (at most 30.0%); medians over cells."
    )
    assert findings.copy_share(frame(*rows[6:]), "pack") == ""
    apart = findings.copy_share(frame(rows[1], rows[3]), "pack")
    assert apart.endswith("the baseline torch reaches 70.0%; medians over cells."), "a median is of one implementation"


def test_shares_of_the_stages() -> None:
    """Of the implementation that wins most cells, in the cells that it ran in; a part that a row lacks took no time."""

    def layer(implementation: str, cell: str, us: float, stages: object, tokens: int) -> dict[str, object]:
        return one("layer", implementation, cell=cell, median_us=us, stage_us=stages, tokens=tokens)

    rows = [
        layer("a", "1", 10.0, [("router", 1.0), ("pack+experts", 3.0)], 1),
        layer("b", "1", 11.0, [("router", 9.0)], 1),
        layer("a", "2", 10.0, {"router": 4.0, "pack+experts": 1.0}, 2),
        layer("b", "2", 11.0, [("router", 9.0)], 2),
        layer("a", "3", 12.0, [("pack+experts", 2.0)], 2),
        layer("b", "3", 11.0, [("router", 9.0)], 2),
        layer("c", "4", 1.0, [], 4),
        layer("c", "5", 1.0, None, 4),
        layer("c", "6", 1.0, [("router", 0.0)], 4),
    ]
    assert findings.stage_shares(frame(*rows), "layer") == (
        "Where the time of layer goes: a has the lowest median in 2 of 3 cells; there, the median shares of its stages over 3 cells that differ in "
        "tokens are pack+experts (fused) 75%, router 25%."
    )
    assert findings.stage_shares(frame(*rows[6:]), "layer") == "Where the time of layer goes: not measured."
    assert findings.stage_shares(frame(*rows), "routing") == "Where the time of routing goes: not measured."
    plain = findings.stage_shares(frame(rows[1] | {"stage_us": [("router", 0.25)]}), "layer")
    assert plain.endswith(
        "b has the lowest median in 1 of 1 cells; there, the median shares of its stages over 1 cell are router 100%."
    )


def test_what_a_capacity_drops() -> None:
    """The median over routings, each once, by factor and skew."""

    def routed(rate: float | None, skew: float | None = 0.5, factor: float | None = 1.25, **values: object):
        return one("pack", capacity_factor=factor, skew=skew, drop_rate=rate, experts=8, top_k=2, **values)

    rows = [
        routed(0.1, tokens=1),
        routed(0.1, tokens=1),
        routed(0.2, tokens=2, dtype="fp32"),
        routed(0.6, tokens=3, dtype="bf16", hidden=64),
        routed(0.004, factor=2.0, tokens=1),
        routed(0.9, None),
        routed(0.9, factor=None),
        routed(None),
    ]
    assert findings.drops(frame(*rows)) == (
        "What a capacity factor drops of drawn loads (median share of assignments over 4 routings that differ in tokens; trained routers are under Quality): 1.25 at skew 0.5: 20.0%, 2 at skew 0.5: 0.4%."
    )
    assert (
        findings.drops(frame(rows[0]))
        == "What a capacity factor drops of drawn loads (median share of assignments over 1 routing; trained routers are under Quality): 1.25 at skew 0.5: 10.0%."
    )
    assert findings.drops(frame(*rows[5:])) == "What a capacity factor drops: not measured on loads that differ."
    uneven = routed(0.25, 1.0, sampler="exact")
    assert "at skew 1: 25.0%" in findings.drops(frame(uneven)), "only even loads are balanced by construction"
    even = routed(0.0, 0.0, sampler="exact")
    assert findings.drops(frame(even)) == findings.drops(frame()), "balanced by construction"
    assert "at skew 0: 30.0%" in findings.drops(frame(even | {"sampler": "plackett_luce", "drop_rate": 0.3}))


def test_noise() -> None:
    """By bench, in the order of the rows; judged where five others give a floor."""

    def twin(bench: str, ratio: float, low: float = 1.0001) -> dict[str, object]:
        numbers = {
            "twin_speedup": ratio,
            "twin_speedup_ci_low": low,
            "twin_speedup_ci_high": ratio * 1.01,
            "twin_speedup_p": 0.001,
        }
        return one(bench, median_us=50.0, **numbers)

    few = [twin("permute", 1.002), twin("gate", 1.01), twin("permute", 1.05)]
    assert findings.noise(frame(*few)) == (
        "Noise: an implementation that was entered twice in a cell differs from itself by a median of "
        "2.54% for permute (at most 4.9%, 2 twins), 1.00% for gate (at most 1.0%, 1 twin)."
    )
    many = [*(twin("pack", 1.002) for _ in range(5)), twin("pack", 1.09)]
    assert findings.noise(frame(*many)) == (
        "Noise: an implementation that was entered twice in a cell differs from itself by a median of 0.20% for pack (at most 8.6%, 6 twins); "
        "of 6, each held against the floor of the others, the verdict would tell 1 apart."
    )
    assert findings.noise(frame(one("pack"))) == (
        "Noise: not measured, so this run has no verdicts: no implementation was entered twice (`twins`)."
    )


def test_cautions() -> None:
    rows = [
        one("pack", suspect=suspect, converged=converged)
        for suspect, converged in ((True, True), (False, False), (False, False), (None, False), (None, None))
    ]
    assert findings.cautions(frame(*rows)) == (
        "Cautions: of 5 measured rows, 1 are suspect (such as a drift of the ceilings) and 3 reached a limit before their interval was as narrow as "
        "asked; the table marks both."
    )


def test_rows_without_a_time() -> None:
    rows = [one("pack", status=status) for status in ("ok", "crashed", "timeout", "crashed")]
    assert (
        findings.not_ok(frame(*rows))
        == "3 of 4 rows are not ok (2 crashed, 1 timeout); each is listed below with its reason."
    )
    assert findings.not_ok(frame(rows[0])) == "0 of 1 rows are not ok."


def test_nothing_is_said_of_doubtful_rows() -> None:
    """Of the fastest, shares and costs; a bench of which no row is left says so."""
    rows = [*base(1), ran("cute", 2.0, 1, **CI)]
    found = texts(frame(*(row | {"suspect": True} for row in rows)))
    assert (
        found[0]
        == "pack: nothing is said of 2 rows: the quickest of each cell is suspect for more than a drift of the ceilings, or did not converge and has no verdict."
    )
    assert "cute has the largest" in texts(frame(*rows))[0]
    rest = texts(frame(rows[0], rows[1] | {"converged": False, "best_verdict": "undecided"}))
    assert rest[0].startswith("pack: nothing is said of 2 rows"), "the baseline alone is no comparison"
    told = texts(frame(rows[0], rows[1] | {"converged": False, "best_verdict": "faster"}))
    assert "cute has the largest" in told[0]
    drifted = {"suspect": True, "suspect_reason": "ceilings drifted 5.0% during the cell"}
    assert "cute has the largest" in texts(frame(*(row | drifted for row in rows)))[0], "both times took turns"
    shared = drifted | {"suspect_reason": f"{drifted['suspect_reason']}; other processes on the GPU: 1"}
    assert texts(frame(*(row | shared for row in rows)))[0] == found[0]


def test_a_share_of_a_ceiling_that_drifted_is_not_said() -> None:
    """A ratio within the cell is; the share of a copy is not."""
    rows = [one("pack", "torch", speedup=1.0, median_us=2.0, share_of_copy=0.5, flops=0, tokens=1)]
    drifted = {"suspect": True, "suspect_reason": "ceilings drifted 5.0% during the cell"}
    assert any("share of the measured copy" in text for text in texts(frame(*rows)))
    assert not any("share of the measured copy" in text for text in texts(frame(rows[0] | drifted)))


def test_cells_that_are_left_out_are_counted() -> None:
    """Whoever reads "in 3 of 3 cells" learns that there were more; of a bench without doubtful cells nothing is added."""
    rows = [*base(1, 2, 3), *(ran("cute", 2.0, t, **CI) for t in (1, 2, 3))]
    doubtful = [
        row
        | (
            {"suspect": True}
            if row["tokens"] == 1
            else {"converged": False, "best_verdict": "undecided"}
            if row["tokens"] == 2
            else {}
        )
        for row in rows
    ]
    text = "pack: 2 of 3 cells are left out here: the quickest of each is suspect for more than a drift of the ceilings, or did not converge and has no verdict."
    assert texts(frame(*doubtful))[1] == text
    assert "1 of 3 cells is left out" in texts(frame(*doubtful[:1], *rows[1:3], *doubtful[3:4], *rows[4:]))[1]
    assert not [one for one in texts(frame(*rows)) if "left out" in one]
    other_card = [row | {"gpu_uuid": "GPU-2", "suspect": True} for row in (rows[0], rows[3])]
    assert "1 of 4 cells is left out" in texts(frame(*rows, *other_card))[1], "a cell on two cards is two"


def test_others_are_compared_where_both_ran() -> None:
    """On one card: a mean over other cells says nothing beside it."""
    rows = [*base(1, 2, 3), *(ran("cute", speedup, t, **CI) for t, speedup in ((1, 2.0), (2, 20.0), (3, 20.0)))]
    text = fastest(*rows, ran("quack", 10.0, 2, **CI), ran("quack", 8.0, 3, **CI | {"gpu_uuid": "GPU-2"}))
    assert "quack 2.00x (1 cell)" in text


def test_what_only_doubtful_rows_would_say_is_not_called_unmeasured() -> None:
    """It was measured; nothing is said of it. Where nothing was measured, that stands there."""
    stages = {"stage_us": [("router", 1.0), ("pack", 3.0)], "speedup": 2.0, "tokens": 8}
    rows = [
        one("routing", "cute", median_us=us, skew=skew, capacity_factor=cf, **stages)
        for us, skew, cf in ((4.0, 0.0, None), (5.0, 1.7, None), (3.0, 0.0, 1.0))
    ]
    begins = (
        "Where the time of routing goes",
        "Cost of skew without a capacity limit",
        "Time with a capacity factor against none",
    )

    def said(*found: dict[str, object]) -> list[str]:
        return [text for text in texts(frame(*found)) if text.startswith(begins)]

    doubt = ": nothing is said, because what was measured is suspect, or did not converge and has no verdict."
    sound = " ".join(texts(frame(*rows)))
    assert (
        all(one in sound for one in ("time of routing goes: cute", "at skew 1.7 over 0", "at factor 1"))
        and doubt not in sound
    )
    assert said(*(row | {"suspect": True} for row in rows)) == [begin + doubt for begin in begins]
    bare = [row | {"stage_us": None, "skew": 0.0, "capacity_factor": None, "suspect": True} for row in rows]
    assert said(*bare) == [f"{begin}: not measured." for begin in begins]


@pytest.mark.parametrize("status", ["ok", "crashed"])
def test_all_findings_in_their_order(status: str) -> None:
    """Of the benches that were asked for, also where nothing came of it; a row without a time counts for none."""
    rows = [
        one("routing", "torch", status=status, speedup=1.0, median_us=9.0),
        one("routing", "torch", speedup=9.0),
        one("pack", "torch", status=status, speedup=1.0, median_us=1.0, flops=0, share_of_copy=0.5),
    ]
    found = texts(frame(*rows))
    measured = status == "ok"
    only = "only the baseline torch ran (1 cell); speed-ups: not measured." if measured else "not measured."
    assert found[:-6] == [
        f"pack: {only}",
        *(
            [
                "pack: the highest median share of the measured copy bandwidth is torch's, 50.0% (at most 50.0%); medians over cells."
            ]
            * measured
        ),
        f"routing: {only}",
        "Where the time of routing goes: not measured.",
    ]
    begins = (
        "Cost of skew",
        "What a capacity factor drops",
        "Time with a capacity factor",
        "Noise",
        f"Cautions: of {2 * measured} measured rows",
        f"{0 if measured else 2} of 3 rows are not ok",
    )
    assert all(text.startswith(begin) for text, begin in zip(found[-6:], begins, strict=True)), found[-6:]
