"""What may be said of training runs: with which numbers, from which rows, of what text; and how much information experts have of a token."""

import dataclasses
import math
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from scipy import stats

from moe_routing_bench.cli import status
from moe_routing_bench.figures import expert_domains
from moe_routing_bench.grid.run_spec import PACKAGES, Run
from moe_routing_bench.quality import (
    cleaning,
    compare,
    expert_loads,
    family,
    run_rows,
    specialisation,
    study_costs,
    texts,
    train,
)
from moe_routing_bench.quality.moe_layer import Seen
from moe_routing_bench.report import trained_rules
from moe_routing_bench.statistics import holm
from moe_routing_kernels.errors import UserError
from moe_routing_kernels.routers.zoo import ZOO

STUDIES = Path(__file__).parents[2] / "config/studies"
GOOD: dict[str, Any] = {
    "subject": "a and b",
    "verdict": family.DIFFERENT,
    "test": "Tukey",
    "effect": 0.02,
    "low": 0.01,
    "high": 0.03,
    "margin": 0.01,
    "n": 5,
}


def test_a_statement_has_all_of_its_numbers() -> None:
    """Test, effect, interval, margin and n stand in the sentence."""
    said = str(family.Statement(**GOOD))
    assert said == "a and b are different (Tukey; margin 0.01): 0.0200 (0.0100 to 0.0300) bits per byte, n = 5 seeds"


@pytest.mark.parametrize(
    "change",
    [
        {"test": ""},
        {"effect": math.nan},
        {"low": 0.025},
        {"high": math.inf},
        {"margin": 0.0},
        {"n": 1},
        {"verdict": family.EQUIVALENT},  # a tie read as equivalence: no test of difference shows one
        {"test": family.TOST},
    ],
)
def test_a_statement_without_one_cannot_be_made(change: dict[str, Any]) -> None:
    with pytest.raises(UserError, match="statement on quality"):
        family.Statement(**GOOD | change)
    with pytest.raises(TypeError):
        family.Statement(**{name: value for name, value in GOOD.items() if name not in change})


def losses(*effects: float, seeds: int = 5, noise: float = 0.0087) -> pd.DataFrame:
    """By seed and rule, with a part of each seed that all rules have."""
    draw = np.random.default_rng(1)
    own = draw.normal(0, 0.1, (seeds, 1)) + np.array(effects) + draw.normal(0, noise, (seeds, len(effects)))
    return pd.DataFrame(own, columns=[f"r{i}" for i in range(len(effects))])


def test_pairs_say_what_their_test_shows() -> None:
    found = family.family(losses(1.5, 1.5001, 1.6, seeds=60))
    said = {pair.verdict: pair.statement for pair in found.pairs}
    assert said[family.EQUIVALENT].test == family.TOST and said[family.DIFFERENT].test == "Tukey"
    with pytest.raises(UserError, match="statement"):
        _ = family.family(losses(1.5, 1.6, seeds=1)).pairs[0].statement


def test_equivalences_are_corrected_for_all_pairs() -> None:
    """By Holm. The p of each alone is that of its effect, its standard error and the freedom of 12 seeds of 3 rules."""
    found = family.family(losses(1.5, 1.502, 1.504, seeds=12))
    reach = stats.studentized_range.ppf(0.95, 3, 22) / 2**0.5
    alone = [stats.t.sf((0.01 - pair.effect) / ((pair.high - pair.effect) / reach), 22) for pair in found.pairs]
    assert [pair.p_equivalent for pair in found.pairs] == pytest.approx(holm(alone))
    assert max(alone) > alone[0] > 0 and min(holm(alone)) == pytest.approx(3 * min(alone))


def test_what_is_stated_against_none_is_corrected_for_the_rules() -> None:
    """A t test and TOST over seeds, by Bonferroni: p of scipy times the number of rules on the same side of 0.05 as the verdict; nothing without noise."""
    draw = np.random.default_rng(2)
    table = pd.DataFrame(
        {
            "lost": 0.05 + draw.normal(0, 0.01, 8),
            "none": draw.normal(0, 0.001, 8),
            "wide": 0.012 * np.array([1, -1] * 4),  # equivalent if it were the only rule
            "flat": 0.3,
        }
    )
    found = family.against_none(table, "{} and none")
    assert {name: one.verdict for name, one in found.items()} == {
        "lost": "different",
        "none": "equivalent",
        "wide": "undecided",
    }
    for name, one in found.items():
        values = table[name]
        p = 4 * stats.ttest_1samp(values, 0).pvalue
        assert (p < 0.05) == (one.verdict == family.DIFFERENT) == (one.low > 0 or one.high < 0)
        low, high = (
            4 * stats.ttest_1samp(values, side * 0.01, alternative=way).pvalue
            for side, way in ((-1, "greater"), (1, "less"))
        )
        assert (max(low, high) < 0.05) == (one.verdict == family.EQUIVALENT)
        half = stats.t.ppf(1 - 0.05 / (2 * 4), 7) * stats.sem(values)
        assert (one.low, one.high) == pytest.approx((values.mean() - half, values.mean() + half))
        assert one.effect == pytest.approx(values.mean()) and one.n == 8 and one.subject == f"{name} and none"
    assert family.against_none(table.iloc[:1], "{}") == {}


def test_a_run_far_from_rule_and_seed_is_named_and_kept() -> None:
    """A run that learnt late widens every interval; the family without it is stated with the one that has it."""
    usual = losses(1.5, 1.5, 1.52, seeds=6, noise=0.004)
    assert family.family(usual).far == [] and family.told_far(usual, family.family(usual)) == ""
    late = usual.copy()
    late.iloc[3, 1] += 0.08
    found = family.family(late)
    assert found.far == [(late.columns[1], late.index[3])]
    assert found.noise > 3 * family.family(usual).noise
    rest = family.without_far(late, found)
    assert rest.noise < 2 * family.family(usual).noise and [pair.seeds for pair in rest.pairs] == [5, 6, 5]
    told = family.told_far(late, found)
    assert "1 of 18." in told and f"noise {rest.noise:.4f}" in told
    assert ", ".join(f"{sum(pair.verdict == v for pair in rest.pairs)} {v}" for v in family.VERDICTS) in told


def test_normal_noise_has_hardly_a_run_that_is_far() -> None:
    """At 5 %, about five of 100 families of 12 rules and 5 seeds have one."""
    draws = np.random.default_rng(8).normal(0, 0.01, (100, 5, 12))
    assert 0 < sum(bool(family.family(pd.DataFrame(one)).far) for one in draws) < 12


def test_several_far_runs_do_not_hide_each_other() -> None:
    several = losses(*[1.5] * 8, noise=0.004)
    places = [(0, 2), (3, 2), (4, 6)]
    for seed, rule in places:
        several.iloc[seed, rule] += 0.06
    far = family.family(several).far
    assert sorted(far) == sorted((several.columns[rule], seed) for seed, rule in places)


def test_the_power_of_an_equivalence_is_that_of_draws() -> None:
    """With as many seeds as are asked for, four fifths of equal pairs pass, and with half of them far fewer."""
    needed = study_costs.seeds_needed(0.0087, 2)
    assert needed is not None and 10 < needed < 20

    def share(seeds: int) -> float:
        """Of 20,000 pairs of equal rules, those that TOST finds equivalent; of two rules the noise is that of their differences."""
        differences = np.random.default_rng(5).normal(0, 0.0087 * 2**0.5, (20_000, seeds))
        error = differences.std(axis=1, ddof=1) / seeds**0.5
        p = stats.t.sf((family.MARGIN - np.abs(differences.mean(axis=1))) / error, seeds - 1)
        return float((p < family.ALPHA).mean())

    assert 0.74 < share(needed) < 0.88 and share(needed // 2) < 0.5
    assert study_costs.seeds_needed(0.0087, 9, 36) > needed and study_costs.seeds_needed(1.0, 2) is None  # type: ignore[operator]


def test_plan_says_how_many_seeds_an_equivalence_takes(capsys: pytest.CaptureFixture[str]) -> None:
    status.plan(config=[STUDIES / "b.yaml"], platform="nvidia-h200")
    (line,) = (line for line in capsys.readouterr().out.splitlines() if "shown equivalent" in line)
    assert (
        line.startswith("b, 3 seeds: ")
        and f"by {study_costs.seeds_needed(study_costs.NOISE, 9)} seeds for one pair" in line
    )


def final(router: str, seed: int, bits: float, **more: Any) -> dict[str, Any]:
    common = dict.fromkeys(run_rows.COLUMNS) | {
        "label": "a",
        "config_hash": "c",
        "purpose": "final",
        "network": "linear",
        "drop_policy": "position",
        "train_mode": "joint",
        "step": 1,
        "causal": True,
        "learns": True,
        "lr": 0.1,
        "tokens_seen": 2 * 10**7,
        "active_params": 10**7,
        "dim": 8,
    }
    return common | {"run": f"{router}{seed}", "router": router, "seed": seed, "bits_per_byte": bits} | more


def runs(first: float = 1.5, **more: Any) -> pd.DataFrame:
    """Five seeds of two rules, which differ by 0.1 bits."""
    own = losses(first, first + 0.1)
    records = [
        final(name, seed, float(own[f"r{i}"][seed]), **more)
        for i, name in enumerate(("softk", "base"))
        for seed in own.index
    ]
    return pd.DataFrame(records, dtype=object).infer_objects()


def test_nothing_is_said_of_models_that_are_too_weak_or_too_short() -> None:
    """4.05 bits per byte are frequencies of bytes; nor of models that saw fewer tokens than they have active parameters."""
    good = trained_rules.quality(compare.finals(runs()))
    assert good is not None and "The first two: softk and base are different (Tukey; margin 0.01)" in good.text
    weak = trained_rules.quality(compare.finals(runs(4.05)))
    assert weak is not None and "not judged" in weak.text and "too weak to judge: 4.0" in weak.text
    short = trained_rules.quality(compare.finals(runs(tokens_seen=10**6)))
    assert short is not None and "too short to judge: 0.1 tokens per active parameter" in short.text
    mixed = compare.finals(runs())
    mixed.loc[mixed.index[1], "tokens_seen"] = 10**6
    assert "too short to judge: 0.1" in compare.too_weak(mixed), "of one run too short the others do not make up"
    share = {"capacity_factors": [1.0], "drop_rate_by_factor": [0.2], "validation_batches": run_rows.MIXED}
    dropped = trained_rules.left_over(compare.finals(runs(4.05, **share)))
    assert dropped is not None and "not judged" in dropped.text and "%" not in dropped.text


@pytest.mark.parametrize(
    ("name", "value"),
    [("dim", 16), ("batch", 64), ("steps", 9), ("corpus_sha256", "x"), ("validation_batches", run_rows.BY_DOMAIN)],
)
def test_runs_of_another_size_text_or_validation_are_another_comparison(name: str, value: Any) -> None:
    """So E=8 and E=32 of other widths, or a validation of single domains, are never in one test."""
    table = compare.finals(runs())
    other = table.assign(**{name: [value if router == "base" else 8 for router in table["router"]]})
    with pytest.raises(UserError, match=f"comparison of runs, {name}"):
        family.by_seed(other, compare.METRIC)
    assert family.by_seed(table, compare.METRIC).shape == (5, 2)


@pytest.mark.parametrize("piece", [1, 64, 100, 4096])
def test_a_string_that_recurs_across_two_pieces_of_a_text_is_found(piece: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cleaning, "_PIECE", piece)
    known, train = np.random.default_rng(0).integers(97, 123, (2, 300), dtype=np.uint8)
    train[150:220] = known[:70]
    assert cleaning.recurring(bytes(known), [bytes(train)]) == 70
    assert cleaning.recurring(bytes(known), [bytes(train[:210]), bytes(train[210:])]) == 0


def test_validation_text_that_recurs_is_counted_and_stored(tmp_path: Path) -> None:
    """In strings of 64 bytes; where training documents end, too. Rows above the bound are not ranked."""
    draw = np.random.default_rng(0)
    fresh, other, known = (bytes(draw.integers(97, 123, size, dtype=np.uint8)) for size in (4000, 500, 300))
    assert cleaning.recurring(other + known + other, [fresh, known]) == 300
    assert cleaning.recurring(other + known[:63], [known]) == 0 == cleaning.recurring(b"short", [known])
    folder = tmp_path / "text"
    folder.mkdir()
    for number in range(12):
        (folder / f"{number:02}").write_bytes(bytes(draw.integers(97, 101, 300, dtype=np.uint8)) + known)
    run = Run(corpora={str(folder): None}, experts=4, dim=16, heads=2, layers=1, expert_hidden=16, sequence=32, batch=4)
    run = dataclasses.replace(run, steps=2, warmup=1, altered=False)
    train.train(run, tmp_path / "run.parquet", "cpu")
    stored = run_rows.last(tmp_path / "run.parquet")
    assert stored["recurring_share"] == pytest.approx(0.5, abs=0.01)
    table = compare.finals(runs())
    share = [0.5 if router == "base" else 0.001 for router in table["router"]]
    refused = compare.refusals(table.assign(recurring_share=share))
    of_base, of_softk = (set(refused[table["router"] == name]) for name in ("base", "softk"))
    assert of_base == {compare.RECURS.format(share=0.5, most=0.01)} and of_softk == {""}
    assert (compare.refusals(table) == "").all(), "of older rows it is not known"


def test_a_share_is_known_where_every_domain_was_counted() -> None:
    one = texts.Corpus("a", np.zeros(9, np.uint8), np.zeros(100, np.uint8), "", texts.PLAIN, 10)
    assert texts.recurring_share([one, dataclasses.replace(one, recurring=0)]) == pytest.approx(0.05)
    assert texts.recurring_share([one, dataclasses.replace(one, recurring=None)]) is None
    assert PACKAGES in train.Run(corpora={PACKAGES: None}).corpora


def test_information_on_the_device_is_that_of_stored_counts() -> None:
    """With the same correction: of independent choices nothing is left."""
    draw = np.random.default_rng(0)
    counts = draw.integers(0, 50, (256, 8)).astype(float)
    found = expert_loads.information(torch.from_numpy(counts))
    assert found == pytest.approx(specialisation.mutual_information(counts), abs=1e-12)
    shares = np.full((64, 8), 1 / 512).ravel()
    alone = [
        expert_loads.information(torch.from_numpy(draw.multinomial(4000, shares).reshape(64, 8) * 1.0))
        for _ in range(200)
    ]
    assert abs(np.mean(alone)) < 0.01 < 63 * 7 / (2 * 4000 * math.log(2))
    assert math.isnan(expert_loads.information(torch.zeros(3, 2)))


def test_runs_store_what_experts_know_of_the_token(shared_text: str, tmp_path: Path) -> None:
    """A hash of the token tells all that experts can tell; the domain, of which there is one, nothing. The figure and the table show it."""
    run = Run(
        router="hash_random",
        top_k=1,
        experts=4,
        dim=16,
        heads=2,
        layers=2,
        expert_hidden=16,
        corpora={shared_text: None},
    )
    run = dataclasses.replace(run, sequence=32, batch=4, steps=2, warmup=1, altered=False)
    rows = train.train(run, tmp_path / "run.parquet", "cpu")
    table = run_rows.read(tmp_path / "run.parquet").to_pandas()
    load = np.array([list(one) for one in rows[-1]["load_by_domain"][0]]).sum(0)
    assert rows[-1]["token_bits_by_layer"][0] == pytest.approx(specialisation.entropy(load), abs=0.02)
    found = specialisation.with_information(compare.finals(table)).iloc[-1]
    assert found["expert_domain_bits"] == pytest.approx(0, abs=1e-9) and found["choices"] == 1000
    assert found["expert_domain_bits"] <= found["expert_class_bits"] <= found["expert_token_bits"] + 1e-9
    chart = expert_domains.expert_information(table)
    assert list(chart.marks["x"]) == pytest.approx([found[name] for name in specialisation.INFORMATION])
    assert chart.shared and "1,000 choices a layer" in chart.note and "1,000 choices" in chart.marks["says"].iloc[0]
    (line,) = trained_rules.contests(table)[0].rows
    headings = [heading for _, heading, *_ in trained_rules.COLUMNS]
    assert line["values"][headings.index("n")] == "1,000"
    assert line["values"][headings.index("expert–token bits")] == f"{found['expert_token_bits']:z.3f}"


def test_a_line_of_a_contest_has_means_of_what_is_known() -> None:
    """Not the middle of the seeds; a dash where no seed has a value, and no interval of one seed."""
    assert trained_rules._mean(pd.Series([1.0, 2.0, 6.0, np.nan]), "{:.3f}") == "3.000"
    assert trained_rules._mean(pd.Series([0.01, 0.02, 0.09]), "{:.1%}") == "4.0%"
    assert trained_rules._mean(pd.Series([np.nan, np.nan]), "{:.3f}") == "–"
    names = [name for name, *_ in trained_rules.COLUMNS]
    seen = pd.DataFrame(
        {name: [1000.0 * place, 1000.0 * place + 1, 1000.0 * place + 5] for place, name in enumerate(names)}
    )
    seen = seen.assign(causal=False, causal_in_evaluation=[True, True, False])
    rank = {"contestant": "a", "rank": 2, "letters": "ab", "equivalent": ["b"], "undecided": [], "seeds": 3}
    line = trained_rules._line(rank | {"mean": 1.23456, "half_width": 0.01234}, seen)
    assert (line["contestant"], line["mean"], line["half_width"], line["seeds"]) == ("a †", "1.2346", "± 0.0123", 3)
    assert line["values"] == [
        form.format(1000.0 * place + 2) for place, (_, _, form, _) in enumerate(trained_rules.COLUMNS)
    ]
    alone = trained_rules._line(rank | {"mean": 1.0, "half_width": np.nan}, seen.assign(causal_in_evaluation=True))
    assert (alone["contestant"], alone["half_width"]) == ("a † (causal in evaluation)", "–")
    assert trained_rules._line(rank | {"mean": 1.0, "half_width": 0.0}, seen.assign(causal=True))["contestant"] == "a"
    assert trained_rules._added(pd.Series([0.5, 0.25, np.nan]), "+z.4f") == f"+0.3750 ± {12.7062 * 0.125:.4f}"
    assert (
        trained_rules._added(pd.Series([np.nan]), "+z.4f") == "–"
        and trained_rules._added(pd.Series([-0.5]), "+z.4f") == "-0.5000"
    )


def test_what_an_alteration_costs_is_less_what_the_same_seed_has() -> None:
    runs_ = pd.DataFrame({"bits_per_byte": [2.0, 3.0], "bits": [[("int4", 2.5), ("int2", 4.0)], [("int4", 3.25)]]})
    name, own, added = trained_rules._altered_line("a", runs_, "bits", ["int4", "int2"])
    assert (name, own, added[1]) == ("a", f"2.5000 ± {12.7062 * 0.5:.4f}", "+2.0000")
    assert added[0] == f"+0.3750 ± {12.7062 * 0.125:.4f}"


def test_a_noise_is_that_of_the_largest_contest_of_this_code_and_size() -> None:
    """Two seeds of two rules come first in the table; five of others count, and those of another code do not."""
    few, many = runs(label="few", code_fingerprint="c"), runs(label="many", code_fingerprint="c")
    few = few[few["seed"] < 2]
    few = few.assign(bits_per_byte=few["bits_per_byte"] + 0.3 * few["seed"] * (few["router"] == "base"))
    other = runs(label="other", code_fingerprint="d")
    every = pd.concat([few, other, other.assign(seed=other["seed"] + 5), many], ignore_index=True)
    rows = compare.finals(every.assign(run=[f"{i}" for i in range(len(every))]))
    by_seed = many.pivot(index="seed", columns="router", values="bits_per_byte")
    noise, said = study_costs.stored_noise(rows, {"dim": 8}, "c")
    assert noise == pytest.approx(family.family(by_seed).noise) and "2 stored contestants" in said and "5 seeds" in said
    assert study_costs.stored_noise(rows, {"dim": 9}, "c") == (study_costs.NOISE, study_costs.ASSUMED)


def test_the_least_effect_that_is_found_is_that_of_the_median_pair() -> None:
    """By hand: a rule without some of the seeds has larger errors with all others, and two pairs without it smaller ones."""
    table = losses(1.5, 1.51, 1.52, 1.53, seeds=8)
    table.iloc[3:, 0] = np.nan
    found, freedom = family.family(table), 8 + 3 * 8 - 5 - 11
    assert sum(pair.seeds == 3 for pair in found.pairs) == 3
    reach = stats.studentized_range.ppf(0.95, 4, freedom) / 2**0.5
    errors = sorted((pair.high - pair.effect) / reach for pair in found.pairs)
    assert errors[0] < 0.8 * errors[-1]
    assert found.detectable == pytest.approx((reach + stats.t.ppf(0.8, freedom)) * np.median(errors))


def test_one_of_few_runs_may_be_far_too() -> None:
    """A tenth of nine runs is less than one: it is looked at nevertheless."""
    few = losses(1.5, 1.5, 1.52, seeds=3, noise=0.004)
    few.iloc[1, 1] += 0.5
    assert family.family(few).far == [("r1", 1)]


def test_a_rule_of_several_is_refused_where_one_of_them_has_changed_since() -> None:
    """Rules per layer are named together; the latest change of any of them counts."""
    late = max((name for name in ZOO if "+" not in name), key=lambda name: ZOO[name].changed)
    early = min((name for name in ZOO if "+" not in name), key=lambda name: ZOO[name].changed)
    assert ZOO[early].changed < "2026-01-01" < ZOO[late].changed
    for router, refused in ((early, False), (late, True), (f"{early}+{late}", True), (f"{late}+{early}", True)):
        rows = runs(ended_at="2026-01-01T00:00:00+00:00").assign(router=router)
        assert set(compare.refusals(rows)) == {compare.OLDER_CODE if refused else ""}, router


def test_tokens_that_choose_none_are_none_that_lose_all() -> None:
    """Of four tokens one chooses no expert, one is padding, and one loses its only choice: drops are of two tokens."""
    ids = torch.tensor([[0, 1], [-1, -1], [2, -1], [0, 3]])
    kept = torch.tensor([[True, False], [True, True], [False, True], [True, True]])
    seen = Seen(ids, kept, torch.full((4, 4), 0.25))
    sums = expert_loads.Loads.empty(1, 4, "cpu")
    zeros = torch.zeros(4, dtype=torch.long)
    sums.add(seen, 2, torch.tensor([True, True, True, False]), zeros, zeros, zeros)
    assert (float(sums.chosen), float(sums.lost), float(sums.dropped)) == (2, 1, 2)
    assert sums.by_domain.tolist() == [[1, 1, 1, 0]]
