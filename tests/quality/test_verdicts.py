"""Each verdict on constructed rows, and that statements are tested as stated."""

import numpy as np
import pandas as pd
import pytest

from moe_routing_bench.report import verdicts as rule
from moe_routing_bench.report.claim_statements import Statement
from moe_routing_bench.report.predecessor import CLAIMS, Claim
from moe_routing_bench.report.verdicts import CONFIRMED, NOT_COMPARABLE, REFUTED, verdicts

ORDER = Claim("a > b > c", "", "", "order", ("a", "b", "c"))
DROPS = Claim("nothing is dropped", "", "", "drops", bound=0.01)
NETWORKS = Claim("networks are equal", "", "", "networks", bound=0.02)
HASH = Claim("hash is balanced and worst", "", "", "hash", ("hash",))
NOISE = np.array(
    [0.0, 0.3, -0.2, 0.5, 0.1]
)  # of the seeds: shared by all routers, as runs of one seed saw the same bytes
SMALL = np.array([1, -2, 0, 2, -1]) / 1e3


def rows(router: str, loss: float, *, seeds: int = 5, **more: object) -> list[dict]:
    """One evaluation a seed around a mean loss."""
    fixed = {
        "label": "e", "purpose": "final", "step": 1, "network": "linear", "capacity_factor": 1.25, "drop_policy": "position",
        "train_mode": "joint", "causal": True, "learns": True, "validation_batches": "mixed", "capacity_factors": [1.05, 1.1], "drop_rate_by_factor": [0.0, 0.0], "load_cv": 0.5,
    } | {"router": router}  # fmt: skip
    # each router with an order of the small noise of its own: differences vary, as those of trained models do
    jitter = np.roll(SMALL, sum(map(ord, router + str(more.get("network")))))
    return [fixed | {"run": f"{router}{seed}{more}", "seed": seed, "bits_per_byte": loss + NOISE[seed] + jitter[seed]} | more for seed in range(seeds)]  # fmt: skip


def verdict(claim: Claim, *parts: list[dict]) -> tuple[str, str]:
    (found,) = verdicts(pd.DataFrame([row for part in parts for row in part]), claims=[claim])
    return found.verdict, found.why


def test_order() -> None:
    """The paired test sees through the noise of the seeds; one reversed step refutes, an unclear or missing one does not."""
    a, b, c = rows("a", 1.0), rows("b", 1.1), rows("c", 1.2)
    assert verdict(ORDER, a, b, c) == (CONFIRMED, "all 2 comparisons are significantly true")
    assert verdict(ORDER, a, rows("b", 1.3), c) == (REFUTED, "1 of 2 comparisons significantly false: b − c")
    found, why = verdict(ORDER, a, rows("b", 1.2), c)
    assert found == NOT_COMPARABLE and why == "the seeds cannot tell in 1 of 2 comparisons"
    assert verdict(ORDER, a, b) == (NOT_COMPARABLE, "no rows of c")
    assert verdict(ORDER, a, b[:-1], c)[0] == CONFIRMED, "by the seeds that both have"
    assert verdict(ORDER, rows("a", 1.5), b) == (REFUTED, "1 of 1 comparisons significantly false: a − b")
    assert (
        verdict(ORDER, rows("a", 1.0, seeds=1), rows("b", 1.1, seeds=1), rows("c", 1.2, seeds=1))[0] == NOT_COMPARABLE
    )


def test_rules_that_see_later_tokens_are_not_ranked() -> None:
    """However low their loss."""
    found, why = verdict(ORDER, rows("a", 0.1, causal=False), rows("b", 1.1), rows("c", 1.2))
    assert (found, why) == (NOT_COMPARABLE, "a sees later tokens: no rank beside causal rules")


def test_drops() -> None:
    """Every trained causal rule counts, at 1.10 alone; a rule that learns nothing or sees later tokens does not."""

    def dropping(name: str, mean: float, **more: object) -> list[dict]:
        return [
            row | {"drop_rate_by_factor": [0.5, mean + SMALL[i] / 10]} | more for i, row in enumerate(rows(name, 1))
        ]

    few, much = dropping("a", 0.001), dropping("b", 0.05)
    assert verdict(DROPS, few) == (CONFIRMED, "all 1 comparisons are significantly true")
    assert verdict(DROPS, few, much) == (REFUTED, "1 of 2 comparisons significantly false: b at 1.1")
    assert verdict(DROPS, few, dropping("b", 0.05, learns=False), dropping("c", 0.05, causal=False))[0] == CONFIRMED
    nobody = [row | {"drop_rate_by_factor": None} for row in much]
    assert verdict(DROPS, nobody) == (NOT_COMPARABLE, "no trained causal rule that chooses experts")


def test_networks() -> None:
    """Equal within the bound is more than not told apart."""
    linear, mlp = rows("a", 1.0), rows("a", 1.001, network="mlp")
    assert verdict(NETWORKS, linear, mlp)[0] == CONFIRMED
    assert verdict(NETWORKS, linear, rows("a", 1.1, network="mlp")) == (
        REFUTED,
        "1 of 2 comparisons significantly false: a+mlp − a",
    )
    wide = [row | {"bits_per_byte": row["bits_per_byte"] * (1 + i % 2)} for i, row in enumerate(mlp)]
    assert verdict(NETWORKS, linear, wide)[0] == NOT_COMPARABLE
    assert verdict(NETWORKS, linear, rows("b", 1.0)) == (NOT_COMPARABLE, "no rule was trained with two networks")


def test_hash() -> None:
    """Both halves of the claim are needed, and against every rule that learns."""
    even = rows("hash", 1.5, learns=False, load_cv=0.0)
    assert verdict(HASH, even, rows("a", 1.0), rows("b", 1.1))[0] == CONFIRMED
    assert verdict(HASH, even, rows("a", 1.0), rows("b", 1.6)) == (
        REFUTED,
        "1 of 4 comparisons significantly false: b − hash",
    )
    assert verdict(HASH, rows("hash", 1.5, learns=False, load_cv=0.9), rows("a", 1.0))[0] == REFUTED
    assert verdict(HASH, rows("a", 1.0)) == (NOT_COMPARABLE, "no rows of hash beside a causal rule that learns")


def test_p_is_corrected_for_the_number_of_statements() -> None:
    """The same values hold alone and cannot be told among many; values on the bound never hold."""
    good = Statement("good", np.array([-1.0, -1.2, -0.8]))
    (alone,), many = rule.outcomes([good]), rule.outcomes([good, *[Statement("null", np.array([1.0, -1.0, 0.0]))] * 4])
    assert alone[1] == rule.HOLDS and many[0][1] == rule.OPEN and many[0][0] == pytest.approx(5 * alone[0])
    assert [one for _, one in rule.outcomes([Statement("", np.zeros(5)), Statement("", np.ones(5)), Statement("", -np.ones(5))])] == [rule.OPEN, rule.FAILS, rule.HOLDS]  # fmt: skip


def test_every_claim_has_a_verdict_with_its_reason() -> None:
    """On rows that hold what some of the claims are about, and on none; the numbers are those of the rows."""
    table = pd.DataFrame(
        rows("softk", 1.0) + rows("hash_position", 1.2, learns=False) + rows("topk_hard", 1.1, learns=False)
    )
    for one in (table, table.iloc[:0]):
        found = verdicts(one)
        assert {each.claim for each in found} == set(CLAIMS)
        assert all(each.why and each.verdict in (CONFIRMED, REFUTED, NOT_COMPARABLE) for each in found)
    first = rule.judge(CLAIMS[0], "e", table.assign(contestant=table["router"]))
    assert first.verdict == REFUTED and first.ours[0].endswith("fails")
    assert first.ours[1].startswith("softk − hash_position: -0.200 ±") and first.ours[1].endswith("holds")


def test_a_comparison_is_said_in_plain_numbers() -> None:
    """With the zeros at their ends, and no power of ten, which a narrow column breaks in two."""
    seeds = Statement("a − b", np.array([0.1, 0.18, 0.11, 0.16, 0.15]), 0.0, "bits/byte")
    assert rule._words(seeds, 0.0031, "fails") == "a − b: 0.140 ± 0.042 bits/byte (n = 5, p = 0.0031): fails"
    assert rule._words(seeds, 2.1e-05, "fails").endswith("(n = 5, p < 0.0001): fails")
    whole = Statement("a at 1.1", np.array([1.25, 1.25]), 0.0, "%")
    assert rule._words(whole, 1.0, "cannot be told").startswith("a at 1.1: 125 ± 0.0 % (n = 2, p = 1)")


def test_a_claim_on_adapters_is_held_against_adaptations() -> None:
    """Rank by rank; the losses before the first step play no part."""
    claim = next(one for one in CLAIMS if one.source == "perft")
    fixed = {"label": "new", "purpose": "final", "causal": True, "old_bits_per_byte": 1.0}
    adapted = pd.DataFrame(
        fixed | {"variant": v, "rank": r, "seed": i, "run": f"{v}{r}{i}", "step": step, "bits_per_byte": loss + NOISE[i] + np.roll(SMALL, ord(v))[i]}
        for r, losses in ((2, {"R": 1.0, "E": 1.1, "S": 1.2}), (4, {"R": 1.2, "E": 1.1, "S": 1.3}))
        for v, last in losses.items() for i in range(5) for step, loss in ((0, 2.0), (9, last))
    )  # fmt: skip
    found = verdicts(pd.DataFrame(rows("softk", 1.0)), adapted, [claim])
    assert [(one.label, one.verdict) for one in found] == [("new r2", CONFIRMED), ("new r4", REFUTED)]
    (missing,) = verdicts(pd.DataFrame(rows("softk", 1.0)), claims=[claim])
    assert (missing.verdict, missing.why) == (NOT_COMPARABLE, "no adaptations of trained runs")
