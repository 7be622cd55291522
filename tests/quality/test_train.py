"""Training runs: what they compute, and that one which was killed ends as if it had not been."""

import dataclasses
import importlib
import math
import os
import re
import statistics
import types
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from moe_routing_bench.grid.run_spec import DENSE, Run
from moe_routing_bench.quality import evaluate, language_model, loop, run_rows, steps, texts, timing, train
from moe_routing_bench.quality.expert_loads import Loads
from moe_routing_bench.store import paths
from moe_routing_bench.workload import trace
from moe_routing_kernels.errors import UserError
from moe_routing_kernels.formats.weights import WEIGHTS
from moe_routing_kernels.routers.zoo import ZOO

TIMES = {*run_rows.TIMING, "run_step_ms", "eval_seconds", "ended_at"}


@pytest.fixture
def run(text: str) -> Run:
    """Nine steps on 9 kB with an evaluation every three."""
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
        steps=9,
        warmup=2,
        eval_every=3,
        lr=1e-2,
        keep_weights=True,
    )


def kept(rows: list[dict]) -> list[dict]:
    """Rows without what differs from one call to the next."""
    return [{name: value for name, value in row.items() if name not in TIMES} for row in rows]


def weights(path: Path) -> dict[str, Tensor]:
    return torch.load(paths.weights_file(path), weights_only=True)["model"]


@pytest.mark.parametrize(
    ("router", "policy", "killed", "seconds", "again"),
    [
        ("softk", "random", 7, 1e9, 6),  # from the last evaluation
        ("softk", "random", 7, 0.0, 7),  # from any step
        ("quantile_balancing", "position", 1, 0.0, 1),
        ("noisy_topk", "position", 5, 0.0, 5),
        pytest.param("remoe", "position", 8, 0.0, 8, marks=pytest.mark.slow),
        pytest.param("deepseek_v3_small", "position", 3, 0.0, 3, marks=pytest.mark.slow),
    ],
)
def test_a_killed_run_ends_as_an_unbroken_one(
    run: Run,
    router: str,
    policy: str,
    killed: int,
    seconds: float,
    again: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Bit for bit, rows and weights; the second call does only the steps after the checkpoint."""
    run = dataclasses.replace(run, router=router, experts=8, drop_policy=policy, capacity_factor=1.0, altered=False)
    whole = train.train(run, tmp_path / "whole.parquet", "cpu")
    out, step, done = tmp_path / "broken.parquet", loop.Training.step, []

    def dies(self: loop.Training, number: int):
        if number == killed and killed not in done:
            done.append(number)
            raise KeyboardInterrupt
        done.append(number)
        return step(self, number)

    monkeypatch.setattr(loop, "SAVE_SECONDS", seconds)
    monkeypatch.setattr(loop.Training, "step", dies)
    with pytest.raises(KeyboardInterrupt):
        train.train(run, out, "cpu")
    assert not out.exists() and out.with_suffix(".ckpt").exists()
    torch.manual_seed(99)
    broken = train.train(run, out, "cpu")
    assert done == [*range(killed + 1), *range(again, 9)]
    assert kept(broken) == kept(whole) and run_rows.read(out).num_rows == 3
    first, second = weights(tmp_path / "whole.parquet"), weights(out)
    assert first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


def test_a_log_says_how_fast_a_run_goes_before_it_evaluates(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A line per step where every one is due, but for those that end in an evaluation; the seconds of all steps so far count."""
    monkeypatch.setattr(loop, "LINE_SECONDS", 0.0)
    monkeypatch.setattr(loop.time, "perf_counter", iter(range(10**6)).__next__)
    train.train(dataclasses.replace(run, steps=6, eval_every=3), tmp_path / "run.parquet", "cpu")
    found = re.findall(r"step (\d+)/6 (\d+) tokens/s$", capsys.readouterr().out, re.MULTILINE)
    assert [step for step, _ in found] == ["1", "2", "4", "5"]
    rates = [int(rate) for _, rate in found]
    assert rates[:2] == rates[2:] and rates[0] > rates[1] / 2 > 0


def test_training_learns_and_its_rows_are_right(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Loss falls; bits, perplexity, tokens and loads follow from each other; the file holds the spec."""
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    out = tmp_path / "run.parquet"
    rows = train.train(dataclasses.replace(run, steps=60, eval_every=20), out, "cpu")
    assert [row["step"] for row in rows] == [20, 40, 60] and rows[-1]["tokens_seen"] == 60 * 4 * 32
    assert rows[-1]["val_loss"] < rows[0]["val_loss"] < math.log(256) and rows[-1]["train_loss"] < 3.2
    row = rows[-1]
    assert (row["host"], row["slurm_job_id"]) == (os.uname().nodename, "7")
    assert row["bits_per_byte"] == pytest.approx(row["val_loss"] / math.log(2))
    assert row["perplexity"] == pytest.approx(math.exp(row["val_loss"]))
    assert row["epochs"] == pytest.approx(60 * 128 / 9000) and (row["train_bytes"], row["val_bytes"]) == (9000, 1000)
    for by_domain, by_class in zip(row["load_by_domain"], row["load_by_class"], strict=True):
        assert sum(map(sum, by_domain)) == sum(map(sum, by_class)) == 2 * 1000
    assert row["experts_per_token"] == 2 and 0 < row["gate_entropy"] <= math.log(4)
    assert row["router_grad_norm"] > 0 and row["router_loss"] == pytest.approx(0.02, rel=0.5)
    table = run_rows.read(out)
    assert run_rows.spec_of(table) == dataclasses.replace(run, steps=60, eval_every=20).spec
    assert train.Run.from_spec(run_rows.spec_of(table)).name == row["run"]


def test_routers_see_equal_bytes_and_start_equal(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the router, and the dense model too."""
    seen: dict[str, list[Tensor]] = {}
    take = steps.Windows.take
    for router in ("softk", "qwen3", "dense"):
        training = loop.Training(dataclasses.replace(run, router=router), "cpu")
        taken = seen.setdefault(router, [])
        monkeypatch.setattr(steps.Windows, "take", lambda self, n, b=taken: b.append(take(self, n)[0]) or take(self, n))
        training.step(0)
        training.step(1)
        taken.append(training.validation.tokens)
    assert all(torch.equal(a, b) for name in ("qwen3", "dense") for a, b in zip(seen["softk"], seen[name], strict=True))
    softk, qwen3 = (
        language_model.build(dataclasses.replace(run, router=name), [1] * 256).state_dict()
        for name in ("softk", "qwen3")
    )
    assert all(torch.equal(softk[name], qwen3[name]) for name in softk if "routers" not in name)


@pytest.mark.parametrize("router", importlib.import_module("moe_routing_kernels.routers.learned").ZOO)
def test_every_rule_trains(run: Run, router: str) -> None:
    """One step: finite losses and statistics, and other weights than before."""
    training = loop.Training(dataclasses.replace(run, router=router, experts=8), "cpu")
    before = [p.detach().clone() for p in training.model.layers[0].experts.parameters()]
    assert all(one.isfinite() for one in training.step(0)[:2])
    assert not any(
        torch.equal(a, b) for a, b in zip(before, training.model.layers[0].experts.parameters(), strict=True)
    )
    found = evaluate.evaluate(training.model, training.validation, 8)
    assert (
        4 < found["val_loss"] < 7 and 0 <= found["drop_rate"] < 1 and 0 <= found["gate_entropy"] <= math.log(8) + 1e-6
    )
    assert len(found["load_cv_by_layer"]) == len(training.model.routers)


def test_validation_loss_is_the_mean_over_all_bytes(run: Run) -> None:
    """Computed again one window at a time, without a batch or padding."""
    training = loop.Training(run, "cpu")
    (corpus,) = texts.load(run.corpora, run.validation_share)
    text = torch.cat([torch.tensor([steps.START]), torch.from_numpy(corpus.validation.copy()).long()])
    total = 0.0
    with torch.no_grad(), evaluate.evaluating(training.model), evaluate.without_capacity(training.model):
        for first in range(0, 1000, run.sequence):
            end = min(1000, first + run.sequence)
            logits = training.model(text[None, first:end])[0]
            total += float(F.cross_entropy(logits, text[first + 1 : end + 1], reduction="sum"))
    with evaluate.without_capacity(training.model):
        loss, _ = evaluate.loss_of(training.model, training.validation, 5)
    assert loss == pytest.approx(total / 1000, rel=1e-5)


def test_a_capacity_costs_and_evaluation_knows_both(run: Run) -> None:
    """Half a capacity drops at least half of the choices (the last batch is padded); the loss without it is another."""
    training = loop.Training(dataclasses.replace(run, capacity_factor=0.5), "cpu")
    found = evaluate.evaluate(training.model, training.validation, 4)
    assert found["drop_rate"] > 0.48 and 0 < found["token_drop_rate"] <= found["drop_rate"]
    assert found["val_loss"] != found["val_loss_with_capacity"]
    assert training.model.layers[0].capacity_factor == 0.5 and training.model.training
    assert found["drop_rate_by_factor"] == sorted(found["drop_rate_by_factor"], reverse=True)
    one = dataclasses.replace(run, layers=1, capacity_factor=1.25)  # later layers would see what the first one left
    limited = evaluate.evaluate(loop.Training(one, "cpu").model, training.validation, 4)
    at = limited["capacity_factors"].index(1.25)
    assert limited["drop_rate_by_factor"][at] == pytest.approx(limited["drop_rate"]) and 0 < limited["drop_rate"] < 1
    free = evaluate.evaluate(
        loop.Training(dataclasses.replace(run, capacity_factor=None), "cpu").model, training.validation, 4
    )
    assert free["drop_rate"] == 0 and free["val_loss"] == free["val_loss_with_capacity"] == found["val_loss"]


def test_the_last_evaluation_alters_the_experts_and_the_capacity_and_leaves_the_model_alone(run: Run) -> None:
    """Fewer bits cost more; the codes are those of each expert's columns; and no capacity is what evaluation without one says."""
    training = loop.Training(dataclasses.replace(run, router="softk", capacity_factor=1.5, steps=30), "cpu")
    for number in range(30):
        training.step(number)
    before = {name: one.clone() for name, one in training.model.state_dict().items()}
    found = evaluate.altered_fields(training.model, training.validation, 4)
    after = training.model.state_dict()
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert training.model.layers[0].capacity_factor == 1.5 and training.model.training
    whole = evaluate.evaluate(training.model, training.validation, 4)
    formats, capacities = found["bits_by_format"], found["bits_by_capacity"]
    assert formats is not None and list(formats) == list(evaluate.FORMATS)
    lost = {name: abs(bits - whole["bits_per_byte"]) for name, bits in formats.items()}
    assert 0 < lost["int8_g128"] < 1e-3 and lost["int8_g128"] < lost["int4_g128"] < lost["int2_g128"]
    assert capacities is not None and capacities["1.5"] == evaluate.bits(
        whole["val_loss_with_capacity"], training.validation
    )
    with evaluate.quantised(training.model, WEIGHTS["int4_g128"]) as done:
        weight = training.model.layers[1].experts.w13_EDH
        column = weight[2, :, 5]  # its 16 elements are one group: at most 16 levels, of a step that divides them
        assert done and column.unique().numel() > 3
        (trained,) = [one for name, one in before.items() if name == "blocks.1.ffn.experts.w13_EDH"]
        steps = column / (2 * trained[2, :, 5].abs().max() / 15)
        assert torch.allclose(steps, steps.round(), atol=1e-4)


def test_experts_whose_codes_fill_no_bytes_are_left_out(run: Run) -> None:
    """Of a width of 18 elements those of 8 bits and of 4 do, of 2 bits they do not; a dense model has no experts."""
    odd = loop.Training(dataclasses.replace(run, dim=18, heads=1, expert_hidden=18), "cpu")
    formats = evaluate.altered_fields(odd.model, odd.validation, 4)["bits_by_format"]
    assert formats is not None and set(evaluate.FORMATS) - formats.keys() == {"int2_g128", "int2z_g128"}
    dense = loop.Training(dataclasses.replace(run, router="dense"), "cpu")
    assert set(evaluate.altered_fields(dense.model, dense.validation, 4).values()) == {None}


def test_only_the_last_row_of_a_final_run_is_altered(run: Run, tmp_path: Path) -> None:
    rows = train.train(dataclasses.replace(run, keep_weights=False), tmp_path / "run.parquet", "cpu")
    stored = run_rows.read(tmp_path / "run.parquet").to_pylist()
    assert [row["bits_by_format"] is None for row in stored] == [True, True, False]
    assert dict(stored[-1]["bits_by_format"]) == rows[-1]["bits_by_format"]
    assert (
        "bits_by_capacity"
        not in train.train(dataclasses.replace(run, purpose="pilot"), tmp_path / "p.parquet", "cpu")[-1]
    )


def test_the_model_is_causal_but_for_what_a_capacity_does(run: Run) -> None:
    """A later byte changes no earlier logit; an earlier one changes later ones."""
    one = language_model.build(run, [1] * 256).eval()
    ids = torch.randint(256, (2, 32), generator=torch.Generator().manual_seed(0))
    other = ids.clone()
    other[:, 20] = (other[:, 20] + 1) % 256
    with torch.no_grad(), evaluate.without_capacity(one):
        before, after = one(ids), one(other)
    torch.testing.assert_close(before[:, :20], after[:, :20])
    assert not torch.allclose(before[:, 21:], after[:, 21:], atol=1e-6)


@pytest.mark.parametrize("match", ["active_flops", "parameters"])
def test_the_dense_model_is_equal_in_what_it_should_be(run: Run, match: str) -> None:
    """But for the routers."""
    dense = language_model.build(dataclasses.replace(run, router="dense", match=match), [])
    routed = language_model.build(run, [1] * 256)
    routers = sum(p.numel() for router in routed.routers for p in router.parameters())
    total, active = (value - routers for value in language_model.parameters(routed))
    assert (
        language_model.parameters(dense)[0]
        == language_model.parameters(dense)[1]
        == (active if match == "active_flops" else total)
    )
    assert language_model.flops_per_token(dense, run, 1000) == 6 * (1000 - 256 * 16) + 6 * 2 * 32 * 16


def test_a_dense_run_has_no_routing_columns(run: Run, tmp_path: Path) -> None:
    """And is causal."""
    row = train.train(dataclasses.replace(run, router="dense"), tmp_path / "dense.parquet", "cpu")[-1]
    stored = run_rows.last(tmp_path / "dense.parquet")
    assert (
        row["causal"]
        and not row["learns"]
        and stored["load_cv"] is stored["router_grad_norm"] is stored["drop_rate"] is None
    )


def test_no_more_than_so_many_epochs(run: Run) -> None:
    """The message says how many steps there may be."""
    with pytest.raises(UserError, match=r"steps: got 300; allowed: at most 281: 4 epochs of 9000 tokens"):
        loop.Training(dataclasses.replace(run, steps=300), "cpu")


def test_no_two_steps_of_any_seeds_draw_the_same(run: Run) -> None:
    """A step's draws depend on the seed and on its number alone, so that a resumed run draws as one that was not stopped."""
    draws = {}
    for seed in (3, 4, 5):
        training = loop.Training(dataclasses.replace(run, seed=seed), "cpu")
        for number in (2, 0, 1, 0):
            training.begin(number)
            drawn = tuple(torch.rand(4).tolist())
            assert draws.setdefault((seed, number), drawn) == drawn
    assert len(draws) == len(set(draws.values())) == 9


def test_learning_rate_warms_up_and_falls_to_a_tenth() -> None:
    """Linearly, then along a cosine."""
    one = Run(steps=100, warmup=10, lr=1.0)
    assert steps.learning_rate(one, 0) == pytest.approx(0.1) and steps.learning_rate(one, 9) == pytest.approx(1)
    assert steps.learning_rate(one, 55) == pytest.approx(0.55) and steps.learning_rate(one, 99) == pytest.approx(
        0.1, abs=0.01
    )


def test_trace_is_what_the_benches_replay(run: Run, tmp_path: Path) -> None:
    """Of the middle layer, k ids a token."""
    out = tmp_path / "runs/run.parquet"
    train.train(dataclasses.replace(run, trace_tokens=300), out, "cpu")
    ids = trace.read(tmp_path / "traces/run.parquet", 300, 4, 2)
    assert ids.shape == (300, 2) and len(set(ids.ravel().tolist())) > 1
    assert (
        evaluate.routing_ids(loop.Training(run, "cpu").model, loop.Training(run, "cpu").validation, 4, 5000, 0)[0]
        is None
    )


def test_a_trace_is_of_windows_from_all_parts_of_the_text(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    training = loop.Training(run, "cpu")
    windows, take = training.validation, steps.Windows.take
    taken: list[int] = []
    monkeypatch.setattr(steps.Windows, "take", lambda self, numbers: taken.extend(numbers) or take(self, numbers))
    ids, _ = evaluate.routing_ids(training.model, windows, 2, 5 * run.sequence, 0)
    full = (windows.lengths == run.sequence).nonzero()[0].tolist()
    assert ids is not None and len(ids) == 5 * run.sequence and len(full) >= 10
    assert [-(-full.index(number) * 5 // len(full)) for number in taken] == [0, 1, 2, 3, 4]


def test_timing_runs_from_the_last_weights(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Stages sum to the whole step, and evaluation is in none of them."""
    monkeypatch.setattr(timing, "WARMUP", 1)
    monkeypatch.setattr(timing, "PROFILED", 2)
    train.train(run, tmp_path / "run.parquet", "cpu")
    monkeypatch.setattr(evaluate, "evaluate", None)
    row = timing.measure(run, tmp_path / "run.parquet", tmp_path / "timing.parquet", "cpu")
    assert sum(row[name] for name in run_rows.STAGES) == pytest.approx(row["step_ms"])
    assert all(row[name] > 0 for name in run_rows.STAGES) and row["timed_alone"]
    assert row["step_half_width_ms"] > 0 and row["step_mode"] == "eager" and row["eager_step_ms"] == row["step_ms"]
    assert row["train_tokens_per_s"] == pytest.approx(128 / row["step_ms"] * 1e3)


def test_stages_of_a_step_are_medians_of_the_profiled_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """One of them is held up, be it the first; blocks have steps without marks."""
    profiles = iter([90.0, 1.0, 2.0, 3.0, 4.0])

    def timed(training, steps, count, clock=None):
        return dict.fromkeys(timing.STAGES, next(profiles)) if clock else {"rest": 50.0}

    monkeypatch.setattr(timing, "_timed", timed)
    monkeypatch.setattr(timing, "PROFILED", 5)
    idle = types.SimpleNamespace(device="cpu", step=lambda step: None, model=types.SimpleNamespace(ffns=[]))
    blocks, stages = timing._eager(idle, iter(range(100)))
    assert stages == dict.fromkeys(timing.STAGES, 3.0) and set(blocks) == {50.0 / timing.BLOCK}


def test_speed_leaves_evaluation_out(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The predecessor's defects 1 and 2: the interval of evaluation neither counts nor is counted."""
    import time

    begin, slept, evaluated = time.perf_counter(), [], evaluate.evaluate

    def slower(*arguments):
        slept.append(time.perf_counter() - begin)  # as long as all steps before took, however busy the machine is
        time.sleep(slept[-1])
        return evaluated(*arguments)

    monkeypatch.setattr(evaluate, "evaluate", slower)
    (row,) = train.train(dataclasses.replace(run, eval_every=9), tmp_path / "run.parquet", "cpu")
    assert row["step_ms"] * 9 < 1e3 * sum(slept) < 1e3 * row["eval_seconds"]
    assert row["train_tokens_per_s"] == pytest.approx(128 / row["step_ms"] * 1e3)


class NeverAsks(TorchDispatchMode):
    """Raises where an operation's shape or control flow depends on values, for which a GPU would make the host wait."""

    ASKING = frozenset(
        {
            "_local_scalar_dense",
            "nonzero",
            "masked_select",
            "bincount",
            "unique_dim",
            "_unique2",
            "equal",
            "is_nonzero",
            "lift_fresh",
        }
    )

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.__name__.split(".")[0]
        assert name not in self.ASKING, f"{name} waits for the host"
        assert not (
            name in ("index", "index_put_") and any(one is not None and one.dtype == torch.bool for one in args[1])
        )
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    ("router", "policy"), [*((one, "position") for one in (DENSE, *ZOO)), ("softk", "random"), ("softk", "score")]
)
def test_a_step_can_be_captured(router: str, policy: str, run: Run) -> None:
    """Forwards, backwards and the routers' own updates ask nothing of the host: such a step fits in a CUDA graph."""
    top_k = 2 if router == DENSE else ZOO[router].top_k or 2
    run = dataclasses.replace(run, router=router, experts=8, top_k=top_k, drop_policy=policy)
    training = loop.Training(run, "cpu")
    inputs, targets = training.begin(0)
    with NeverAsks():
        loss = F.cross_entropy(training.model(inputs).flatten(0, 1), targets.flatten(), ignore_index=steps.IGNORED)
        (loss + training.model.router_loss()).backward()
        for one in training.model.routers:
            one.after_step()


def test_what_asks_the_host_is_seen() -> None:
    with NeverAsks(), pytest.raises(AssertionError, match="waits for the host"):
        torch.ones(3).sum().item()
    with NeverAsks(), pytest.raises(AssertionError, match="waits for the host"):
        torch.ones(3)[1] = 2.0  # a number given to an element is copied to the GPU


def test_what_is_said_of_routing_follows_from_the_sums() -> None:
    """Two layers of 4 experts and 10 tokens; drops are of the pass with a capacity."""

    def load(by_domain: list[list[float]], entropy: float, **more: float) -> Loads:
        sums = Loads.empty(2, 4, "cpu")
        known = {"by_domain": by_domain, "entropy": entropy, "over": [1.0] * len(evaluate.CAPACITY_FACTORS), **more}
        return dataclasses.replace(sums, **{name: torch.tensor(one).double() for name, one in known.items()})

    first = load([[4.0, 2.0, 1.0, 0.0], [4.0, 4.0, 0.0, 1.0]], 6.0, chosen=10.0)
    second = load([[4.0, 0.0, 4.0, 0.0], [0.0, 4.0, 0.0, 4.0]], 2.0, chosen=10.0)
    drops = [load([[5.0, 5.0, 0.0, 0.0], [0.0, 5.0, 5.0, 0.0]], 0.0, dropped=4.0, lost=1.0, chosen=8.0)] * 2
    model = types.SimpleNamespace(layers=[None, None])
    found = evaluate._routing_fields(model, [first, second], drops, 10)
    spread = statistics.pstdev([8, 6, 1, 1]) / 4
    assert found["load_cv_by_layer"] == pytest.approx([spread, 0]) and found["load_cv"] == pytest.approx(spread / 2)
    assert found["max_violation_by_layer"] == pytest.approx([1.0, 0.0])
    assert found["dead_experts"] == 0 and found["gate_entropy"] == pytest.approx(8 / 2 / 10)
    assert found["experts_per_token"] == pytest.approx(32 / 2 / 10)
    single = evaluate._routing_fields(types.SimpleNamespace(layers=[None]), [first, second], drops, 10)
    assert single["experts_per_token"] == pytest.approx(32 / 10), "by layers of the model"
    soft = [dataclasses.replace(one, chosen=torch.tensor(0.0).double()) for one in (first, second)]
    asked = evaluate._routing_fields(model, soft, drops, 10)
    assert asked["experts_per_token"] is None and asked["drop_rate_by_factor"] is None, (
        "soft routing asks for no expert"
    )
    assert found["drop_rate"] == pytest.approx(8 / 40) and found["token_drop_rate"] == pytest.approx(2 / 16)
    assert found["drop_rate_by_factor"] == pytest.approx([2 / 32] * len(evaluate.CAPACITY_FACTORS))
