"""A step in the form that a CUDA graph captures does what a step from Python does, and so do the operators and the compiled parts.

There is no GPU here: `Recorded` stands for a graph. It records the operations of one call with their tensors, and a replay does
them again on these, without Python between them, as a graph does."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from campaign import CAMPAIGN
from moe_routing_bench.grid.run_spec import DENSE, Run
from moe_routing_bench.quality import engine, evaluate, language_model, loop, steps
from moe_routing_bench.quality.engine import Engine
from moe_routing_bench.quality.expert_loads import drop_rate
from moe_routing_kernels.errors import UserError
from moe_routing_kernels.routers.zoo import ZOO

STATEFUL = ("softk", "noisy_topk", "quantile_balancing")
# One rule per kind of choice: biases that learn, ids of the text, experts that choose, any number of experts, assignments, two rounds.
KINDS = (
    "loss_free_bias",
    "hash_random",
    "expert_choice",
    "top_p",
    "base",
    "null_experts",
    "chain_of_experts",
    "soft_moe",
)
MARKS = dict.fromkeys((DENSE, *STATEFUL), ()) | dict.fromkeys(KINDS, pytest.mark.slow)
QUICK = [pytest.param(rule, marks=MARKS.get(rule, CAMPAIGN)) for rule in (DENSE, *ZOO)]


@pytest.fixture
def run(shared_text: str) -> Run:
    """Twelve steps of a tiny model that drops some choices."""
    return Run(
        seed=3,
        experts=8,
        dim=16,
        heads=2,
        layers=2,
        expert_hidden=16,
        capacity_factor=1.0,
        corpora={shared_text: None},
        sequence=32,
        batch=4,
        steps=12,
        warmup=2,
        lr=1e-2,
    )


def of(run: Run, router: str, **change: Any) -> Run:
    top_k = 2 if router == DENSE else ZOO[router].top_k or 2
    return dataclasses.replace(run, router=router, top_k=top_k, **change)


class Recorded(TorchDispatchMode):
    """The operations of a call, as a graph has them: each with the tensors that it read and wrote."""

    def __init__(self) -> None:
        super().__init__()
        self.log: list[tuple[Any, tuple, dict, Any]] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        outputs = func(*args, **(kwargs or {}))
        self.log.append((func, args, kwargs or {}, outputs))
        return outputs

    @torch.no_grad()
    def replay(self) -> None:
        for func, args, kwargs, outputs in self.log:
            for kept, new in zip(tree_leaves(outputs), tree_leaves(func(*args, **kwargs)), strict=True):
                if isinstance(kept, Tensor) and kept.data_ptr() != new.data_ptr():
                    kept.copy_(new)


def recording(training: loop.Training) -> engine.Capture:
    """A capture: it leaves the state of the training as it was, which a true one never changes."""

    def tensors() -> list[Tensor]:
        return [x for x in tree_leaves(training.state()) if isinstance(x, Tensor)]

    def capture(function: Callable[[], engine.Outputs]) -> Callable[[], engine.Outputs]:
        before = [x.clone() for x in tensors()]
        with torch.random.fork_rng(devices=[]), Recorded() as graph:
            outputs = function()
        for x, value in zip(tensors(), before, strict=True):
            x.copy_(value)

        def replay() -> engine.Outputs:
            graph.replay()
            return tuple(output.clone() for output in outputs)

        return replay

    return capture


def built(run: Run, replayed: bool) -> loop.Training:
    """A training whose optimizer keeps its state in tensors, as that of a GPU does."""
    training = loop.Training(run, "cpu")
    for group in training.optimizer.param_groups:
        group["fused"] = True
    training.steps.capture = recording(training) if replayed else None
    return training


def same(one: loop.Training, other: loop.Training) -> bool:
    first, second = (tree_leaves(training.state()) for training in (one, other))
    return all(torch.equal(a, b) if isinstance(a, Tensor) else a == b for a, b in zip(first, second, strict=True))


@pytest.mark.parametrize("router", QUICK)
def test_a_replayed_step_does_what_an_eager_one_does(run: Run, router: str) -> None:
    """Bit for bit for each rule: losses, drops, weights, moments and what the routers learn; also with an evaluation in between."""
    run = of(run, router)
    eager, replayed = built(run, False), built(run, True)
    for number in range(7):
        assert all(map(torch.equal, eager.step(number)[:2], replayed.step(number)[:2])), number
        assert drop_rate(eager.model) == drop_rate(replayed.model)
        if number == 5:
            for training in (eager, replayed):
                evaluate.evaluate(training.model, training.validation, 8)
    assert replayed.steps.replay is not None and eager.steps.replay is None
    assert same(eager, replayed)


def test_what_learns_is_captured_anew_when_it_changes(run: Run) -> None:
    """Experts learn first, then the routers."""
    run = of(run, "softk", train_mode="experts_first")
    eager, replayed = built(run, False), built(run, True)
    graphs = []
    for number in range(run.steps):
        eager.step(number)
        replayed.step(number)
        graphs.append(replayed.steps.replay)
    assert graphs[5] is not None and graphs[6] is None and graphs[11] not in (None, graphs[5])
    assert same(eager, replayed)


def test_what_cannot_be_captured_is_launched_from_python(run: Run) -> None:
    """With the numbers of a training that was never to be captured; the rows say why."""
    run = of(run, "noisy_topk")
    eager, failing = built(run, False), built(run, True)

    def fails(function: Callable[[], engine.Outputs]) -> Callable[[], engine.Outputs]:
        torch.rand(3)
        raise RuntimeError("an operation is not permitted\nwhen the stream is capturing")

    failing.steps.capture = fails
    assert failing.steps.mode == "cuda_graph"
    for number in range(6):
        assert torch.equal(eager.step(number)[0], failing.step(number)[0])
    assert failing.steps.mode == "eager: no CUDA graph, an operation is not permitted" and eager.steps.mode == "eager"
    assert same(eager, failing)


@pytest.mark.parametrize("router", [DENSE, *STATEFUL])
def test_the_numbers_are_those_of_a_plain_loop(run: Run, router: str) -> None:
    """With a number for the learning rate and logits in one piece, as training was before it could be captured: bit for bit."""
    run = of(run, router)
    training, plain = loop.Training(run, "cpu"), loop.Training(run, "cpu")
    groups = [{name: group[name] for name in ("params", "weight_decay")} for group in plain.optimizer.param_groups]
    optimizer = torch.optim.AdamW(groups, lr=0.0, betas=loop.BETAS)
    for number in range(6):
        loss = training.step(number)[0]
        inputs, targets = plain.begin(number)
        for group in optimizer.param_groups:
            group["lr"] = steps.learning_rate(run, number)
        wanted = F.cross_entropy(plain.model(inputs).flatten(0, 1), targets.flatten(), ignore_index=steps.IGNORED)
        optimizer.zero_grad()
        (wanted + plain.model.router_loss()).backward()
        torch.nn.utils.clip_grad_norm_(plain.model.parameters(), run.clip)
        optimizer.step()
        for one in plain.model.routers:
            one.after_step()  # type: ignore[operator]
        assert torch.equal(loss, wanted.detach())
    state = plain.model.state_dict()
    assert all(torch.equal(value, state[name]) for name, value in training.model.state_dict().items())


@pytest.mark.parametrize("router", ["softk", "gshard_top2", "remoe", "null_experts", "moepp", "expert_choice"])
@pytest.mark.parametrize(("factor", "policy"), [(None, "position"), (1.0, "position"), (1.0, "score")])
def test_operators_compute_what_torch_does(run: Run, router: str, factor: float | None, policy: str) -> None:
    """Logits, kept choices and the gradient of each weight, whatever seats the choices."""
    run = of(run, router, capacity_factor=factor, drop_policy=policy)
    found = []
    for operators in (False, True):
        training = loop.Training(run, "cpu", Engine(operators=operators))
        inputs, targets = training.begin(0)
        logits = training.model(inputs)
        F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=steps.IGNORED).backward()
        gradients = {name: p.grad for name, p in training.model.named_parameters() if p.grad is not None}
        found.append((logits.detach(), drop_rate(training.model), gradients))
    (logits, drops, gradients), (by_operators, their_drops, theirs) = found
    torch.testing.assert_close(by_operators, logits, rtol=1e-4, atol=1e-5)
    assert drops == their_drops and gradients.keys() == theirs.keys()
    for name, gradient in gradients.items():
        torch.testing.assert_close(theirs[name], gradient, rtol=1e-3, atol=1e-6, msg=name)


@pytest.mark.slow
def test_the_compiled_parts_are_whole(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """Attention and the head with its loss are traced without a break, and the rest is as it was."""
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="aot_eager", fullgraph=True))
    plain, compiled = loop.Training(run, "cpu"), loop.Training(run, "cpu", Engine(compiled=True))
    assert compiled.model.attend is not language_model.TinyLM.attend
    for number in range(3):
        torch.testing.assert_close(compiled.step(number)[0], plain.step(number)[0], rtol=1e-4, atol=1e-5)


def test_an_engine_is_named_by_its_parts() -> None:
    assert Engine.of("cuda").name == "graph,operators,compiled" and Engine.of("cpu").name == "eager"
    assert Engine.of("cuda", "operators") == Engine(operators=True) and Engine.of("cuda", "eager") == Engine()
    with pytest.raises(UserError, match="engine: got 'graphs'"):
        Engine.of("cuda", "graphs")
