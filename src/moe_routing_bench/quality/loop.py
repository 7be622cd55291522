"""The training loop: one step after another, a row per evaluation, and a checkpoint from which a killed run goes on."""

import json
import math
import sys
import time
import zipfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from moe_routing_bench.grid.run_spec import Run
from moe_routing_bench.quality import engine, evaluate, language_model, steps, texts
from moe_routing_bench.quality.engine import Engine
from moe_routing_bench.quality.expert_loads import drop_rate
from moe_routing_bench.quality.language_model import TinyLM
from moe_routing_kernels import files, guarded
from moe_routing_kernels.errors import UserError, bad

BETAS = (0.9, 0.95)
SAVE_SECONDS = 120.0  # between two checkpoints, besides those after evaluations
LINE_SECONDS = 15.0  # between two lines of output, besides those of evaluations


class Training:
    """A run's model, optimizer and text on a device, ready to do one step after another."""

    def __init__(self, run: Run, device: str, parts: Engine | None = None) -> None:
        """Build everything; `parts` are by default those of the device.

        Raises `UserError` for a router or a text that cannot be had, and for too many epochs.
        """
        self.run, self.device, self.engine = run, device, parts or Engine.of(device)
        self.corpora = texts.load(run.corpora, run.validation_share, run.vocabulary, run.validation_tokens)
        self.train, self.validation = steps.windows(self.corpora, run.sequence, device)
        steps.check_epochs(run, self.train.total)
        self.model = self.build()
        self.router_parameters = [p for router in self.model.routers for p in router.parameters()]
        learn = [p for p in self.model.parameters() if p.requires_grad]
        matrices, others = [p for p in learn if p.ndim >= 2], [p for p in learn if p.ndim < 2]
        groups = [{"params": matrices, "weight_decay": run.weight_decay}, {"params": others, "weight_decay": 0.0}]
        self.optimizer = torch.optim.AdamW([group for group in groups if group["params"]], betas=BETAS)
        self.own_rates()
        self.engine.prepare(self.model)
        self.steps = engine.Steps(self, engine.captured if self.engine.graph else None)

    def own_rates(self) -> None:
        """Give the optimizer a learning rate that `begin` fills: a tensor, which a captured step reads."""
        cuda = self.device == "cuda"
        for group in self.optimizer.param_groups:  # the fused kernel takes a float32
            rate = torch.zeros((), dtype=torch.float32 if cuda else torch.float64, device=self.device)
            group |= {"lr": rate, "fused": cuda, "capturable": cuda}

    def build(self) -> TinyLM:
        """The model as the first step finds it."""
        seen = steps.frequencies(self.corpora, self.run.vocabulary) if language_model.balances(self.run) else []
        return language_model.build(self.run, seen).to(self.device).train()

    def step(self, number: int) -> tuple[Tensor, Tensor, Tensor]:
        """Train on batch `number`.

        Returns three scalars on the device: the loss over the bytes, what the routers added to it, and the norm of the
        routers' gradients before clipping (nan without router parameters).
        """
        loss, added, norm = self.steps.step(number)
        return loss, added, norm

    def begin(self, number: int) -> tuple[Tensor, Tensor]:
        """The host's part of a step: set what learns, the seed and the learning rate; return inputs and targets."""
        run = self.run
        if run.train_mode != "joint":
            steps.freeze(self.model, *steps.frozen(run, number))
        # Whatever is drawn in a step depends on its number, not on what was drawn before.
        torch.manual_seed(run.seed * 1_000_003 + number)
        for group in self.optimizer.param_groups:
            group["lr"].fill_(steps.learning_rate(run, number))
        return self.train.take(self.train.batch(number, run.batch, run.seed))

    def learn(self, inputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The device's part of a step, which never waits for the host: forwards, backwards, update.

        Returns as `step`.
        """
        with evaluate.autocast(self.device):
            loss = self.model.loss(self.model, self.model.hidden(inputs), targets)
        added = self.model.router_loss()
        self.optimizer.zero_grad(set_to_none=True)
        (loss + added).backward()
        gradients = [p.grad for p in self.router_parameters if p.grad is not None]
        norm = torch.nn.utils.get_total_norm(gradients) if gradients else loss.new_zeros(())
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.run.clip)
        self.optimizer.step()
        for router in self.model.routers:
            if router.training:
                router.after_step()  # type: ignore[operator]
        return loss.detach(), added.detach(), norm if self.router_parameters else loss.new_full((), math.nan)

    def state(self) -> dict[str, Any]:
        """What a checkpoint holds of the training itself."""
        return {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}

    def load(self, state: Mapping[str, Any]) -> None:
        """The inverse of `state`."""
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.own_rates()


def go_on(
    training: Training,
    checkpoint: Path,
    name: str,
    spec: str,
    fixed: Mapping[str, Any],
    evaluation: Callable[[bool], dict[str, Any]],
) -> list[dict[str, Any]]:
    """Train to the last step and return one row per evaluation.

    Starts from the checkpoint where there is one of this spec, code, text and engine, else from the first step, and writes a
    checkpoint after each evaluation and every `SAVE_SECONDS`. The last one stays, so that a finished run whose file is lost is not trained again;
    it holds the weights only where something is made of them. `fixed` are fields of every row, `evaluation` returns
    those of one evaluation, and takes whether it is the last.
    """
    run, device = training.run, training.device
    made_of = {"spec": spec, "engine": training.engine.name}
    made_of |= {name: fixed[name] for name in ("code_fingerprint", "corpus_sha256")}
    progress = _resumed(training, checkpoint, made_of)
    print(f"{name} {training.train.size} bytes of text, {training.engine.name} on {device}", flush=True)

    def keep(finished: bool = False) -> None:
        state = {} if finished else training.state()
        save(checkpoint, state | made_of | progress.state())

    while progress.step < run.steps:
        end = min(run.steps, (progress.step // run.eval_every + 1) * run.eval_every)
        _train(training, progress, end, name, keep)
        count, spent = len(progress.losses), progress.seconds
        measured = _means(training, progress.losses)
        started = time.perf_counter()
        metrics = evaluation(end == run.steps)
        tokens = end * run.tokens_per_step
        row = {**fixed, **measured, **metrics} | {
            "step": end,
            "tokens_seen": tokens,
            "epochs": tokens / training.train.total,
            "eval_seconds": time.perf_counter() - started,
            "run_step_ms": 1e3 * spent / count,
            "peak_memory_bytes": torch.cuda.max_memory_allocated() if device == "cuda" else None,
            "ended_at": now(),
        }
        rate = count * run.tokens_per_step / spent
        losses = f"train {row['train_loss']:.4f} val {row['val_loss']:.4f} {row['bits_per_byte']:.3f} bits/byte"
        print(f"{name} step {end}/{run.steps} {losses} {rate:.0f} tokens/s", flush=True)
        progress.rows.append(row)
        progress.losses, progress.seconds = [], 0.0
        keep(finished=end == run.steps and not (run.keep_weights or run.trace_tokens))
    return progress.rows


@dataclass
class Progress:
    """How far a run is: its rows and steps, and since the last row each step's losses and the seconds of all."""

    rows: list[dict[str, Any]] = field(default_factory=list)
    step: int = 0
    losses: list[tuple[Tensor, Tensor, Tensor]] = field(default_factory=list)
    seconds: float = 0.0

    def state(self) -> dict[str, Any]:
        """What a checkpoint holds of it."""
        losses = [torch.stack(values) for values in self.losses]
        return {"rows": json.dumps(self.rows), "step": self.step, "losses": losses, "seconds": self.seconds}

    @staticmethod
    def of(kept: Mapping[str, Any]) -> "Progress":
        """The inverse of `state`."""
        losses = [(loss, added, norm) for loss, added, norm in kept["losses"]]
        return Progress(json.loads(kept["rows"]), kept["step"], losses, kept["seconds"])


def _resumed(training: Training, checkpoint: Path, made_of: Mapping[str, str]) -> Progress:
    """How far a checkpoint is, whose state is taken over; the start, with a line of output that says why, where it cannot be read
    or is of something else."""
    if not checkpoint.is_file():
        return Progress()
    again = f"{checkpoint} is not used, the run starts afresh:"
    try:
        kept = saved(checkpoint, training.device)
    except UserError:
        print(f"{again} it is damaged", flush=True)
        return Progress()
    if others := [name for name, value in made_of.items() if kept.get(name) != value]:
        print(f"{again} it is of another {' and '.join(others)}", flush=True)
        return Progress()
    progress = Progress.of(kept)
    if "model" in kept:
        training.load(kept)
    print(f"goes on from {checkpoint}, step {progress.step} of {training.run.steps}", flush=True)
    return progress


def save(path: Path, state: Mapping[str, Any]) -> None:
    """Write a state; the file appears whole or not at all."""
    with files.replacing(path) as temporary:
        torch.save(state, temporary)


def saved(path: Path, device: str) -> dict[str, Any]:
    """A state that was saved. Raises `UserError` for a damaged one: torch itself does not look at the checksums."""
    try:
        guarded.check(path, sys.maxsize)
        with zipfile.ZipFile(path) as archive:
            packed = any(
                member.compress_type for member in archive.infolist()
            )  # which torch does not do: of unknown size
            if packed or archive.testzip() is not None:
                raise zipfile.BadZipFile
        return dict(torch.load(path, map_location=device, weights_only=True))
    except Exception as error:  # whatever such bytes make zip or pickle raise
        raise bad("saved state", str(path), "a whole file of torch.save", "delete it and train again") from error


def now() -> str:
    """The time as rows have it."""
    return datetime.now(UTC).isoformat(timespec="seconds")


def _train(training: Training, progress: Progress, end: int, name: str, keep: Callable[[], None]) -> None:
    """Train up to step `end`, write a checkpoint every `SAVE_SECONDS`, and print how fast it goes every `LINE_SECONDS`."""
    run = training.run
    _wait(training.device)
    start = said = time.perf_counter()
    for number in range(progress.step, end):
        progress.losses.append(training.step(number))
        progress.step = number + 1
        if progress.step < end and time.perf_counter() - said >= LINE_SECONDS:
            _wait(training.device)
            said = time.perf_counter()
            rate = len(progress.losses) * run.tokens_per_step / (progress.seconds + said - start)
            print(f"{name} step {progress.step}/{run.steps} {rate:.0f} tokens/s", flush=True)
        if progress.step < end and time.perf_counter() - start >= SAVE_SECONDS:
            _wait(training.device)
            progress.seconds += time.perf_counter() - start
            keep()
            start = time.perf_counter()
    _wait(training.device)
    progress.seconds += time.perf_counter() - start


def _means(training: Training, losses: Sequence[tuple[Tensor, Tensor, Tensor]]) -> dict[str, Any]:
    """Row fields: the means over steps, and what the last of them dropped."""
    loss, added, norm = (torch.stack(values).double().mean().item() for values in zip(*losses, strict=True))
    return {
        "train_loss": loss,
        "router_loss": added,
        "router_grad_norm": None if math.isnan(norm) and not training.router_parameters else norm,
        "train_drop_rate": drop_rate(training.model),
    }


def _wait(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()
