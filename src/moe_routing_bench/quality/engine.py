"""How training steps run: launched from Python one by one, or replayed as a captured CUDA graph; and what of the model is compiled.

A graph is a sequence of launches with fixed addresses. So everything that changes from step to step is in tensors that the host
fills before it: inputs, targets and the learning rate; and random numbers come from the device's default generator, whose seed a
replay reads. What the host decides by itself is part of `Steps.key`, and captured anew where it changes.
"""

import contextlib
import functools
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any, Protocol

import torch
from torch import Tensor

from moe_routing_bench.grid.run_spec import Run
from moe_routing_bench.quality import run_rows, steps
from moe_routing_bench.quality.language_model import TinyLM
from moe_routing_kernels.errors import pick

WARMUP = (
    3  # steps that are launched from Python before a capture: they compile kernels and allocate the optimiser's state
)
EAGER, GRAPH = run_rows.EAGER, run_rows.GRAPH
Outputs = tuple[Tensor, ...]
Capture = Callable[[Callable[[], Outputs]], Callable[[], Outputs]]


@dataclass(frozen=True)
class Engine:
    """What a training uses. Without all three it computes what a CPU does, operation by operation."""

    graph: bool = False  # steps are replayed as a CUDA graph
    operators: bool = False  # experts by the operators of `moe_routing_kernels.ops`
    compiled: bool = False  # attention, and the head with its loss, by torch.compile

    @staticmethod
    def of(device: str, words: str | None = None) -> "Engine":
        """That of a text such as "graph,operators", or "eager" for none; by default all on a GPU, none on a CPU.

        Raises `UserError` for an unknown word.
        """
        known = [item.name for item in fields(Engine)]
        if words is None:
            return Engine(*[device == "cuda"] * len(known))
        chosen = {pick("engine", word, [*known, EAGER]) for word in words.split(",")}
        return Engine(**{name: name in chosen for name in known})

    @property
    def name(self) -> str:
        """As `of` takes it."""
        return ",".join(item.name for item in fields(self) if getattr(self, item.name)) or EAGER

    def prepare(self, model: TinyLM) -> None:
        """Make a model use its operators and its compiled parts."""
        for layer in model.layers:
            layer.operators = self.operators
        if self.compiled:
            model.attend = _compiled(model.attend)
            model.loss = _compiled(model.loss)


def _compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """Compiled for these shapes where gradients are wanted; evaluation, which has other shapes, stays as it is."""
    quick = torch.compile(function, dynamic=False)

    @functools.wraps(function)
    def either(*arguments: Any) -> Any:
        return quick(*arguments) if torch.is_grad_enabled() else function(*arguments)

    return either


def stream(device: str) -> contextlib.AbstractContextManager[Any]:
    """The stream that a training is built and run on: a gradient that was ever accumulated on another one breaks a capture."""
    return torch.cuda.stream(torch.cuda.Stream()) if device == "cuda" else contextlib.nullcontext()


def captured(function: Callable[[], Outputs]) -> Callable[[], Outputs]:
    """A function that replays the launches of another, captured on the current stream, and returns copies of its outputs.

    Raises RuntimeError where something cannot be captured; stream and random numbers are then as before.
    """
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.current_stream()
    try:
        with torch.cuda.graph(graph, stream=stream):
            outputs = function()
    except RuntimeError:  # after which torch (2.11) would draw no more: its generator is still being captured
        torch.cuda.set_stream(stream)
        generator = torch.cuda.default_generators[torch.cuda.current_device()]
        generator.graphsafe_set_state(torch.Generator("cuda").manual_seed(generator.initial_seed()))
        raise

    def replay() -> Outputs:
        graph.replay()
        return tuple(output.clone() for output in outputs)

    return replay


class Learner(Protocol):
    """A training, as far as its steps go."""

    @property
    def run(self) -> Run:
        """What is trained."""
        ...

    @property
    def model(self) -> TinyLM:
        """The model."""
        ...

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """The optimizer."""
        ...

    def begin(self, number: int) -> tuple[Tensor, Tensor]:
        """The host's part of a step; returns what the device's part is given."""
        ...

    def learn(self, inputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The device's part of a step."""
        ...


class Steps:
    """Does the steps of a training; the first few of each key are launched from Python, later ones are replayed if there is a `capture`."""

    def __init__(self, training: Learner, capture: Capture | None) -> None:
        """`capture` turns a function into one that replays it; None: every step is launched from Python."""
        self.training, self.capture = training, capture
        self.key: object = None
        self.launched = 0  # steps since the key changed
        self.batch: tuple[Tensor, Tensor] | None = None
        self.replay: Callable[[], Outputs] | None = None
        self.decided: list[tuple[Any, Any, Any]] = []
        self.problem = ""

    @property
    def mode(self) -> str:
        """How steps run, as rows have it: replayed as a graph, or from Python, and then why, where they were to be replayed."""
        if self.problem:
            return f"{EAGER}: no CUDA graph, {self.problem}"
        return GRAPH if self.capture else EAGER

    def step(self, number: int) -> Outputs:
        """What `Training.learn` returns for batch `number`."""
        training = self.training
        batch = training.begin(number)
        if (key := steps.frozen(training.run, number)) != self.key:
            self.key, self.launched, self.replay = key, 0, None
        self.launched += 1
        if self.capture is None or self.launched <= WARMUP:
            return training.learn(*batch)
        if self.replay is None and not self._capture(batch):
            training.begin(number)  # draws again what the capture may have drawn
            return training.learn(*batch)
        assert self.batch is not None and self.replay is not None
        for target, source in zip(self.batch, batch, strict=True):
            target.copy_(source)
        for layer, seen, losses in self.decided:  # an evaluation in between left its own
            layer.seen, layer.losses = seen, losses
        return self.replay()

    def _capture(self, batch: tuple[Tensor, Tensor]) -> bool:
        """Capture a step; where that fails, all further ones are launched from Python."""
        training, capture = self.training, self.capture
        assert capture is not None
        inputs, targets = self.batch = (batch[0].clone(), batch[1].clone())
        training.optimizer.zero_grad(set_to_none=True)  # gradients are then allocated by the graph
        try:
            self.replay = capture(lambda: training.learn(inputs, targets))
        except RuntimeError as error:
            self.capture, self.problem = None, str(error).splitlines()[0]
            return False
        self.decided = [(layer, layer.seen, layer.losses) for layer in training.model.layers]
        return True
