"""PERFT: adapters change nothing at first, then learn alone; their counts; a run that was killed; the summary of rows."""

import dataclasses
import math
from pathlib import Path
from types import SimpleNamespace

import pandas as pd
import pytest
import torch
import torch.nn.functional as F
from scipy import stats
from torch import Tensor

from drawn import draw
from moe_routing_bench.figures import paper
from moe_routing_bench.grid.run_spec import VARIANTS, Adaptation, Run
from moe_routing_bench.quality import adapt, adaptation_rows, evaluate, loop, perft_summary, run_rows, train
from moe_routing_bench.report import trained_rules
from moe_routing_bench.store import paths
from moe_routing_kernels.errors import UserError

Base = tuple[Run, Path]
DIM, EXPERTS, K, LAYERS = 16, 4, 2, 2


def base_run(text: str, **more: object) -> Run:
    """A few steps of a small MoE that drops in training."""
    return Run(
        **{
            "seed": 3,
            "experts": EXPERTS,
            "top_k": K,
            "dim": DIM,
            "heads": 2,
            "layers": LAYERS,
            "expert_hidden": 16,
            "corpora": {text: None},
            "sequence": 32,
            "batch": 4,
            "steps": 12,
            "warmup": 2,
            "eval_every": 12,
            "lr": 1e-2,
            "keep_weights": True,
            "capacity_factor": 1.0,
        }
        | more
    )


@pytest.fixture(scope="module")
def base(shared_text: str, tmp_path_factory: pytest.TempPathFactory) -> Base:
    """A run that was trained, and its file."""
    run, path = base_run(shared_text), tmp_path_factory.mktemp("base") / "base.parquet"
    train.train(run, path, "cpu")
    return run, path


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Another text: letters that the base never saw."""
    folder = tmp_path_factory.mktemp("other")
    for number in range(10):
        (folder / f"{number}.txt").write_bytes(b"xyz zyx yyz " * (40 + number))
    return str(folder)


def adaptation(run: Run, other: str, variant: str, **more: object) -> Adaptation:
    """Six steps on the other text."""
    own = dataclasses.replace(
        run,
        label="a",
        corpora={other: None},
        steps=6,
        eval_every=2,
        warmup=1,
        lr=1e-2,
        weight_decay=0.0,
        seed=4,
        keep_weights=False,
    )
    return Adaptation(own, run.name, variant, **{"rank": 2} | more)  # type: ignore[arg-type]


def frozen_state(training: loop.Training) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in training.model.state_dict().items() if ".adapters." not in name}


@pytest.mark.parametrize("variant", VARIANTS)
def test_step_0_is_the_frozen_model_and_training_leaves_it_so(base: Base, other: str, variant: str) -> None:
    """Logits and weights bit for bit; adapters have moved, and have changed the logits."""
    run, path = base
    plain = loop.Training(run, "cpu")
    plain.load(torch.load(paths.weights_file(path), weights_only=True))
    training = adapt.Adapting(adaptation(run, other, variant), path, "cpu")
    inputs, _ = training.validation.take(training.validation.batch(0, 4, 0))
    with torch.no_grad(), evaluate.evaluating(plain.model), evaluate.without_capacity(plain.model):
        expected = plain.model(inputs)
    with torch.no_grad():
        assert torch.equal(training.model(inputs), expected)
    before, start = (
        frozen_state(training),
        {name: value.clone() for name, value in adapt.learnt(training.model).items()},
    )
    assert all(torch.equal(value, plain.model.state_dict()[name]) for name, value in before.items())
    for number in range(4):
        training.step(number)
        training.evaluation()
    after = frozen_state(training)
    assert before.keys() == after.keys() == plain.model.state_dict().keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    moved = adapt.learnt(training.model)
    assert moved.keys() == start.keys() and not any(torch.equal(start[name], moved[name]) for name in start)
    with torch.no_grad():
        assert not torch.allclose(training.model(inputs), expected, atol=1e-4)


def test_frozen_routers_stay_frozen_after_an_evaluation(text: str, other: str, tmp_path: Path) -> None:
    """Of a rule with noise in training, and of one that learns a bias without a gradient."""
    for router in ("noisy_topk", "deepseek_v3_small"):
        run = base_run(text, router=router, steps=2, warmup=0, eval_every=2, experts=8)
        train.train(run, tmp_path / f"{router}.parquet", "cpu")
        training = adapt.Adapting(adaptation(run, other, "E"), tmp_path / f"{router}.parquet", "cpu")
        before = frozen_state(training)
        training.evaluation()
        one, two = (training.model(training.validation.take(training.validation.batch(0, 2, 0))[0]) for _ in range(2))
        assert torch.equal(one, two) and float(training.model.router_loss().detach()) == 0
        training.step(0)
        assert all(torch.equal(value, frozen_state(training)[name]) for name, value in before.items())


@pytest.mark.parametrize("variant", VARIANTS)
def test_gradients_are_where_they_are_meant_to_be(base: Base, other: str, variant: str) -> None:
    """In the adapters, and not zero once they do something; nowhere else. Only PERFT-R has a loss of its own."""
    training = adapt.Adapting(adaptation(base[0], other, variant), base[1], "cpu")
    losses = [training.step(number)[1] for number in range(3)]
    found = {name: p.grad for name, p in training.model.named_parameters()}
    for name, gradient in found.items():
        assert (gradient is not None and bool(gradient.any())) if ".adapters." in name else gradient is None, name
    assert sum(len(group["params"]) for group in training.optimizer.param_groups) == sum(
        ".adapters." in name for name in found
    )
    assert all(float(one) > 0 for one in losses) if variant == "R" else not any(map(float, losses))
    training.model.eval()
    training.model(training.validation.take(training.validation.batch(0, 2, 0))[0])
    assert float(training.model.router_loss().detach()) == 0


def test_each_variant_computes_its_formula(base: Base, other: str) -> None:
    """Token by token, adapter by adapter, with the weights of the router that the variant names."""
    for variant in VARIANTS:
        model = adapt.Adapting(adaptation(base[0], other, variant, adapters=3, alpha=8.0), base[1], "cpu").model
        layer, (own, *_) = model.layers[0], adapt.adapters_of(model)
        draw = torch.Generator().manual_seed(1)
        own.up_RD.data.normal_(generator=draw)
        x = torch.randn(1, 5, DIM, generator=draw)
        ids, positions = torch.zeros(1, 5, dtype=torch.int64), torch.arange(5)
        with torch.no_grad():
            frozen = layer.routers[0](x, ids, positions)
            chosen = own.router.eval()(x, ids, positions) if own.router is not None else frozen
            delta = own(x, ids, positions, frozen)[0]
            expected = torch.zeros(5, DIM)
            for token in range(5):
                always = variant in ("D", "S")
                pairs = (
                    [(m, 1.0) for m in range(own.count)]
                    if always
                    else zip(chosen.ids[token].tolist(), chosen.weights[token].tolist(), strict=True)
                )
                for m, weight in pairs:
                    rows = slice(2 * m, 2 * m + 2)
                    expected[token] += weight * 8.0 / 2 * (x[0, token] @ own.down_DR[:, rows]) @ own.up_RD[rows]
            torch.testing.assert_close(delta, expected)
            with_delta = layer(x, ids, positions)
            layer.adapters = None
            torch.testing.assert_close(with_delta[0], layer(x, ids, positions)[0] + delta)


@pytest.mark.parametrize("rank", [2, 8, 32])
def test_parameter_counts_are_the_closed_form(base: Base, other: str, rank: int) -> None:
    """2 r D an adapter; R's router D M; activated: those of the k chosen, and the whole router."""
    one, m, k = 2 * rank * DIM, 6, 3
    expected = {
        "R": (m * one + DIM * m, k * one + DIM * m),
        "E": (EXPERTS * one, K * one),
        "D": (m * one, m * one),
        "S": (one, one),
    }
    for variant, (all_of_them, active) in expected.items():
        model = adapt.Adapting(
            adaptation(base[0], other, variant, rank=rank, adapters=m, top_k=k), base[1], "cpu"
        ).model
        assert adapt.parameter_counts(model) == (LAYERS * all_of_them, LAYERS * active)
        assert sum(p.numel() for p in model.parameters() if p.requires_grad) == LAYERS * all_of_them


def test_ids_that_name_no_expert_have_no_gate() -> None:
    """Empty slots and zero-computation experts; a gate has its weight's gradient."""
    weights = torch.tensor([[0.5, 0.3, 0.2]], requires_grad=True)
    found = adapt.gates(torch.tensor([[2, -1, 3]], dtype=torch.int32), weights, 3)
    assert torch.equal(found, torch.tensor([[0.0, 0.0, 0.5]]))
    found.sum().backward()
    assert torch.equal(weights.grad, torch.tensor([[1.0, 0.0, 0.0]]))  # type: ignore[arg-type]


def test_a_killed_adaptation_ends_as_an_unbroken_one(
    base: Base, other: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Losses bit for bit; the checkpoint holds no frozen weight; rows start before the first step."""
    run, path = base
    one = adaptation(run, other, "R")  # the variant with a router of its own has state of every kind
    whole = adapt.adapt(one, path, tmp_path / "whole.parquet", "cpu")
    out, step, done = tmp_path / "broken.parquet", loop.Training.step, []

    def dies(self: loop.Training, number: int):
        done.append(number)
        if done.count(4) == 1 and number == 4:
            raise KeyboardInterrupt
        return step(self, number)

    monkeypatch.setattr(loop.Training, "step", dies)
    with pytest.raises(KeyboardInterrupt):
        adapt.adapt(one, path, out, "cpu")
    kept = torch.load(out.with_suffix(".ckpt"), weights_only=True)["model"]
    assert kept and all(".adapters." in name for name in kept)
    torch.manual_seed(99)
    broken = adapt.adapt(one, path, out, "cpu")
    assert done == [0, 1, 2, 3, 4, 4, 5]
    compared = ("step", "train_loss", "router_loss", "router_grad_norm", "val_loss", "old_bits_per_byte_by_domain")
    assert [[row.get(name) for name in compared] for row in broken] == [
        [row.get(name) for name in compared] for row in whole
    ]
    stored = run_rows.read(out, adaptation_rows.SCHEMA)
    assert stored["step"].to_pylist() == [0, 2, 4, 6] and run_rows.spec_of(stored) == one.spec
    assert Adaptation.from_spec(one.spec) == one and stored["run"].to_pylist() == [one.name] * 4


def test_adapting_learns_and_its_rows_are_right(base: Base, other: str, tmp_path: Path) -> None:
    """The loss on the new text falls; bits are of every byte; old losses are those of the base."""
    run, path = base
    one = adaptation(run, other, "E", rank=4)
    one = dataclasses.replace(one, run=dataclasses.replace(one.run, steps=60, eval_every=30, max_epochs=10))
    first, *_, last = adapt.adapt(one, path, tmp_path / "a.parquet", "cpu")
    assert last["val_loss"] < first["val_loss"] - 0.2
    assert first["old_bits_per_byte"] == pytest.approx(run_rows.last(path)["bits_per_byte"])
    assert last["old_bits_per_byte_by_domain"] == [last["old_bits_per_byte"]] and last["old_domains"] == ["text"]
    assert last["bits_per_byte"] == pytest.approx(last["val_loss"] / math.log(2)) and last["router_grad_norm"] is None
    assert (last["adapters"], last["top_k"], last["params"], last["active_params"]) == (
        EXPERTS,
        K,
        LAYERS * EXPERTS * 2 * 4 * DIM,
        LAYERS * K * 2 * 4 * DIM,
    )
    training = adapt.Adapting(one, path, "cpu")
    total = 0.0
    with torch.no_grad():
        for numbers in training.validation.mixed(1):
            inputs, targets = training.validation.take(numbers)
            total += float(F.cross_entropy(training.model(inputs)[0], targets[0], ignore_index=-100, reduction="sum"))
    assert first["val_loss"] == pytest.approx(total / training.validation.total, rel=1e-5)


def test_what_cannot_be_adapted_is_refused(base: Base, text: str, other: str, tmp_path: Path) -> None:
    """Another base, one without weights, without experts, of two passes, and PERFT-E of soft routing."""
    run, path = base
    with pytest.raises(UserError, match="PERFT base"):
        adapt.Adapting(dataclasses.replace(adaptation(run, other, "S"), base="another"), path, "cpu")
    for router, variant in (("dense", "S"), ("chain_of_experts", "D"), ("soft_moe", "E")):
        unfit = base_run(text, router=router, steps=1, warmup=0, eval_every=1)
        out = tmp_path / f"{router}.parquet"
        train.train(unfit, out, "cpu")
        with pytest.raises(UserError, match="PERFT"):
            adapt.adapt(adaptation(unfit, other, variant), out, tmp_path / "x.parquet", "cpu")
    alone = tmp_path / path.name  # without the weights beside it
    alone.write_bytes(path.read_bytes())
    with pytest.raises(UserError, match="keep_weights"):
        adapt.Adapting(adaptation(run, other, "S"), alone, "cpu")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"variant": "T"}, "variant"),
        ({"rank": 0}, "rank"),
        ({"top_k": 5}, "at most adapters = 4"),
        ({"alpha": 0}, "alpha"),
    ],
)
def test_mistakes_in_an_adaptation_are_explained(change: dict, message: str) -> None:
    """Before anything runs."""
    with pytest.raises(UserError, match=message):
        Adaptation(**change)


def test_summary_counts_from_before_the_first_step() -> None:
    """Gain and forgetting of each seed; mean and interval over seeds; pilots do not count."""
    fixed = {
        "label": "a",
        "config_hash": "c",
        "variant": "E",
        "rank": 2,
        "purpose": "final",
        "params": 100,
        "active_params": 50,
        "lr": 0.1,
    }
    rows = [
        fixed | {"run": f"a{seed}", "seed": seed, "step": step, "bits_per_byte": new + seed, "old_bits_per_byte": old}
        for seed in (0, 1)
        for step, new, old in ((4, 3.0, 2.5), (0, 5.0, 2.0), (2, 4.0, 9.0))
    ]
    rows.append(rows[0] | {"run": "pilot", "purpose": "pilot", "bits_per_byte": 0.0})
    (found,) = perft_summary.summary(pd.DataFrame(rows)).to_dict("records")
    assert (found["bits_per_byte"], found["gain"], found["forgetting"], found["seeds"]) == (3.5, 2, 0.5, 2)
    assert found["gain_half_width"] == 0 and found["bits_per_byte_half_width"] == pytest.approx(12.706 * 0.5, rel=1e-3)
    assert "PERFT-E r2" in perft_summary.text(pd.DataFrame(rows))


def many_rows() -> pd.DataFrame:
    """Rows of the schema: two variants, three ranks and three seeds, before and after."""
    empty = dict.fromkeys(adaptation_rows.COLUMNS)
    fixed = {
        "label": "python",
        "config_hash": "c",
        "purpose": "final",
        "router": "softk",
        "experts": 8,
        "base_params": 2e7,
        "domains": ["stdlib"],
        "old_domains": ["kjv"],
        "device": "cpu",
        "torch_version": "2",
        "ended_at": "2026-01-01T00:00:00+00:00",
        "old_bits_per_byte": 2.0,
        "lr": 0.1,
    }
    return pd.DataFrame(
        [
            empty
            | fixed
            | {
                "run": f"{variant}{rank}{seed}",
                "variant": variant,
                "rank": rank,
                "seed": seed,
                "step": step,
                "params": rank * count * 100,
                "active_params": rank * active * 100,
                "bits_per_byte": 5.0 if not step else 3 - rank / 32 + seed / 10 - count / 16,
            }
            for variant, count, active in (("E", 8, 2), ("S", 1, 1))
            for rank in (2, 8, 32)
            for seed in range(3)
            for step in (0, 9)
        ]
    )


def test_report_lists_adapters_by_loss() -> None:
    """With the means that the summary has, in the order of the losses."""
    table = many_rows()
    lines, means = trained_rules.adaptations(table), perft_summary.summary(table).sort_values("bits_per_byte")
    assert [line["bits_per_byte"].split(" ± ")[0] for line in lines] == [
        f"{mean:.4f}" for mean in means["bits_per_byte"]
    ]
    assert [line["params"] for line in lines] == [f"{params:,}" for params in means["params"]]
    assert trained_rules.adaptations(table.iloc[:0]) == []


@pytest.mark.slow
def test_figure_shows_means_with_intervals_against_both_counts(tmp_path: Path) -> None:
    """Raw loss in both panels; equal rows give equal files; it says when there is nothing to draw."""
    table = many_rows()
    panels = draw("perft", table)[0].axes
    assert [axes.get_xlabel() for axes in panels] == ["trainable parameters", "trainable parameters that a token meets"]
    for axes, column in zip(panels, ("params", "active_params"), strict=True):
        for variant, container in zip(("E", "S"), axes.containers, strict=True):
            last = table[(table["variant"] == variant) & (table["step"] == 9)]
            means = last.groupby(column)["bits_per_byte"].mean()
            line, _, (bars,) = container
            assert list(line.get_xdata()) == list(means.index)
            assert list(line.get_ydata()) == pytest.approx(list(means))
            half = stats.t.ppf(0.975, 2) * 0.1 / 3**0.5
            assert [end[1][1] - end[0][1] for end in bars.get_segments()] == pytest.approx([2 * half] * 3)
    for copy in "ab":
        paper.save(draw("perft", table)[0], tmp_path / f"{copy}.svg", tmp_path / f"{copy}.png")
    assert (tmp_path / "a.svg").read_bytes() == (tmp_path / "b.svg").read_bytes()
    for nothing in (table.iloc[:0], table.assign(purpose="pilot")):
        assert "no data" in draw("perft", nothing)[1]


def test_old_texts_count_by_their_bytes() -> None:
    """Of 100 bytes at 1 bit and 300 at 2, the mean is 1.75 bits."""
    old = {"a": SimpleNamespace(total=100, size=100, bits=1.0), "b": SimpleNamespace(total=300, size=300, bits=2.0)}
    new = SimpleNamespace(total=50, size=50, bits=3.0)
    run = SimpleNamespace(validation=new, old=old, _loss=lambda windows: windows.bits * math.log(2))
    fields = adapt.Adapting.evaluation(run)
    assert fields["old_bits_per_byte"] == pytest.approx(1.75) and fields["bits_per_byte"] == pytest.approx(3.0)
    assert fields["old_bits_per_byte_by_domain"] == pytest.approx([1.0, 2.0]) and fields["val_bytes"] == 50
