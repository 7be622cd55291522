"""Numbers of training and its comparison, worked out in another way on small cases in which sizes, steps, seeds and rules all differ."""

import dataclasses
import hashlib
import io
import json
import math
import tarfile
import zipfile
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
import torch
from scipy import stats

from moe_routing_bench.grid.run_spec import DENSE, Adaptation, Run
from moe_routing_bench.quality import (
    adapt,
    cleaning,
    compare,
    corpus_packages,
    corpus_preparation,
    engine,
    evaluate,
    expert_loads,
    family,
    language_model,
    loop,
    moe_layer,
    perft_summary,
    plan,
    prepared,
    rates,
    run_rows,
    specialisation,
    stage_clock,
    steps,
    study_costs,
    texts,
    timing,
    train,
)
from moe_routing_bench.store import paths
from moe_routing_kernels.errors import UserError
from moe_routing_kernels.routers import zoo
from moe_routing_kernels.routers.zoo import ZOO

RUN = Run(corpora={"stdlib": 1000}, dim=16, heads=2, layers=3, experts=4, top_k=2, expert_hidden=8, sequence=6, batch=5)


@pytest.mark.parametrize(("noise", "rules", "pairs"), [(0.01, 2, 1), (0.01, 4, 6), (0.03, 3, 1), (0.004, 5, 10)])
def test_the_fewest_seeds_with_the_power_that_is_asked_for(noise, rules, pairs):
    found = study_costs.seeds_needed(noise, rules, pairs)

    def power(seeds):
        freedom, error = (seeds - 1) * (rules - 1), noise * math.sqrt(2 / seeds)
        reach = 0.01 / error - stats.t.ppf(1 - 0.05 / pairs, freedom)
        return 2 * stats.t.cdf(reach, freedom) - 1

    assert power(found) >= 0.8 and (found == 2 or power(found - 1) < 0.8)
    assert study_costs.seeds_needed(10.0, 2) is None
    text = study_costs.power_of_equivalence(0.01, 4)
    assert (
        text.endswith(f"{study_costs.seeds_needed(0.01, 4, 6)} for the last of 6")
        and f"by {study_costs.seeds_needed(0.01, 4)} seeds" in text
    )


def test_noise_is_that_of_the_contest_with_the_most_rows():
    draw = np.random.default_rng(0)

    def rows(label, rules, seeds, noise, **values):
        known = {"label": label, "causal": True, "code_fingerprint": "x", "steps": 9}
        return [
            known | values | {"contestant": f"r{rule}", "seed": seed, "bits_per_byte": 2 + draw.normal(0, noise)}
            for rule in range(rules)
            for seed in range(seeds)
        ]

    table = pd.DataFrame(
        [
            *rows("few", 2, 2, 1.0),
            *rows("single", 1, 30, 1.0),
            *rows("many", 4, 5, 0.01),
            *rows("old", 5, 9, 5.0, code_fingerprint="y"),
            *rows("late", 5, 9, 5.0, causal=False),
            *rows("long", 5, 9, 5.0, steps=10),
        ]
    )
    noise, source = study_costs.stored_noise(table, {"steps": 9}, "x")
    assert 0.004 < noise < 0.02 and source.startswith("that of 4 stored contestants of this code and size, 5 seeds")
    assert study_costs.stored_noise(table, {"steps": 8}, "x") == (study_costs.NOISE, study_costs.ASSUMED)


def test_what_adapters_reached():
    """The last evaluation against the first, whatever the order of rows; pilots do not count."""

    def row(run, step, new, old, rank=4, purpose="final", label="a"):
        known = {
            "label": label,
            "config_hash": "c",
            "variant": "S",
            "params": 10 * rank,
            "active_params": rank,
            "lr": 0.1,
        }
        return known | {
            "run": run,
            "step": step,
            "bits_per_byte": new,
            "old_bits_per_byte": old,
            "rank": rank,
            "purpose": purpose,
        }

    rows = [
        row("z", 2, 2.0, 1.5),
        row("a", 4, 1.5, 1.9),
        row("z", 0, 3.0, 1.0),
        row("a", 0, 3.5, 1.25),
        row("a", 2, 9.0, 9.0),
    ]
    rows += [row("p", 0, 3.0, 1.0, purpose="pilot"), row("b", 0, 5.0, 2.0, 8), row("b", 9, 1.0, 3.5, 8)]
    table = pd.DataFrame(rows)
    found = perft_summary.finals(table).set_index("run")
    assert list(found.index) == ["z", "a", "b"] and found["gain"].tolist() == [1.0, 2.0, 4.0]
    assert found["forgetting"].tolist() == pytest.approx([0.5, 0.65, 1.5])
    summary = perft_summary.summary(table).set_index("rank")
    assert summary.loc[4, ["bits_per_byte", "gain", "forgetting", "seeds"]].tolist() == pytest.approx(
        [1.75, 1.5, 0.575, 2]
    )
    assert summary.loc[4, "gain_half_width"] == pytest.approx(stats.t.ppf(0.975, 1) * stats.sem([1.0, 2.0]))
    text = perft_summary.text(table)
    assert text.index("r8") < text.index("r4"), "the least loss first, whatever was forgotten"


def test_stages_of_a_step_add_up(monkeypatch):
    """Milliseconds, of a stage that comes twice both."""
    moments = iter([1.0, 1.5, 1.75, 2.75, 3.0])
    monkeypatch.setattr(stage_clock.time, "perf_counter", lambda: next(moments))
    clock = stage_clock.StageClock("cpu")
    for stage in ("rest", "router", "rest", "experts"):
        clock.begin(stage)
    assert (
        clock.stop() == {"router": 250, "dispatch": 0, "experts": 250, "combine": 0, "rest": 1500} and clock._log == []
    )
    x = torch.ones(2, requires_grad=True)
    monkeypatch.setattr(stage_clock.time, "perf_counter", lambda: 0.0)
    y = clock.mark(clock.mark(x, "router", "rest"), "experts", "dispatch")
    y.sum().backward()
    assert [stage for stage, _ in clock._log] == ["router", "experts", "dispatch", "rest"] and x.grad.tolist() == [1, 1]
    profiles = [{stage: value + place for place, stage in enumerate(stage_clock.STAGES)} for value in (9.0, 1.0, 2.0)]
    assert timing._medians(profiles) == {stage: 2.0 + place for place, stage in enumerate(stage_clock.STAGES)}


def pilots(monkeypatch, *losses):
    rows = {f"{i}": {"lr": lr, "val_loss": loss} for i, (lr, loss) in enumerate(losses)}
    monkeypatch.setattr(rates.run_rows, "last", lambda path, schema: rows[path])
    return rates.best(list(rows))


def test_the_best_rate_has_the_least_mean_loss(monkeypatch):
    lr, found = pilots(
        monkeypatch, (0.4, 3.0), (0.1, 5.0), (0.2, 1.0), (0.2, 4.0), (0.4, 1.5), (0.1, 6.0), (0.3, 2.25), (0.3, 2.25)
    )
    assert lr == 0.3 == min([0.3, 0.4]) and found["pilot_lrs"] == [0.1, 0.2, 0.3, 0.4]
    assert found["pilot_losses"] == [5.5, 2.5, 2.25, 2.25] and found["pilot_losses_by_seed"] == [
        [5.0, 6.0],
        [1.0, 4.0],
        [2.25, 2.25],
        [3.0, 1.5],
    ]
    assert pilots(monkeypatch, (0.2, 1.0), (0.1, 1.0))[0] == 0.1, "of two rates none is between others"
    for losses, side in (
        ((1.0, 2.0, 3.0), "smaller"),
        ((3.0, 2.0, 1.0), "larger"),
        ((float("inf"), 2.0, 1.0), "larger"),
    ):
        with pytest.raises(UserError, match=f"add {side} rates"):
            pilots(monkeypatch, *zip((0.1, 0.2, 0.3), losses, strict=True))
    with pytest.raises(UserError, match="no finite"):
        pilots(monkeypatch, (0.1, float("inf")), (0.2, float("nan")))
    assert [rates.at_the_edge(lr, (0.1, 0.2, 0.3)) for lr in (0.1, 0.2, 0.3)] == [True, False, True]
    assert not rates.at_the_edge(0.1, (0.1,)) and not rates.at_the_edge(0.1, None)


def test_a_rate_of_a_study_is_of_the_rule_and_the_size(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    size = {name: getattr(RUN, name) for name in rates.SIZE}
    path = paths.quality("cpu.rates")
    path.parent.mkdir(parents=True)

    def stored(*changes):
        known = {
            "schema_version": run_rows.SCHEMA_VERSION,
            "label": "a",
            "purpose": "final",
            "router": "base",
            "lr": 0.2,
            "pilot_lrs": [0.1, 0.2, 0.4],
        }
        run_rows.write(path, [known | size | change for change in changes], "")
        return rates.of_study("rates", "cpu", "base", size)

    others = [{"router": "softk", "lr": 9.0}, {"purpose": "pilot", "lr": 8.0}, {"pilot_lrs": None, "lr": 7.0}]
    others += [
        {name: (f"{value}x" if isinstance(value, str) else value + 1), "lr": 6.0} for name, value in size.items()
    ]
    assert stored({}, *others) == (0.2, "rates") and stored(*others) is None
    with pytest.raises(UserError, match=r"0\.2, 0\.3"):
        stored({}, {"lr": 0.3, "pilot_lrs": [0.2, 0.3, 0.4]})
    with pytest.raises(UserError, match="larger rates"):
        stored({"lr": 0.4})
    assert rates.of_study("none", "cpu", "base", size) is None


def test_a_forecast_is_the_sum_of_its_parts():
    run = dataclasses.replace(
        RUN, shared_hidden=24, steps=101, eval_every=50, validation_tokens=3000, capacity_factor=1.5, altered=True
    )
    layer = 2.1e-10 * 0.4 * 16 + (5.5e-11 * 2 * 16 + 18 * 16 * 16 / 150e12) / 2.2 + 18 * 16 * 24 / 150e12
    assert study_costs.estimate(run) == pytest.approx(3 * layer + 6 * 16 * 256 / 150e12)
    dense = dataclasses.replace(run, router=DENSE, shared_hidden=0, capacity_factor=None)
    layer = 2.1e-10 * 0.4 * 16 + 18 * 16 * 16 / 150e12
    assert study_costs.estimate(dense) == pytest.approx(3 * layer + 6 * 16 * 256 / 150e12)
    whole = 2.1e-10 * 0.4 * 16 + 18 * 16 * 32 / 150e12
    assert study_costs.estimate(dataclasses.replace(dense, match="parameters")) == pytest.approx(
        3 * whole + 6 * 16 * 256 / 150e12
    )
    shape = tuple(getattr(run, name) for name in study_costs.SHAPE)
    known = {shape: {"a": 10.0, "b": 40.0, "c": 100.0}}
    for change, passes in (
        ({}, 6 + 14),
        ({"altered": False}, 6),
        ({"purpose": "pilot"}, 6),
        ({"capacity_factor": None}, 3 + 14),
        ({"steps": 100}, 4 + 14),
    ):
        one = dataclasses.replace(run, **change)
        tokens = one.steps * 30
        found = study_costs.cost([one, one], known)
        each = max(3000 / 40 / 3, 0.015 * 3000 / 30)
        assert found == study_costs.Cost(
            2, pytest.approx(15 + tokens / 40 + passes * each), tokens, study_costs.OTHER_RULES
        ), change
    assert study_costs.cost([dense], {}).basis == study_costs.ESTIMATED
    rows = [
        {"engine": "e", "train_tokens_per_s": speed, "router": "a", "timed_alone": alone}
        | dict(zip(study_costs.SHAPE, shape, strict=True))
        for speed, alone in ((5.0, False), (2.0, True), (3.0, True), (9.0, False), (None, True))
    ]
    assert study_costs.speeds(rows, "e") == {shape: {"a": 3.0}} and study_costs.speeds(rows[:1] + rows[3:4], "e") == {
        shape: {"a": 9.0}
    }
    grouped = study_costs.by_entry(
        [
            run,
            dataclasses.replace(run, seed=2),
            dataclasses.replace(run, router="base"),
            dataclasses.replace(run, purpose="pilot"),
        ],
        known,
    )
    assert {key: [one.runs for one in costs] for key, costs in grouped.items()} == {
        ("run", "final"): [2, 1],
        ("run", "pilot"): [1],
    }


def test_prepared_text_is_cut_in_training_alone(tmp_path):
    """Each domain to the same share, at most all of it."""
    trained = {
        "a": np.arange(100, dtype=np.uint8),
        "z": np.zeros(4, np.uint8),
        "b": np.arange(50, dtype=np.uint8)[::-1].copy(),
    }
    arrays = {f"{name}.256": {"train": one, "validation": one[:7] + 1} for name, one in trained.items()}
    hashes = {
        name: hashlib.sha256(one.tobytes() + b"\0" + (one[:7] + 1).tobytes()).hexdigest()
        for name, one in trained.items()
    }
    tokens = [bytes([n]) for n in range(256)]
    prepared.write(tmp_path, arrays, hashes, {256: tokens}, {"train_bytes": 154, "recurring": {"a": 3}})
    for limit, sizes in ((None, (100, 4, 50)), (77, (50, 2, 25)), (1500, (100, 4, 50)), (1, (2, 2, 2))):
        found = prepared.domains(tmp_path, limit, 256)
        assert tuple(len(one.train) for one in found) == sizes and [len(one.validation) for one in found] == [7, 4, 7]
        assert found[2].train[0] == 49 and [one.recurring for one in found] == [3, None, None]
    manifest = json.loads((tmp_path / prepared.MANIFEST).read_text())
    (tmp_path / prepared.MANIFEST).write_text(json.dumps(manifest | {"domains": hashes | {"b": hashes["a"]}}))
    with pytest.raises(UserError, match="domain b"):
        prepared.domains(tmp_path, None, 256)


def test_adapters_add_scaled_products():
    """Of two of three, by hand; all that a token meets are those and the router."""
    one = adapt.Adapters("R", 6, 3, 2, 4, 32.0)
    torch.nn.init.normal_(one.up_RD)
    assert one.scale == 8.0 and one.down_DR.abs().max() <= 1 / math.sqrt(6) and one.down_DR.shape == (6, 12)
    size, router = 2 * 4 * 6, sum(p.numel() for p in one.router.parameters())
    assert router > 0 and one.parameter_counts() == (3 * size + router, 2 * size + router)
    ids, weights = torch.tensor([[2, 0], [1, -1], [3, 2]]), torch.tensor([[0.5, 0.25], [0.75, 9.0], [9.0, 0.125]])
    assert adapt.gates(ids, weights, 3).tolist() == [[0.25, 0, 0.5], [0, 0.75, 0], [0, 0, 0.125]]
    one.router = None
    one.variant = "E"
    x = torch.randn(1, 3, 6)
    found = one(x, None, None, SimpleNamespace(ids=ids, weights=weights))
    gates = adapt.gates(ids, weights, 3)
    expected = sum(
        gates[:, m, None] * 8.0 * (x[0] @ one.down_DR[:, 4 * m : 4 * m + 4] @ one.up_RD[4 * m : 4 * m + 4])
        for m in range(3)
    )
    torch.testing.assert_close(found[0], expected)
    model = language_model.build(RUN, [])
    for variant, count, active in (("E", 4, 2), ("D", 5, 5), ("S", 1, 1), ("R", 5, 3)):
        made = adapt._adapters(model.layers[0], Adaptation(RUN, "b", variant, rank=2, adapters=5, top_k=3))
        assert (made.count, made.active, made.rank, made.scale) == (count, active, 2, 16.0)
    adapted = adapt.attach(model, Adaptation(RUN, "b", "D", rank=2, adapters=5))
    downs = [one.down_DR for one in adapt.adapters_of(adapted)]
    assert (
        len(downs) == 3
        and not torch.equal(downs[0], downs[1])
        and all(layer.capacity_factor is None for layer in adapted.layers)
    )
    assert adapt.parameter_counts(adapted) == (3 * 5 * 2 * 2 * 16, 3 * 5 * 2 * 2 * 16)
    assert {name for name, p in adapted.named_parameters() if p.requires_grad} == {
        f"blocks.{n}.ffn.adapters.{part}" for n in range(3) for part in ("down_DR", "up_RD")
    }


COUNTS = np.array([[5.0, 0.0, 1.0, 2.0], [1.0, 3.0, 0.0, 0.0], [0.0, 0.0, 0.0, 0.0]])


def test_information_of_counts_is_corrected_for_their_number():
    """Over cells, rows and columns that have any; the same on the device."""
    shares = COUNTS / 12
    plain = sum(
        p * math.log2(p / (shares[i].sum() * shares[:, j].sum()))
        for i, row in enumerate(shares)
        for j, p in enumerate(row)
        if p
    )
    expected = plain - (5 - 2 - 4 + 1) / (2 * 12 * math.log(2))
    more = np.vstack([COUNTS, [4.0, 1.0, 2.0, 3.0]])
    for counts in (COUNTS, more, more[::-1], more.T):
        assert expert_loads.information(torch.tensor(counts.copy())) == pytest.approx(
            specialisation.mutual_information(counts)
        )
    assert specialisation.mutual_information(COUNTS) == pytest.approx(expected)
    four = more / more.sum()
    plain = sum(
        p * math.log2(p / (four[i].sum() * four[:, j].sum()))
        for i, row in enumerate(four)
        for j, p in enumerate(row)
        if p
    )
    assert specialisation.mutual_information(more) == pytest.approx(plain - (9 - 3 - 4 + 1) / (2 * 22 * math.log(2)))
    assert specialisation.entropy([1, 1, 2, 0]) == 1.5 and math.isnan(expert_loads.information(torch.zeros(2, 2)))
    assert specialisation.mean_bits([COUNTS, more]) == pytest.approx(
        (specialisation.mutual_information(COUNTS) + specialisation.mutual_information(more)) / 2
    )
    row = {
        "load_by_domain": [COUNTS, more],
        "load_by_class": [more, more, COUNTS],
        "token_bits_by_layer": [0.25, 0.75, 2.0],
    }
    found = specialisation.with_information(pd.DataFrame([row, dict.fromkeys(row)])).to_dict("records")
    assert found[0]["expert_domain_bits"] == specialisation.mean_bits(row["load_by_domain"])
    assert (
        found[0]["expert_class_bits"] == specialisation.mean_bits(row["load_by_class"])
        and found[0]["expert_token_bits"] == 1.0
    )
    assert found[0]["choices"] == 12 and all(
        math.isnan(found[1][name]) for name in ("expert_domain_bits", "expert_token_bits", "choices")
    )
    known = {
        "purpose": "final",
        "step": 1,
        "router": "a",
        "network": "linear",
        "label": "e",
        "config_hash": "c",
        "bits_per_byte": 2.0,
    }
    table = pd.DataFrame(
        [
            known | {"run": "x", "seed": 0, "load_by_domain": [more]},
            known | {"run": "y", "seed": 1, "load_by_domain": [COUNTS, more]},
            known | {"run": "z", "seed": 0, "router": "b", "load_by_domain": [np.eye(4)]},
        ]
    )
    finals = specialisation.finals(table)
    assert finals["domain_bits"].tolist() == pytest.approx(
        [specialisation.entropy([8, 4, 10]), specialisation.entropy([8, 4]), 2.0]
    )
    summary = specialisation.summary(table)
    assert summary["contestant"].tolist() == ["b", "a"] and summary["seeds"].tolist() == [1, 2], (
        "the most specialised first"
    )
    assert set(summary["label"]) == {"e"} and set(summary["config_hash"]) == {"c"}
    three = [
        known | {"run": f"t{n}", "seed": n, "bits_per_byte": loss, "load_by_domain": [more]}
        for n, loss in enumerate((1.0, 2.0, 6.0))
    ]
    alone = specialisation.summary(pd.DataFrame(three)).iloc[0]
    half = stats.t.ppf(0.975, 2) * stats.sem([1, 2, 6])
    assert alone["bits_per_byte"] == 3.0 and alone["bits_per_byte_half_width"] == pytest.approx(half)


def test_classes_of_bytes():
    classes = expert_loads.byte_classes().tolist()
    named = {
        name: [n for n, c in enumerate(classes) if expert_loads.BYTE_CLASSES[c] == name]
        for name in expert_loads.BYTE_CLASSES
    }
    assert (
        bytes(named["lower"]) == bytes(range(97, 123))
        and bytes(named["upper"]) == bytes(range(65, 91))
        and bytes(named["digit"]) == b"0123456789"
    )
    assert bytes(named["space"]) == b"\t " and bytes(named["newline"]) == b"\n\r" and len(named["punctuation"]) == 32
    assert set(range(128, 256)) <= {*named["other"]} and 127 in named["other"] and 0 in named["other"]


def test_loads_count_choices_of_true_tokens_and_what_a_capacity_drops():
    """Six tokens, one of padding, choose two of three experts; an id of 3 is none of them."""
    ids = torch.tensor([[0, 1], [0, 2], [0, 3], [1, 0], [-1, -1], [0, 1]])
    kept = torch.tensor([[1, 1], [1, 0], [0, 1], [0, 0], [1, 1], [0, 0]]).bool()
    scores = torch.tensor([[0.5, 0.25, 0.25]] * 5 + [[1 / 3] * 3])
    seen = moe_layer.Seen(ids, kept, scores)
    valid = torch.tensor([True, True, True, True, True, False])
    loads = expert_loads.Loads.empty(2, 3, "cpu", 5)
    loads.add(
        seen,
        2,
        valid,
        torch.tensor([0, 0, 1, 1, 1, 1]),
        torch.tensor([0, 1, 2, 0, 1, 2]),
        torch.tensor([4, 4, 0, 1, 2, 3]),
    )
    assert loads.by_domain.tolist() == [[2, 1, 1], [2, 1, 0]] and loads.by_class.tolist()[:3] == [
        [2, 2, 0],
        [1, 0, 1],
        [1, 0, 0],
    ]
    assert loads.by_token.tolist() == [[1, 0, 0], [1, 1, 0], [0, 0, 0], [0, 0, 0], [2, 1, 1]]
    assert float(loads.entropy) == pytest.approx(5 * -(0.5 * math.log(0.5) + 0.5 * math.log(0.25)))
    assert (float(loads.dropped), float(loads.lost), float(loads.chosen)) == (4, 2, 4)
    limits = [min(6, math.ceil(round(factor * 6 * 2 / 3, 6))) for factor in expert_loads.CAPACITY_FACTORS]
    flat = [(t, e) for t in range(6) for e in ids[t].tolist()]
    over = [
        sum(
            valid[t].item() and 0 <= e < 3 and sum(f == e for _, f in flat[:place]) >= limit
            for place, (t, e) in enumerate(flat)
        )
        for limit in limits
    ]
    assert loads.over.tolist() == over and limits[0] == 4
    tight = expert_loads.Loads.empty(2, 3, "cpu", 5)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(expert_loads, "CAPACITY_FACTORS", (0.25, 0.5, 0.75, *expert_loads.CAPACITY_FACTORS[3:]))
        tight.add(seen, 2, valid, torch.zeros(6, dtype=int), torch.zeros(6, dtype=int), torch.zeros(6, dtype=int))
    assert tight.over.tolist()[:3] == [
        sum(valid[t].item() and 0 <= e < 3 and sum(f == e for _, f in flat[:p]) >= m for p, (t, e) in enumerate(flat))
        for m in (1, 2, 3)
    ]
    layer = SimpleNamespace(seen=[seen], count=3)
    assert expert_loads.drop_rate(SimpleNamespace(layers=[layer])) == pytest.approx(6 / 9)
    outside = SimpleNamespace(
        seen=[moe_layer.Seen(torch.tensor([[0, 3], [-1, 1]]), torch.tensor([[True, False], [False, False]]), scores)],
        count=3,
    )
    assert expert_loads.drop_rate(SimpleNamespace(layers=[layer, outside])) == pytest.approx(7 / 11)
    soft = SimpleNamespace(seen=[moe_layer.Seen(None, None, scores)], count=3)
    assert expert_loads.drop_rate(SimpleNamespace(layers=[soft])) is None


def test_the_learning_rate_rises_and_falls():
    run = dataclasses.replace(RUN, lr=0.5, warmup=4, steps=12)
    found = [steps.learning_rate(run, n) for n in range(12)]
    assert found[:4] == [0.125, 0.25, 0.375, 0.5] and found[4] == 0.5
    assert found[8] == pytest.approx(0.5 * 0.55) and found[6] == pytest.approx(
        0.5 * (0.1 + 0.45 * (1 + math.cos(math.pi / 4)))
    )
    assert found[11] == pytest.approx(0.5 * (0.1 + 0.45 * (1 + math.cos(math.pi * 7 / 8))))
    first = dataclasses.replace(run, train_mode="experts_first", steps=10)
    assert [steps.frozen(first, n) for n in (0, 4, 5, 9)] == [
        (True, False),
        (True, False),
        (False, True),
        (False, True),
    ]
    assert steps.frozen(dataclasses.replace(run, train_mode="frozen_router"), 3) == (True, False) and steps.frozen(
        run, 3
    ) == (False, False)
    exact = dataclasses.replace(run, max_epochs=2.0, steps=20)
    steps.check_epochs(exact, 300)
    with pytest.raises(UserError, match="at most 19: 2 epochs of 299 tokens"):
        steps.check_epochs(exact, 299)


def test_frozen_parts_do_not_learn():
    model = language_model.build(RUN, [])
    for routers, experts in ((True, False), (False, True), (False, False)):
        steps.freeze(model, routers, experts)
        for layer in model.layers:
            assert layer.routers.training == (not routers)
            for name, parameter in layer.named_parameters():
                assert parameter.requires_grad == (not (routers if name.startswith("routers") else experts))


def final(router, seed, loss, **values):
    known = {
        "label": "e",
        "config_hash": "c",
        "purpose": "final",
        "network": "linear",
        "causal": True,
        "step": 9,
        "lr": 0.1,
    }
    return known | {"router": router, "seed": seed, "run": f"{router}{seed}{values}", "bits_per_byte": loss} | values


def test_the_last_step_counts_and_a_contestant_is_named_by_what_varies():
    """Among rules with routers of one entry; a missing capacity is a value."""
    table = pd.DataFrame(
        [
            final("a", 0, 2.0, capacity_factor=1.25),
            final("a", 0, 9.0, capacity_factor=1.25, step=3),
            final("a", 1, 2.0, capacity_factor=None),
            final("dense", 0, 2.0, capacity_factor=None),
            final("b", 0, 2.0, label="f", capacity_factor=1.25, network="mlp"),
            final("dense", 1, 2.0, label="f", capacity_factor=None),
            final("a", 3, 2.0, purpose="pilot", capacity_factor=1.25),
        ]
    )
    table.loc[1, "run"] = table.loc[0, "run"]
    found = compare.finals(table.iloc[::-1])
    assert (
        sorted(found["contestant"]) == ["a cf1.25", "a cfnone", "b+mlp", "dense", "dense"]
        and (found["step"] == 9).all()
    )


@pytest.mark.parametrize("network", zoo.NETWORKS)
def test_a_contestant_is_named_by_its_network_unless_that_is_linear(network):
    (name,) = compare.finals(pd.DataFrame([final("a", 0, 2.0, network=network)]))["contestant"]
    assert name == ("a" if network == "linear" else f"a+{network}")


def test_ranks_count_those_that_are_told_apart():
    losses = {"a": [1.0, 1.1, 1.2], "b": [1.02, 1.08, 1.23], "d": [2.0, 2.12, 2.2]}
    table = pd.DataFrame(
        [final(name, seed, loss) for name, values in losses.items() for seed, loss in enumerate(values)]
    )
    found = compare.summary(table).set_index("contestant")
    assert found["rank"].to_dict() == {"a": 1, "b": 1, "d": 3} and list(found.index) == ["a", "b", "d"]


def test_refusals_are_beyond_their_limits():
    rows = pd.DataFrame(
        [
            final("softk", 0, 1.0, recurring_share=0.01),
            final("softk", 1, 1.0, recurring_share=0.011),
            final("softk", 2, 1.0),
            final("softk", 3, 1.0, lr=0.1, pilot_lrs=[0.1, 0.2]),
            final("softk", 4, 1.0, lr=0.2, pilot_lrs=[0.1, 0.2, 0.3]),
        ]
    )
    assert (compare.refusals(rows) == "").tolist() == [True, False, True, False, True]
    changed = {name: rule.changed for name, rule in ZOO.items() if rule.changed}
    name, day = max(changed.items(), key=lambda one: one[1])
    older = next(one for one in ZOO if ZOO[one].changed < day)
    rows = pd.DataFrame(
        [
            final(f"{older}+{name}", 0, 1.0, ended_at="2000-01-01"),
            final(f"{older}+{name}", 1, 1.0, ended_at=f"{day}T23"),
            final(f"{older}+{name}", 2, 1.0, ended_at=None),
        ]
    )
    assert (compare.refusals(rows) == compare.OLDER_CODE).tolist() == [True, False, False]


def test_models_are_judged_by_the_best_rule_and_the_shortest_training():
    def rows(losses, seen=200, active=100):
        found = [
            final(name, seed, loss, tokens_seen=seen, active_params=active, params=active * 9)
            for name, values in losses.items()
            for seed, loss in enumerate(values)
        ]
        return pd.DataFrame(found).assign(contestant=[one["router"] for one in found])

    assert compare.too_weak(rows({"a": [2.4, 2.6], "b": [9.0]})) == "" and compare.too_weak(
        rows({"a": [2.4, 2.7]})
    ).startswith("the models are too weak to judge: 2.55")
    short = pd.concat([rows({"a": [1.0]}), rows({"b": [1.0]}, seen=99)])
    assert "0.99 tokens per active" in compare.too_weak(short) and compare.too_weak(rows({"a": [1.0]}, seen=100)) == ""
    assert compare.too_weak(rows({"a": [1.0]}).iloc[:0]) == "no final row"


def test_a_speed_that_does_not_say_it_was_taken_alone_was_not():
    rows = pd.DataFrame({"timed_alone": [True, False, None, np.nan], "step_mode": "eager", "cuda_version": "12"})
    assert list(compare.alone(rows).index) == [0] and compare.alone(rows[1:]).empty
    assert compare.timed(rows[1:]) == "of runs that shared the machine"
    said = "one run per rule with the machine to itself, steps launched from Python (limited by the host)"
    assert compare.timed(rows[:1]) == said and compare.timed(rows) == f"{said}; other configs shared the machine"
    both = pd.concat([rows[:1], rows[:1].assign(step_mode="cuda_graph")])
    assert "in some configs, launched from Python in others" in compare.timed(both)
    assert compare.timed(rows[:1].assign(cuda_version=None)) == "one run per rule with the machine to itself"


def test_speeds_are_of_one_mode_for_each_entry():
    def row(label, mode, eager, alone=True, cuda="12"):
        return {
            "label": label,
            "step_mode": mode,
            "eager_step_ms": eager,
            "batch": 5,
            "sequence": 6,
            "train_tokens_per_s": 1.0,
            "step_ms": 2.0,
            "step_half_width_ms": 0.1,
            "timed_alone": alone,
            "cuda_version": cuda,
        }

    rows = pd.DataFrame(
        [
            row("a", "cuda_graph", 3.0),
            row("a", "eager: why", 4.0),
            row("b", "cuda_graph", 6.0),
            row("a", "cuda_graph", None),
        ]
    )
    found = compare.with_speeds(rows)
    assert found["train_tokens_per_s"].tolist() == [10_000.0, 1.0, 1.0, 1.0] and found["step_ms"].tolist() == [
        3.0,
        2.0,
        2.0,
        2.0,
    ]
    assert found["step_mode"].tolist() == ["eager", "eager", "cuda_graph", "cuda_graph"] and found[
        "step_half_width_ms"
    ].isna().tolist() == [True, False, False, False]
    assert (
        compare.timed(rows.iloc[2:3]) == "one run per rule with the machine to itself, steps replayed as a CUDA graph"
    )
    shared = pd.DataFrame([row("a", "cuda_graph", 1.0), row("b", "eager", 1.0, alone=False)])
    assert (
        compare.timed(shared).endswith("CUDA graph; other configs shared the machine")
        and compare.timed(shared.iloc[1:]) == "of runs that shared the machine"
    )
    mixed = pd.DataFrame([{"validation_batches": "mixed"}, {"validation_batches": "by_domain"}])
    assert (
        compare.why_no_capacity(mixed, "x") == compare.why_no_capacity(mixed.iloc[:0], "x") == "x"
        and compare.why_no_capacity(mixed.iloc[1:], "x") == compare.WITHDRAWN
    )


ENTRY = {
    "label": "a",
    "router": ["softk", "base"],
    "seed": [5, 6, 7],
    "corpora": {"stdlib": "all", "kjv": 9},
    "lr": 0.1,
    "steps": 40,
}


def test_a_plan_has_each_run_once():
    """The first seed keeps the trace and is timed; others differ in the seed alone."""
    made = plan.expand(
        [ENTRY | {"timing": True, "trace_tokens": 64, "capacity_factor": [1.25, "none"], "router": ["softk", DENSE]}]
    )
    runs = list(made.finals.values())
    assert [(run.router, run.capacity_factor, run.seed) for run in runs] == [
        ("softk", factor, seed) for factor in (1.25, None) for seed in (5, 6, 7)
    ] + [(DENSE, None, seed) for seed in (5, 6, 7)]
    assert [run.trace_tokens for run in runs[:4]] == [64, 0, 0, 64] and runs[0].corpora == {"stdlib": None, "kjv": 9}
    assert runs[0].eval_every == 40 and next(iter(made.timing.values())) == [run.name for run in runs[:3]]
    assert [run.keep_weights for run in runs[:2]] == [True, False] and made.runs == made.finals
    for count, fine in ((plan.MOST_RUNS // 2, True), (plan.MOST_RUNS // 2 + 1, False)):
        if fine:
            plan._check_number("x", ["a", "b"], range(count))
        else:
            with pytest.raises(UserError, match="5002 runs"):
                plan._check_number("x", ["a", "b"], range(count))


def test_adaptations_are_of_each_seed_of_their_base():
    base = ENTRY | {"router": ["softk"], "trace_tokens": 64}
    perft = {
        "label": "p",
        "base": "a",
        "variant": ["S", "D"],
        "rank": [2, 4],
        "corpora": {"kjv": "all"},
        "steps": 30,
        "adapters": 3,
    }
    made = plan.expand([base], [perft | {"lr": 0.2}])
    found = list(made.adaptations.values())
    assert [(one.variant, one.rank, one.run.seed) for one in found[:4]] == [
        ("S", 2, 5),
        ("S", 2, 6),
        ("S", 2, 7),
        ("S", 4, 5),
    ] and len(found) == 12
    one = found[0]
    assert (one.run.steps, one.run.eval_every, one.run.warmup, one.run.lr, one.adapters, one.run.label) == (
        30,
        30,
        3,
        0.2,
        3,
        "p",
    )
    assert one.base == next(name for name, run in made.finals.items() if run.seed == 5) and all(
        run.keep_weights for run in made.finals.values()
    )
    tried = plan.expand([base], [perft | {"pilot": {"lr": [0.1, 0.3], "steps": 20}}])
    pilots = list(tried.adaptation_pilots.values())
    assert [(one.run.lr, one.run.seed, one.run.steps, one.run.warmup, one.run.purpose) for one in pilots[:2]] == [
        (0.1, 5, 20, 2, "pilot"),
        (0.3, 5, 20, 2, "pilot"),
    ] and len(pilots) == 8
    last = list(tried.adaptations.values())[-1]
    assert last.run.lr is None and last.run.pilots == tuple(one.name for one in pilots[-2:])
    for wrong in (
        {"lr": 0.1, "pilot": {"lr": [0.1], "steps": 2}},
        {},
        {"pilot": {"lr": [0.1], "steps": 2, "seed": [1]}},
    ):
        with pytest.raises(UserError, match="perft entry p"):
            plan.expand([base], [perft | wrong])
    with pytest.raises(UserError, match="one router"):
        plan.expand([ENTRY], [perft | {"lr": 0.2}])


def balanced(values):
    return pd.DataFrame(values, columns=[f"r{n}" for n in range(len(values[0]))])


def test_a_family_of_rules_and_seeds_that_lack_some():
    """Least squares with a column for each rule and seed; the tests by their formulas."""
    draw = np.random.default_rng(2)
    values = 2 + draw.normal(0, 0.3, (5, 1)) + np.array([0.0, 0.004, 0.5]) + draw.normal(0, 0.002, (5, 3))
    values[0, 1] = values[3, 2] = np.nan
    table = balanced(values)
    found = family.family(table)
    seed, rule = np.nonzero(~np.isnan(values))
    design = np.zeros((len(seed), 8))
    design[np.arange(len(seed)), rule], design[np.arange(len(seed)), 3 + seed] = 1, 1
    fitted, *_ = np.linalg.lstsq(design, values[seed, rule], rcond=None)
    rest = values[seed, rule] - design @ fitted
    freedom = 13 - 7
    noise = math.sqrt((rest**2).sum() / freedom)
    assert found.noise == pytest.approx(noise)
    level = fitted[3:].mean()
    assert found.means == pytest.approx({f"r{n}": fitted[n] + level for n in range(3)}) and found.means[
        "r1"
    ] != pytest.approx(np.nanmean(values[:, 1]))
    assert [pair.seeds for pair in found.pairs] == [4, 4, 3]
    inverse = np.linalg.pinv(design.T @ design)
    raw, errors = [], []
    for pair, (a, b) in zip(found.pairs, ((0, 1), (0, 2), (1, 2)), strict=True):
        contrast = np.zeros(8)
        contrast[a], contrast[b] = -1, 1
        error = noise * math.sqrt(contrast @ inverse @ contrast)
        errors.append(error)
        effect = abs(fitted[b] - fitted[a])
        reach = stats.studentized_range.ppf(0.95, 3, freedom) / math.sqrt(2) * error
        assert (pair.effect, pair.low, pair.high) == pytest.approx((effect, effect - reach, effect + reach))
        raw.append(stats.t.sf((0.01 - effect) / error, freedom))
    order = np.argsort(raw)
    corrected = np.empty(3)
    corrected[order] = np.minimum(1, np.maximum.accumulate(np.array(raw)[order] * [3, 2, 1]))
    assert [pair.p_equivalent for pair in found.pairs] == pytest.approx(corrected.tolist())
    reach = stats.studentized_range.ppf(0.95, 3, freedom) / math.sqrt(2)
    assert found.detectable == pytest.approx((reach + stats.t.ppf(0.8, freedom)) * sorted(errors)[1])


def test_a_run_far_from_the_others_is_named_and_no_other():
    draw = np.random.default_rng(4)
    values = 2 + draw.normal(0, 0.2, (6, 1)) + np.arange(4) / 10 + draw.normal(0, 0.01, (6, 4))
    assert family.family(balanced(values)).far == []
    values[2, 3] += 0.2
    found = family.family(balanced(values))
    assert found.far == [("r3", 2)]
    without = family.without_far(balanced(values), found)
    assert without.noise < found.noise / 2 and "r3 of seed 2; 1 of 24" in family.told_far(balanced(values), found)
    assert (
        family.letter(0) == "a" and family.letter(25) == "z" and family.letter(26) == "a1" and family.letter(53) == "b2"
    )


def test_what_each_has_is_tested_against_none():
    table = balanced([[0.5, 0.001, 0.3, 1.0], [0.6, -0.0012, -0.2, 1.0], [0.55, 0.0005, 0.1, 1.0]])
    found = family.against_none(table, "{} alone", unit="bits")
    assert {name: one.verdict for name, one in found.items()} == {
        "r0": "different",
        "r1": "equivalent",
        "r2": "undecided",
    }
    values = table["r0"].to_numpy()
    reach = stats.t.ppf(1 - 0.05 / 8, 2) * stats.sem(values)
    assert (found["r0"].effect, found["r0"].low, found["r0"].high, found["r0"].n) == pytest.approx(
        (values.mean(), values.mean() - reach, values.mean() + reach, 3)
    )
    loose = family.against_none(table[["r1"]] * 3, "{}")["r1"].verdict
    assert (loose, family.against_none(table * 3, "{}")["r1"].verdict) == ("equivalent", "undecided"), (
        "corrected for four"
    )


def test_runs_of_other_sizes_are_no_family():
    rows = pd.DataFrame([final("a", 0, 1.0, dim=8), final("b", 0, 1.0, dim=8)]).assign(contestant=["a", "b"])
    assert family.by_seed(rows, "bits_per_byte").shape == (1, 2)
    for other in (16, None):
        with pytest.raises(UserError, match="dim"):
            family.by_seed(rows.assign(dim=[8, other]), "bits_per_byte")


def test_rows_of_a_run_are_joined_with_the_times_of_its_timing(tmp_path):
    runs = [dataclasses.replace(RUN, seed=seed) for seed in (1, 2)]
    files = {}
    for number, run in enumerate(runs):
        path = tmp_path / f"{number}.parquet"
        known = {
            "schema_version": run_rows.SCHEMA_VERSION,
            "router": "deepseek_v3",
            "corpus_sha256": "t",
            "code_fingerprint": "x",
            "step_ms": 9.0,
        }
        run_rows.write(path, [known | {"step": step} for step in (1, 2)], run.spec)
        files[path] = run
    timing_ = tmp_path / "timing.parquet"
    run_rows.write(
        timing_,
        [
            {"schema_version": run_rows.SCHEMA_VERSION, "router": "a", "step_ms": ms, "timed_alone": True}
            for ms in (7.0, 3.0)
        ],
        "",
    )
    found = run_rows.collect(files, {timing_: [runs[0].name, runs[1].name]})
    assert found["step_ms"].to_pylist() == [3.0] * 4 and set(found["router"].to_pylist()) == {"deepseek_v3_small"}
    assert run_rows.last(next(iter(files)))["step"] == 2 and run_rows.collect(files, {timing_: [runs[1].name]})[
        "step_ms"
    ].to_pylist() == [9.0, 9.0, 3.0, 3.0]
    first, second = files
    table = run_rows.read(first)
    for other in (table.append_column("more", table["step"]), table.drop_columns(["step"])):
        run_rows.write_table(tmp_path / "other.parquet", other)
        with pytest.raises(UserError, match="other columns"):
            run_rows.read(tmp_path / "other.parquet")
    run_rows.write_table(tmp_path / "other.parquet", table.select(table.column_names[::-1]).drop_columns(["attention"]))
    assert run_rows.read(tmp_path / "other.parquet").column_names == run_rows.SCHEMA.names
    with pytest.raises(UserError, match="another spec"):
        run_rows.collect({first: runs[1]}, {})
    for change, says in (
        ({"corpus_sha256": "u"}, "different text"),
        ({"code_fingerprint": "y"}, "2 versions of the code"),
    ):
        known = {
            "schema_version": run_rows.SCHEMA_VERSION,
            "router": "a",
            "corpus_sha256": "t",
            "code_fingerprint": "x",
        }
        run_rows.write(second, [known | change], runs[1].spec)
        with pytest.raises(UserError, match=says):
            run_rows.collect(files, {})


def test_a_training_gives_its_optimiser_decay_for_matrices_alone(shared_text):
    run = dataclasses.replace(
        RUN, corpora={shared_text: None}, steps=4, eval_every=3, weight_decay=0.25, lr=0.5, warmup=2, clip=1e-3
    )
    training = loop.Training(run, "cpu")
    decays = {group["weight_decay"]: group["params"] for group in training.optimizer.param_groups}
    assert {*decays} == {0.25, 0.0} and all(p.ndim >= 2 for p in decays[0.25]) and all(p.ndim < 2 for p in decays[0.0])
    before = [p.detach().clone() for p in training.model.parameters()]
    torch.manual_seed(0)
    inputs, targets = training.begin(1)
    assert torch.initial_seed() == run.seed * 1_000_003 + 1 and float(training.optimizer.param_groups[0]["lr"]) == 0.5
    training.learn(inputs, targets)
    total = torch.nn.utils.get_total_norm([p.grad for p in training.model.parameters() if p.grad is not None])
    assert float(total) == pytest.approx(1e-3, rel=1e-3) and any(
        not torch.equal(a, b) for a, b in zip(before, training.model.parameters(), strict=True)
    )
    loose = loop.Training(dataclasses.replace(run, clip=1e9), "cpu")
    *_, norm = loose.learn(*loose.begin(1))
    routers = {id(p) for router in loose.model.routers for p in router.parameters()}
    own = [p.grad for p in loose.model.parameters() if id(p) in routers and p.grad is not None]
    assert len(own) > 0 and float(norm) == pytest.approx(float(torch.nn.utils.get_total_norm(own)))
    losses = [
        (torch.tensor(1.0), torch.tensor(0.5), torch.tensor(2.0)),
        (torch.tensor(2.0), torch.tensor(0.0), torch.tensor(4.0)),
    ]
    found = loop._means(training, losses)
    assert (found["train_loss"], found["router_loss"], found["router_grad_norm"]) == (1.5, 0.25, 3.0)


def test_rows_of_a_run_are_at_its_evaluations(shared_text, tmp_path, monkeypatch):
    """The last one ends it, also between two others; each has its own steps' loss and time."""
    run = dataclasses.replace(RUN, corpora={shared_text: None}, steps=5, eval_every=2, lr=0.01, warmup=1)
    training = loop.Training(run, "cpu")
    lasts = []
    fixed = {"code_fingerprint": "x", "corpus_sha256": "y"}
    metrics = {"val_loss": 1.0, "bits_per_byte": 2.0}
    now, trained = [0.0], []
    monkeypatch.setattr(loop.time, "perf_counter", lambda: now[0])
    monkeypatch.setattr(loop, "SAVE_SECONDS", 1e9)
    monkeypatch.setattr(loop, "LINE_SECONDS", 1e9)

    def step(number):
        trained.append(number)
        now[0] += 0.25 * (number + 1)
        return tuple(torch.tensor(float(number)) for _ in range(3))

    def evaluated(last):
        lasts.append(last)
        now[0] += 8.0
        return dict(metrics)

    monkeypatch.setattr(training, "step", step)
    monkeypatch.setattr(loop, "drop_rate", lambda model: None)
    found = loop.go_on(training, tmp_path / "x.ckpt", "name", "spec", fixed, evaluated)
    assert trained == [0, 1, 2, 3, 4] and [row["step"] for row in found] == [2, 4, 5] and lasts == [False, False, True]
    assert [row["tokens_seen"] for row in found] == [60, 120, 150] and [row["train_loss"] for row in found] == [
        0.5,
        2.5,
        4.0,
    ]
    assert [row["epochs"] for row in found] == [tokens / training.train.total for tokens in (60, 120, 150)]
    assert [row["run_step_ms"] for row in found] == [375.0, 875.0, 1250.0], (
        "0.25 s of the first step, and so much more of each"
    )
    assert [row["eval_seconds"] for row in found] == [8.0] * 3, "which no step's time has in it"


def test_the_parts_of_attention():
    """Angles fall by the width; a key is mixed with the one before it, the first with itself."""
    cos, sin = language_model.turns(torch.arange(5), 6)
    rates_ = [10_000 ** (-2 * n / 6) for n in range(3)]
    torch.testing.assert_close(cos, torch.tensor([[math.cos(s * r) for r in rates_] for s in range(5)]))
    x = torch.arange(1.0, 7.0).view(1, 1, 1, 6)
    turned = language_model.rotate(x, cos[2:3], sin[2:3])
    for n in range(3):
        a, b = float(x[..., n]), float(x[..., n + 3])
        angle = 2 * rates_[n]
        assert float(turned[..., n]) == pytest.approx(a * math.cos(angle) - b * math.sin(angle), abs=1e-5)
        assert float(turned[..., n + 3]) == pytest.approx(a * math.sin(angle) + b * math.cos(angle), abs=1e-5)
    torch.manual_seed(0)
    one = language_model.Attention(8, 2, 1, "key_shift")
    with torch.no_grad():
        one.own_N11[:] = torch.tensor([2.0, -1.0]).view(2, 1, 1)
    y = torch.randn(1, 5, 8)
    q, k, v = (part.view(1, 5, 2, 4).transpose(1, 2) for part in one.qkv(y).chunk(3, -1))
    own = torch.sigmoid(torch.tensor([2.0, -1.0])).view(2, 1, 1)
    before = k.clone()
    before[:, :, 1:] = k[:, :, :-1]
    k = own * k + (1 - own) * before
    cos, sin = language_model.turns(torch.arange(5), 4)
    scores = (language_model.rotate(q, cos, sin) @ language_model.rotate(k, cos, sin).transpose(-1, -2)) / 2
    scores = scores.masked_fill(~torch.ones(5, 5).tril().bool(), -torch.inf)
    expected = (scores.softmax(-1) @ v).transpose(1, 2).flatten(2)
    torch.testing.assert_close(one(y, cos, sin), one.out(expected))


def test_weights_that_write_into_the_stream_start_smaller_in_a_deeper_model():
    torch.manual_seed(0)
    experts = moe_layer.Experts(8, 64, 64, 8)
    assert float(experts.w13_EDH.detach().std()) == pytest.approx(0.02, rel=0.05) and float(
        experts.w2_EHD.detach().std()
    ) == pytest.approx(0.02 / 4, rel=0.05)
    attention = language_model.Attention(128, 2, 8)
    assert float(attention.qkv.weight.detach().std()) == pytest.approx(0.02, rel=0.05) and float(
        attention.out.weight.detach().std()
    ) == pytest.approx(0.02 / 4, rel=0.05)


def test_sizes_of_a_model():
    model = language_model.build(RUN, [])
    total, active = language_model.parameters(model)
    layer = sum(p.numel() for p in model.layers[0].experts.parameters())
    assert layer == 4 * (16 * 2 * 8 + 8 * 16) and total - active == 3 * layer // 2
    assert language_model.flops_per_token(model, RUN, active) == 6 * (active - 256 * 16) + 6 * 3 * 6 * 16
    twice = language_model.build(dataclasses.replace(RUN, router="chain_of_experts", top_k=4, experts=8), [])
    total, active = language_model.parameters(twice)
    assert twice.layers[0].top_k == 2 and len(twice.layers[0].routers) == 2
    assert total - active == 3 * sum(p.numel() for p in twice.layers[0].experts.parameters()) // 2
    model.layers[0].losses, model.layers[1].losses = (
        [{"a": torch.tensor(1.0), "b": torch.tensor(2.0)}],
        [{"a": torch.tensor(4.0)}],
    )
    model.layers[2].losses = []
    assert float(model.router_loss()) == 7.0


def test_an_evaluation_is_in_bits_of_bytes(shared_text, monkeypatch):
    """Nats of tokens, over the bytes that they stand for; statistics of a layer are of its own loads."""
    windows = SimpleNamespace(total=40, size=100)
    assert evaluate.bits(math.log(2), windows) == pytest.approx(0.4)
    model = language_model.build(dataclasses.replace(RUN, capacity_factor=None), [])

    def load(*counts, chosen=10.0, dropped=0.0, lost=0.0, entropy=0.0):
        found = expert_loads.Loads.empty(1, 4, "cpu", 2)
        found.by_domain += torch.tensor([counts])
        found.chosen += chosen
        found.dropped += dropped
        found.lost += lost
        found.entropy += entropy
        found.over += torch.arange(8.0)
        return found

    loads = [load(4.0, 4, 8, 0, entropy=30.0), load(1.0, 2, 3, 10, entropy=10.0), load(0.0, 0, 16, 0)]
    drops = [
        load(2.0, 2, 2, 2, dropped=1.0, lost=2.0, chosen=8.0),
        load(6.0, 2, 2, 2, dropped=3.0, lost=1.0, chosen=8.0),
    ]
    found = evaluate._routing_fields(model, loads, drops, 8)
    deviations = [np.std(one) / np.mean(one) for one in ([4, 4, 8, 0], [1, 2, 3, 10], [0, 0, 16, 0])]
    assert found["load_cv_by_layer"] == pytest.approx(deviations) and found["load_cv"] == pytest.approx(
        np.mean(deviations)
    )
    assert found["max_violation_by_layer"] == pytest.approx([1.0, 1.5, 3.0]) and found["dead_experts"] == 4
    assert found["gate_entropy"] == pytest.approx(40 / 3 / 8) and found["experts_per_token"] == pytest.approx(
        48 / 3 / 8
    )
    assert found["drop_rate"] == pytest.approx(4 / 20) and found["token_drop_rate"] == pytest.approx(3 / 16)
    assert found["drop_rate_by_factor"] == pytest.approx([3 * n / 48 for n in range(8)])
    monkeypatch.setattr(evaluate, "loss_of", lambda *known: (1.0, loads))
    whole = evaluate.evaluate(model, SimpleNamespace(total=8, size=20), 4)
    assert (
        whole["gate_entropy"] == found["gate_entropy"]
        and whole["val_bytes"] == 20
        and whole["perplexity"] == pytest.approx(math.e)
    )


def test_weights_are_quantised_along_their_sums_and_given_back():
    """Codes of neighbours that a product sums over: of a group one scale."""
    torch.manual_seed(0)
    weight = torch.randn(2, 128, 6) * torch.logspace(-2, 2, 6)
    before = weight.clone()
    evaluate._round(weight, evaluate.WEIGHTS["int8_g128"], "fp32")
    step = before.abs().amax(1, keepdim=True) / 127
    assert ((weight - before).abs() <= 0.51 * step).all() and not torch.equal(weight, before)
    model = language_model.build(dataclasses.replace(RUN, expert_hidden=9), [])
    with evaluate.quantised(model, evaluate.WEIGHTS["int4_g128"]) as whole:
        assert not whole
    model = language_model.build(RUN, [])
    kept = [p.detach().clone() for p in model.parameters()]
    with evaluate.quantised(model, evaluate.WEIGHTS["int4_g128"]) as whole:
        assert whole and any(not torch.equal(a, b) for a, b in zip(kept, model.parameters(), strict=True))
    assert all(torch.equal(a, b) for a, b in zip(kept, model.parameters(), strict=True))


def corpus(name, train_, validation, recurring=None):
    return texts.Corpus(
        name, np.frombuffer(train_, np.uint8), np.frombuffer(validation, np.uint8), name, texts.PLAIN, recurring
    )


def test_shares_of_texts():
    parts = [corpus("a", b"x" * 30, b"y" * 10, 4), corpus("b", b"x", b"y" * 30, 50)]
    assert (
        texts.recurring_share(parts) == pytest.approx((4 + 30) / 40)
        and texts.recurring_share([*parts, corpus("c", b"x", b"y")]) is None
    )
    vocabulary = texts.Vocabulary.of([bytes([n]) for n in range(256)] + [b"abc", b"de"])
    assert vocabulary.size(np.array([0, 256, 257, 257], np.uint16)) == 8 and vocabulary.first[256] == ord("a")
    documents = [b"a" * 50, b"b" * 10, b"c" * 30, b"d" * 5, b"e" * 5]
    train_, aside = texts.split(documents, 0.2)
    assert (bytes(train_), bytes(aside)) == (b"a" * 50 + b"c" * 30, b"b" * 10 + b"d" * 5 + b"e" * 5)
    train_, aside = texts.split([b"a" * 50 + b"z" * 10, b"c" * 30 + b"y" * 10], 0.2)
    assert (bytes(train_), bytes(aside)) == (b"a" * 48 + b"c" * 30 + b"y" * 2, b"aa" + b"z" * 10 + b"y" * 8)
    half = [b"a" * 89, b"b" * 10, b"c"]
    assert len(texts.split(half, 0.2)[1]) == 11, "more than half of what is asked for, whole documents alone"


def test_frequencies_are_of_all_training_text():
    found = steps.frequencies([corpus("a", b"aab", b"zzz"), corpus("b", b"bc", b"z")], 256)
    assert {chr(n): count for n, count in enumerate(found) if count} == {"a": 2, "b": 2, "c": 1} and len(found) == 256


def test_the_most_of_a_text_and_of_its_validation(tmp_path):
    for name, count in (("a", 4000), ("b", 1000)):
        folder = tmp_path / name
        folder.mkdir()
        for number in range(count // 100):
            (folder / f"{number}.txt").write_bytes(np.random.default_rng([count, number]).bytes(100))
    both = {str(tmp_path / "a"): 3000, str(tmp_path / "b"): None}
    found = texts.load(both, 0.1)
    assert [one.train_bytes + one.validation_bytes for one in found] == [3000, 1000] and [
        len(one.validation) for one in found
    ] == [300, 100]
    cut = texts.load(both, 0.1, validation_tokens=101)
    assert [len(one.validation) for one in cut] == [76, 26] and [len(one.train) for one in cut] == [2700, 900]
    assert [len(one.validation) for one in texts.load(both, 0.1, validation_tokens=400)] == [300, 100] and found[
        0
    ].recurring == 0


def test_words_of_an_engine(monkeypatch):
    assert engine.Engine.of("cuda") == engine.Engine(True, True, True) and engine.Engine.of("cpu") == engine.Engine()
    for words in ("graph", "operators,compiled", "graph,operators,compiled", "eager"):
        assert engine.Engine.of("cpu", words).name == words
    monkeypatch.setattr(engine, "_compiled", lambda function: lambda *known: function(*known))
    for parts in (engine.Engine(operators=True), engine.Engine(graph=True), engine.Engine(compiled=True)):
        model = language_model.build(RUN, [])
        attend = model.attend
        parts.prepare(model)
        assert {layer.operators for layer in model.layers} == {parts.operators} and (
            model.attend is not attend
        ) == parts.compiled
    with pytest.raises(UserError, match="engine"):
        engine.Engine.of("cpu", "graf")


def test_files_of_packages(tmp_path):
    """Of a Debian archive the data, after a part of odd length; what stands before the text of a line goes once."""

    def part(name, content):
        return f"{name:<16}{'':<32}{len(content):<10}`\n".encode() + content + b"\n" * (len(content) % 2)

    inner = io.BytesIO()
    with tarfile.open(fileobj=inner, mode="w") as archive:
        entry = tarfile.TarInfo("usr/a.txt")
        entry.size = 3
        archive.addfile(entry, io.BytesIO(b"abc"))
    deb = (
        b"!<arch>\n"
        + part("debian-binary/", b"2.0")
        + part("control.tar", b"12345")
        + part("data.tar", inner.getvalue())
    )
    assert [*corpus_packages._members("x.deb", deb)] == [("usr/a.txt", b"abc")]
    path = tmp_path / "x.zip"
    with zipfile.ZipFile(path, "w") as packed:
        packed.writestr("b/one.txt", "1: a: b\n2: c")
        packed.writestr("b/two.md", "no")
        packed.writestr("a/bad.txt", b"\xff" * 3 + b"x" * 997)
        packed.writestr("a/odd.txt", b"\xff" + b"x" * 1999)
    with pytest.MonkeyPatch.context() as patch:
        two = io.BytesIO()
        with tarfile.open(fileobj=two, mode="w") as archive:
            for name in ("a", "b"):
                entry = tarfile.TarInfo(name)
                entry.size = 6
                archive.addfile(entry, io.BytesIO(b"abcdef"))
        for most, fits in ((12, True), (11, False)):
            patch.setattr(corpus_packages, "MOST", most)
            if fits:
                assert len([*corpus_packages._members("x.tar", two.getvalue())]) == 2
            else:
                with pytest.raises(corpus_packages.guarded.Refused):
                    [*corpus_packages._members("x.tar", two.getvalue())]
    package = corpus_packages.Package("p", "file", "1", "prose", ["*.txt"], after=": ")
    found = [*corpus_packages.documents(package, path)]
    assert [name for name, _ in found] == ["a/odd.txt", "b/one.txt"] and found[1][1] == "a: b\nc"
    page = b"<p>a<script>x<script>y</script></script>b <i>c</i></p><style>z</style>d&amp;"
    assert corpus_packages._text("x.html", page).split() == ["a", "b", "c", "d&"]
    assert corpus_packages._text("x.json", b'{"a": ["b", 1, {"c": "d"}], "e": null}') == "b\nd"


def test_clean_text_is_of_long_lines_once():
    """Letters count, not characters; a file is cut into documents of about 32 KiB."""
    seen = set()
    assert [*cleaning.prose("12345 67890\nabcdefghij\n", 10, seen)] == [] and len(seen) == 1, "too short for a document"
    lines = [f"{number} " + "word" * 20 for number in range(600)]
    found = [*cleaning.prose("\n".join([*lines, lines[3]]), 10, seen)]
    assert (
        len(found) == 2
        and 2**15 <= len(found[0]) < 2**15 + 200
        and b"".join(found) == ("\n".join(lines) + "\n").encode()
    )
    assert [*cleaning.prose("\n".join(lines), 10, seen)] == []
    draw = np.random.default_rng(0)
    one, other = draw.bytes(4000), draw.bytes(4000)
    distinct = cleaning.Distinct()
    assert distinct.new(one) and not distinct.new(one) and distinct.new(other)
    assert not distinct.new(one[:2500] + draw.bytes(1000)) and distinct.new(one[:1000] + draw.bytes(2500))
    split = cleaning.split([one[:100], other[:300], one[200:250]], 0.25, 3)
    assert (
        sorted(map(len, split.train + split.validation)) == [50, 100, 300] and sum(map(len, split.validation)) <= 112.5
    )
    assert cleaning.recurring(one[:500] + other[:300], [b"x" * 100 + one[100:300] + b"y", other[:63]]) == 200
    (kept,) = cleaning.apart([one[:600]], [one[500:700]])
    assert kept == one[:500]


def test_a_page_is_read_as_it_is_shown():
    """Entities once: a page that shows how markup is written keeps it. Blocks are lines, what is inline is not, scripts are not shown."""
    page = b"<h1>On &lt;p&gt;</h1><p>Write &amp;lt; for\n <b>&lt;</b>, &eacute;.<script>if (a &lt; b) {}</script><style>p {}</style></p>"
    lines = [line for line in corpus_packages._text("a/page.html", page).splitlines() if line]
    assert lines == ["On <p>", "Write &lt; for <, é."]
    assert corpus_packages._text("a/text.txt", page) == page.decode(), "of a page alone"
    assert corpus_packages._text("a.json", b'{"a": "x", "b": [1, "y", {"c": "z"}], "d": null}') == "x\ny\nz"
    odd = b"ab" * 1000
    assert corpus_packages._text("t", odd + b"\xff\xff") == odd.decode(), "a thousandth may be no UTF-8"
    with pytest.raises(ValueError, match="no text"):
        corpus_packages._text("t", odd + b"\xff\xff\xff")


@pytest.mark.parametrize("sizes", [(4, 6, 9), (5, 7, 9), (1, 2, 3)])
def test_contents_of_a_debian_package_lie_at_even_places(sizes):
    def part(name, content):
        head = f"{name:<16}{0:<12}{0:<6}{0:<6}{'100644':<8}{len(content):<10}`\n".encode()
        return head + content + b"\n" * (len(content) % 2)

    names = ("debian-binary", "control.tar.xz", "data.tar.xz/")
    contents = [bytes([65 + number]) * size for number, size in enumerate(sizes)]
    package = b"!<arch>\n" + b"".join(map(part, names, contents))
    assert corpus_packages._data(package) == ("data.tar.xz", contents[2])
    with pytest.raises(tarfile.ReadError):
        corpus_packages._data(package[: package.index(b"data.tar")])


@pytest.mark.parametrize(("letter", "lines"), [("a", 5), ("ä", 3), ("字", 2)])
def test_a_document_is_as_long_in_bytes_of_its_text(letter, lines, monkeypatch):
    """Lines of 19 letters have 20, 38 or 56 bytes with their ends: a document is over at 100 of them, and the rest is none below 40."""
    monkeypatch.setattr(cleaning, "_DOCUMENT", 100)
    monkeypatch.setattr(cleaning, "LEAST", 40)
    text = [letter * 18 + chr(ord("a") + n) for n in range(2 * lines + 2)]
    found = [one.decode().splitlines() for one in cleaning.prose("\n".join(text), 10, set())]
    assert found == [text[:lines], text[lines : 2 * lines], text[2 * lines :]]
    short = [one.decode().splitlines() for one in cleaning.prose("\n".join(text[:-1]), 10, set())]
    rest = [text[2 * lines : -1]] if len(letter.encode()) == 3 else []
    assert short == [text[:lines], text[lines : 2 * lines], *rest]


def test_a_sample_for_merges_has_each_domain_by_its_share(monkeypatch):
    splits = {"a": cleaning.Split([b"a" * 10] * 30, [b"v" * 99]), "b": cleaning.Split([b"b" * 10] * 10, [])}
    monkeypatch.setattr(corpus_preparation, "_TRAINED_ON", 200)
    assert [text[0] for text in corpus_preparation._sample(splits)] == ["a"] * 15 + ["b"] * 5
    letters = corpus_preparation._letters()
    assert sorted(letters.values()) == list(range(256)) and letters["A"] == 65 and letters["Ġ"] == 32


@pytest.mark.parametrize(
    ("change", "training", "evaluation"),
    [
        ({"router": DENSE}, True, True),
        ({"router": "softk", "capacity_factor": None}, True, True),
        ({"router": "expert_choice", "capacity_factor": None}, False, None),
    ],
)
def test_a_run_is_causal_where_all_of_its_rules_are(change, training, evaluation):
    run = dataclasses.replace(RUN, **change)
    assert train.is_causal(run) is training
    if evaluation is not None:
        assert train.is_causal(run, training=False) is evaluation
    both = dataclasses.replace(RUN, router="softk+expert_choice", capacity_factor=None)
    assert not train.is_causal(both)
    for policy in ("position", "random", "score"):
        limited = dataclasses.replace(RUN, router="softk", drop_policy=policy)
        assert train.is_causal(limited) is bool(ZOO["softk"].causal_with_capacity(policy, True))
    parts = [corpus("a", b"x", b"y"), corpus("b", b"z", b"y")]
    assert train.corpus_hash(parts) == hashlib.sha256(b"a:a\nb:b\n").hexdigest()[:16] != train.corpus_hash(parts[::-1])


def test_an_evaluation_alters_formats_without_a_capacity_and_capacities_without_a_format(monkeypatch):
    """Batches of one domain are with the capacity of training; all others are of all domains."""
    asked = []

    def loss_of(model, windows, batch, mixed=True):
        asked.append((model.layers[0].capacity_factor, mixed, float(model.layers[0].experts.w2_EHD.detach().sum())))
        return float(len(asked)), []

    monkeypatch.setattr(evaluate, "loss_of", loss_of)
    windows = SimpleNamespace(total=1, size=1)
    for factor in (1.5, None):
        asked.clear()
        model = language_model.build(dataclasses.replace(RUN, capacity_factor=factor), [])
        whole = float(model.layers[0].experts.w2_EHD.detach().sum())
        found = evaluate.altered_fields(model, windows, 4)
        formats = len(found["bits_by_format"])
        limited = factor is not None
        assert formats > 3 and [one[1] for one in asked] == [False] * limited + [True] * (formats + 4)
        assert [one[0] for one in asked] == [1.5] * limited + [None] * formats + [1.0, 1.25, 1.5, 2.0]
        assert all(
            (one[2] == whole) == (place < limited or place >= limited + formats) for place, one in enumerate(asked)
        )
        assert (
            list(found["bits_by_capacity"]) == ["1", "1.25", "1.5", "2"]
            and (found["bits_of_one_domain"] is None) != limited
        )
        assert model.layers[0].capacity_factor == factor
        asked.clear()
        evaluate.evaluate(model, windows, 4)
        assert [one[:2] for one in asked] == [(None, True)] + [(1.5, True)] * limited
    assert set(evaluate.altered_fields(SimpleNamespace(layers=[]), windows, 4).values()) == {None}


@pytest.mark.parametrize(
    ("change", "last", "altered"),
    [({}, True, True), ({}, False, False), ({"altered": False}, True, False), ({"purpose": "pilot"}, True, False)],
)
def test_only_the_last_evaluation_of_a_run_that_is_compared_alters_it(change, last, altered, monkeypatch):
    monkeypatch.setattr(train.evaluate, "evaluate", lambda *known: {"val_loss": 1.0})
    monkeypatch.setattr(train.evaluate, "altered_fields", lambda *known: {"bits_by_format": {}})
    training = SimpleNamespace(run=dataclasses.replace(RUN, **change), model=None, validation=None)
    assert ("bits_by_format" in train._evaluated(training, last)) is altered


def test_a_trace_is_of_the_middle_layer(tmp_path, monkeypatch):
    asked = []
    monkeypatch.setattr(train.evaluate, "routing_ids", lambda *known: asked.append(known[2:]) or (None, "soft"))
    for layers in (3, 4):
        run = dataclasses.replace(RUN, layers=layers, trace_tokens=64)
        train._trace(SimpleNamespace(run=run, model=None, validation=None), tmp_path / "trace")
    assert asked == [(5, 64, 1), (5, 64, 2)]


def test_fields_of_a_run_say_what_it_is_made_of(monkeypatch):
    """Bytes of text are no tokens; it learns where one of its rules does."""
    monkeypatch.setattr(train, "origin", lambda device, files: {"device": device})
    still = next(name for name, rule in ZOO.items() if not rule.learns)
    for router, learns in (("softk", True), (f"{still}+softk", True), (still, False), (DENSE, False)):
        run = dataclasses.replace(RUN, router=router, capacity_factor=None)
        model = language_model.build(run, [1] * 256)
        parts = [corpus("a", b"x", b"y" * 4, 1), corpus("b", b"z", b"y" * 4, 2)]
        training = SimpleNamespace(
            run=run,
            model=model,
            corpora=parts,
            train=SimpleNamespace(size=77, total=5),
            engine=engine.Engine(),
            device="cpu",
        )
        found = train._fixed(training)
        assert (found["learns"], found["train_bytes"], found["domains"]) == (learns, 77, ["a", "b"])
        params, active = language_model.parameters(model)
        assert (found["params"], found["active_params"]) == (params, active) and found["recurring_share"] == 3 / 8
        assert found["flops_per_token"] == language_model.flops_per_token(model, run, active)


def test_an_adaptation_is_judged_on_its_text_and_on_each_byte_of_the_old_one():
    windows = {"a": SimpleNamespace(size=100, total=50, loss=2.0), "b": SimpleNamespace(size=300, total=300, loss=1.0)}
    new = SimpleNamespace(size=40, total=10, loss=3.0)
    found = adapt.Adapting.evaluation(SimpleNamespace(validation=new, old=windows, _loss=lambda one: one.loss))
    bits = 1 / math.log(2)
    assert (found["val_loss"], found["val_bytes"]) == (3.0, 40) and found["bits_per_byte"] == pytest.approx(0.75 * bits)
    assert found["old_bits_per_byte_by_domain"] == pytest.approx([bits, bits]) and found[
        "old_bits_per_byte"
    ] == pytest.approx(bits)
    windows["b"].loss = 4.0
    found = adapt.Adapting.evaluation(SimpleNamespace(validation=new, old=windows, _loss=lambda one: one.loss))
    assert found["old_bits_per_byte"] == pytest.approx((100 * bits + 300 * 4 * bits) / 400)


@pytest.mark.parametrize(("count", "first"), [(200, 155), (45, 0), (20, 0)])
def test_times_are_of_the_last_steps_and_stages_sum_to_the_whole(count, first, tmp_path, monkeypatch):
    rows, begun = [], []

    def eager(training, numbers):
        begun.append(next(numbers))
        return [5.0, 1.0, 2.0, 9.0], dict(zip(stage_clock.STAGES, (1.0, 1.0, 2.0, 2.0, 1.0), strict=True))

    monkeypatch.setattr(timing, "_trained", lambda *known: None)
    monkeypatch.setattr(timing, "_eager", eager)
    monkeypatch.setattr(timing.run_rows, "write", lambda out, made, spec: rows.extend(made))
    run = dataclasses.replace(RUN, steps=count)
    timing.measure(run, tmp_path, tmp_path / "out", "cpu")
    (row,) = rows
    assert begun == [first] and row["step_ms"] == row["eager_step_ms"] == 3.5 and row["timed_alone"] is True
    assert (
        row["train_tokens_per_s"] == pytest.approx(1e3 * 30 / 3.5)
        and row["experts_ms"] == row["combine_ms"] == 1.0
        and row["rest_ms"] == 0.5
    )
    assert row["step_half_width_ms"] == pytest.approx(stats.t.ppf(0.975, 3) * stats.sem([5.0, 1.0, 2.0, 9.0]))


def test_a_blocks_time_is_of_one_step(monkeypatch):
    """Without marks all of it is the rest; marked steps are timed one by one."""
    done, counts = [], []

    def timed(training, numbers, count, clock=None):
        counts.append((count, clock is not None))
        return {stage: (place + 1.0) * count for place, stage in enumerate(stage_clock.STAGES)}

    monkeypatch.setattr(timing, "_timed", timed)
    training = SimpleNamespace(step=done.append, device="cpu", model=SimpleNamespace(ffns=[]))
    blocks, stages = timing._eager(training, iter(range(99)))
    assert (
        blocks == [15.0] * timing.BLOCKS
        and done == list(range(timing.WARMUP))
        and list(stages.values()) == [1.0, 2.0, 3.0, 4.0, 5.0]
    )
    assert counts == [(timing.BLOCK, False)] * timing.BLOCKS + [(1, True)] * timing.PROFILED


def test_rows_of_a_run_have_their_own_speed_until_it_is_timed(shared_text, tmp_path, monkeypatch):
    run = dataclasses.replace(RUN, corpora={shared_text: None}, lr=0.1, keep_weights=True)
    made = [{"step": step, "run_step_ms": ms} for step, ms in ((1, 4.0), (2, 10.0))]
    monkeypatch.setattr(train, "go_on", lambda *known: made)
    monkeypatch.setattr(train, "_fixed", lambda training: {})
    monkeypatch.setattr(train.run_rows, "write", lambda out, rows, spec: None)
    saved = []
    monkeypatch.setattr(train, "save", lambda path, state: saved.append((path, state["spec"])))
    rows = train.train(run, tmp_path / "x.parquet", "cpu")
    assert [(row["step_ms"], row["train_tokens_per_s"], row["timed_alone"]) for row in rows] == [
        (4.0, 7500.0, False),
        (10.0, 3000.0, False),
    ]
    assert saved == [(tmp_path / "x.pt", run.spec)] and rows[0]["step_mode"] == "eager"


def test_windows_cover_each_token_once():
    """Of two texts with a short last window each; nothing reaches into the next text."""
    one = steps.Windows([np.frombuffer(b"abcdefgh", np.uint8), np.frombuffer(b"xyz", np.uint8)], 3, "cpu")
    assert (
        len(one) == 4
        and one.total == one.size == 11
        and one.lengths.tolist() == [3, 3, 2, 3]
        and one.domains.tolist() == [0, 0, 0, 1]
    )
    inputs, targets = one.take(np.arange(4))
    assert [bytes(row[row != steps.IGNORED].tolist()) for row in targets] == [b"abc", b"def", b"gh", b"xyz"]
    assert (
        bytes(inputs[0].tolist()) == b"\nab"
        and bytes(inputs[1].tolist()) == b"cde"
        and bytes(inputs[3].tolist()) == b"\nxy"
    )
    assert sorted(np.concatenate([one.batch(step, 2, 5) for step in (0, 1)]).tolist()) == [0, 1, 2, 3]
    assert sorted(np.concatenate(list(one.mixed(3))).tolist()) == [0, 1, 2, 3] and [
        len(part) for part in one.mixed(3)
    ] == [3, 1]
    assert one.batch(1, 2, 5).tolist() == one.batch(0, 4, 5).tolist()[2:] and [
        one.batch(n, 4, 5).tolist() for n in range(9)
    ] != [one.batch(n, 4, 6).tolist() for n in range(9)]


def test_prepared_text_says_what_it_is_made_of(tmp_path, monkeypatch):
    """Validation is cut by the training text of all domains; a domain without enough of both is left out, as is a package that cannot be had."""
    draw = np.random.default_rng(0)
    contents = {name: [draw.bytes(1000) for _ in range(count)] for name, count in (("a", 10), ("b", 10), ("few", 1))}
    contents["b"].append(contents["a"][0])

    def cleaned(package, cache, seen):
        if package.package == "gone":
            raise UserError("no network")
        yield from contents[package.package]

    monkeypatch.setattr(corpus_preparation, "_cleaned", cleaned)
    packages = [
        corpus_packages.Package(name, "pypi", "1", domain, ["*"], licence="L")
        for name, domain in (("a", "prose"), ("gone", "prose"), ("b", "code"), ("few", "tables"))
    ]
    apart, compared = cleaning.apart, []
    monkeypatch.setattr(
        cleaning, "apart", lambda validation, known: compared.append(len(known)) or apart(validation, known)
    )
    lines = corpus_preparation.prepare(packages, tmp_path, tmp_path / "out", 0.3, 7)
    assert compared == [15] * 3
    about = json.loads((tmp_path / "out" / prepared.MANIFEST).read_text())
    assert (about["share"], about["seed"]) == (0.3, 7) and [one["package"] for one in about["packages"]] == [
        "a",
        "b",
        "few",
    ]
    assert [one["mb"] for one in about["packages"]] == [0.01, 0.01, 0.001] and list(about["domains"]) == [
        "code",
        "prose",
    ]
    assert [line.partition(":")[0] for line in about["left_out"]] == ["gone 1", "domain tables"] and lines[
        0
    ] == "a 1: 10 documents, 0.0 MB, L"
    found = {one.name: one for one in prepared.domains(tmp_path / "out", None, 256)}
    assert [len(found[name].validation) for name in ("code", "prose")] == [3000, 3000] and set(
        about["recurring"].values()
    ) == {0}
    assert about["train_bytes"] == 14_000 + 1000 and sum(len(one.train) for one in found.values()) == 14_000


class Chosen:
    """A model of two layers whose second one chooses the input and the one after it."""

    def __init__(self, shift=0):
        self.layers, self.shift = [SimpleNamespace(count=300, capacity_factor=None, seen=[]) for _ in range(2)], shift

    def modules(self):
        return []

    def eval(self):
        return self

    def __call__(self, inputs):
        ids = torch.stack([inputs.flatten(), inputs.flatten() + 1], 1).int() - self.shift
        self.layers[1].seen = [SimpleNamespace(ids_TK=ids)]


def test_routing_is_of_windows_spread_over_the_text():
    """Whole ones alone, batch after batch; ids that are no expert's have a reason."""
    text = np.arange(1, 60, dtype=np.uint8)
    windows = steps.Windows([text], 5, "cpu")  # eleven whole windows and a short one
    found, reason = evaluate.routing_ids(Chosen(), windows, 2, 18, 1)
    starts = [0, 2, 5, 8]  # i 11 // 4
    expected = [int(one) for start in starts for one in np.concatenate([[10], text])[5 * start : 5 * start + 5]][:18]
    assert reason == "" and found.tolist() == [[one, one + 1] for one in expected]
    assert len(evaluate.routing_ids(Chosen(), windows, 2, 55, 1)[0]) == 55
    assert evaluate.routing_ids(Chosen(), windows, 2, 56, 1)[1].startswith("validation has 55 bytes in whole windows")
    for shift in (2, -300):
        assert evaluate.routing_ids(Chosen(shift), windows, 2, 18, 1) == (
            None,
            "some tokens have fewer than k true experts",
        )
    assert evaluate.routing_ids(Chosen(1), windows, 2, 18, 1)[0].min() == 0


@pytest.mark.parametrize(
    ("policy", "seated_by", "kept"),
    [
        ("position", "position", [[True, True], [True, True], [False, False]]),
        ("position", "choice", [[True, True], [True, False], [True, False]]),
        ("score", "choice", [[False, False], [True, True], [True, True]]),
    ],
)
def test_a_rule_seats_its_choices_unless_a_run_says_how(policy, seated_by, kept):
    """Two seats of each of two experts, three tokens with two choices each."""
    ids = torch.tensor([[0, 1], [1, 0], [0, 1]])
    weights = torch.tensor([[0.1, 0.6], [0.9, 0.3], [0.5, 0.7]])
    routing = SimpleNamespace(ids=ids, weights=weights, losses={}, scores=torch.full((3, 2), 0.5))

    class Router(torch.nn.Module):
        passes, extra = 1, ()

        def forward(self, *known):
            return routing

    router = Router()
    router.seated_by = seated_by
    layer = moe_layer.MoE([router], moe_layer.Experts(2, 8, 8, 1), 2, 0.6, policy)
    layer(torch.randn(1, 3, 8), torch.zeros(1, 3, dtype=int), torch.arange(3))
    assert layer.seen[0].kept_TK.tolist() == kept and layer.seen[0].seated_by == seated_by
