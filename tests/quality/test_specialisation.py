"""Learning to specialise: the measure on loads that are known, and what the train modes freeze."""

import dataclasses
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch

from moe_routing_bench.figures import expert_domains
from moe_routing_bench.grid.run_spec import Run
from moe_routing_bench.quality import loop, run_rows, specialisation, train
from moe_routing_bench.store import paths

FIXED = {
    "label": "e",
    "config_hash": "c",
    "purpose": "final",
    "network": "linear",
    "capacity_factor": 1.25,
    "drop_policy": "position",
    "router": "softk",
    "step": 1,
}


@pytest.fixture
def run(text: str) -> Run:
    """Six steps with an evaluation every two."""
    return Run(
        seed=3,
        experts=4,
        dim=16,
        heads=2,
        layers=2,
        expert_hidden=16,
        corpora={text: None},
        sequence=32,
        batch=4,
        steps=6,
        warmup=2,
        eval_every=2,
        lr=1e-2,
        keep_weights=True,
    )


def test_experts_of_one_domain_each_tell_the_domain() -> None:
    """All of its entropy, whatever the sizes of the domains and however many experts share one."""
    assert specialisation.mutual_information(np.eye(4) * 1e6) == pytest.approx(2, abs=1e-5)
    shared = [[5e5, 5e5, 0], [0, 0, 3e6]]
    assert specialisation.mutual_information(shared) == pytest.approx(specialisation.entropy([1, 3]), abs=1e-5)


def test_experts_that_know_no_domain_tell_nothing() -> None:
    """However unequal the experts' loads are; an expert or a domain without choices changes nothing."""
    assert specialisation.mutual_information(np.outer([1e6, 3e6], [1, 5, 2])) == pytest.approx(0, abs=1e-5)
    assert specialisation.mutual_information(np.outer([1e6, 0], [1, 5, 2])) == pytest.approx(0, abs=1e-12)
    assert np.isnan(specialisation.mutual_information(np.zeros((2, 3))))


def test_half_of_the_choices_know_the_domain() -> None:
    """Joint shares 3/8 and 1/8: 1 - H(1/4) bits."""
    exact = 1 - specialisation.entropy([1, 3])
    assert specialisation.mutual_information(np.array([[3, 1], [1, 3]]) * 1e6) == pytest.approx(exact, abs=1e-6)


def test_finite_counts_have_no_bias() -> None:
    """The mean over independent draws of few choices is nothing, as that of counts with shuffled domains; without the
    correction it is not."""
    draw = np.random.default_rng(0)
    shares = np.outer([0.2, 0.8], [0.1, 0.2, 0.3, 0.4]).ravel()
    counts = draw.multinomial(500, shares, size=2000).reshape(-1, 2, 4)
    found = np.array([specialisation.mutual_information(one) for one in counts])
    error = found.std() / np.sqrt(len(found))
    assert abs(found.mean()) < 4 * error and 3 / (2 * 500 * np.log(2)) > 20 * error


def test_summary_is_by_train_mode_and_seed() -> None:
    """Mean over layers, then over seeds, of the last evaluation; the dense model has no experts."""
    apart, alike = np.eye(2) * 1e9, np.ones((2, 2)) * 1e9
    loads = {"joint": [apart, alike], "frozen_router": [alike, alike]}
    rows = [
        FIXED
        | {
            "run": f"{mode}{seed}",
            "train_mode": mode,
            "seed": seed,
            "bits_per_byte": 2.0 + seed,
            "load_by_domain": layers,
        }
        for mode, layers in loads.items()
        for seed in (0, 1)
    ]
    rows.append(rows[0] | {"step": 0, "load_by_domain": [alike, apart * 0 + 1]})
    rows.append(rows[0] | {"run": "dense", "router": "dense", "load_by_domain": None})
    found = specialisation.summary(pd.DataFrame(rows)).set_index("contestant")
    assert list(found.index) == ["softk joint", "softk frozen_router"] and set(found["seeds"]) == {2}
    assert found["expert_domain_bits"].to_list() == pytest.approx([0.5, 0], abs=1e-6)
    assert found["domain_bits"].to_list() == pytest.approx([1, 1]) and found["bits_per_byte"].to_list() == [2.5, 2.5]
    assert found["expert_domain_bits_half_width"].to_list() == pytest.approx([0, 0], abs=1e-6)
    assert specialisation.text(pd.DataFrame(rows)).count("\n") == 4


def of(state: dict, part: str) -> dict:
    """The tensors of routers, of experts, or of everything else."""
    kind = {name: "routers" if ".routers." in name else "experts" if ".ffn." in name else "rest" for name in state}
    return {name: value.clone() for name, value in state.items() if kind[name] == part}


@pytest.mark.parametrize("router", ["softk", "deepseek_v3_small", "noisy_topk", "moepp"])
@pytest.mark.parametrize("mode", ["joint", "frozen_router", "experts_first"])
def test_each_mode_trains_what_it_says(run: Run, mode: str, router: str) -> None:
    """Bit for bit, state without a gradient too: routers, experts and the rest in each half of the steps."""
    training = loop.Training(dataclasses.replace(run, train_mode=mode, router=router, experts=8), "cpu")
    learns = {"joint": {"routers", "experts"}, "frozen_router": {"experts"}}
    halves = [learns.get(mode, {"experts"}), learns.get(mode, {"routers"})]
    for steps, expected in zip((range(3), range(3, 6)), halves, strict=True):
        before = {part: of(training.model.state_dict(), part) for part in ("routers", "experts", "rest")}
        for number in steps:
            training.step(number)
        for part, values in before.items():
            after = of(training.model.state_dict(), part)
            same = {name for name, value in values.items() if torch.equal(value, after[name])}
            if part in {*expected, "rest"}:
                assert not {name for name in same if not name.endswith(".load")}, part  # emptied after each step
            else:
                assert same == set(values), part


def test_a_killed_run_of_two_phases_ends_as_an_unbroken_one(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed in the second phase: what is frozen is a function of the step, and the optimizer's state comes back."""
    run = dataclasses.replace(run, train_mode="experts_first")
    whole = train.train(run, tmp_path / "whole.parquet", "cpu")
    step = loop.Training.step

    def dies(self: loop.Training, number: int):
        if number == 5:
            raise KeyboardInterrupt
        return step(self, number)

    monkeypatch.setattr(loop.Training, "step", dies)
    with pytest.raises(KeyboardInterrupt):
        train.train(run, tmp_path / "broken.parquet", "cpu")
    monkeypatch.setattr(loop.Training, "step", step)
    broken = train.train(run, tmp_path / "broken.parquet", "cpu")
    assert [row["val_loss"] for row in broken] == [row["val_loss"] for row in whole]
    first, second = (
        torch.load(paths.weights_file(tmp_path / f"{name}.parquet"), weights_only=True)["model"]
        for name in ("whole", "broken")
    )
    assert all(torch.equal(first[name], second[name]) for name in first)
    stored = run_rows.read(tmp_path / "broken.parquet")
    assert set(stored["train_mode"].to_pylist()) == {"experts_first"} and "experts_first" in stored["run"][0].as_py()


def test_how_often_a_domain_takes_an_expert_is_relative_to_all_choices() -> None:
    """Not to the mean over domains, of which one has three times as many; an expert without tokens has 1."""
    found = expert_domains.times_average(np.array([[2.0, 0.0, 0.0], [1.0, 5.0, 0.0]]))
    assert found == pytest.approx(np.array([[8 / 3, 0, 1], [4 / 9, 4 / 3, 1]]))
