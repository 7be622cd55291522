"""The training loop: one step after another, a row per evaluation, and a checkpoint from which a killed run goes on."""

import json
import math
import sys
import time
import zipfile
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from moe_routing_bench.grid.run_spec import Run
from moe_routing_bench.quality import evaluate, language_model, steps, texts
from moe_routing_bench.quality.expert_loads import drop_rate
from moe_routing_bench.quality.language_model import TinyLM
from moe_routing_kernels import files, guarded
from moe_routing_kernels.errors import UserError, bad

BETAS = (0.9, 0.95)


class Training:
    """A run's model, optimizer and text on a device, ready to do one step after another."""

    def __init__(self, run: Run, device: str) -> None:
        """Build everything. Raises `UserError` for a router or a text that cannot be had, and for too many epochs."""
        self.run, self.device = run, device
        self.corpora = texts.load(run.corpora, run.validation_share)
        self.train, self.validation = steps.windows(self.corpora, run.sequence, device)
        steps.check_epochs(run, self.train.total)
        self.model = self.build()
        self.router_parameters = [p for router in self.model.routers for p in router.parameters()]
        learn = [p for p in self.model.parameters() if p.requires_grad]
        matrices, others = [p for p in learn if p.ndim >= 2], [p for p in learn if p.ndim < 2]
        groups = [{"params": matrices, "weight_decay": run.weight_decay}, {"params": others, "weight_decay": 0.0}]
        self.optimizer = torch.optim.AdamW(
            [group for group in groups if group["params"]], lr=0.0, betas=BETAS, fused=device == "cuda"
        )

    def build(self) -> TinyLM:
        """The model as the first step finds it."""
        return language_model.build(self.run, steps.frequencies(self.corpora)).to(self.device).train()

    def step(self, number: int) -> tuple[Tensor, Tensor, Tensor]:
        """Train on batch `number`.

        Returns three scalars on the device: the loss over the bytes, what the routers added to it, and the norm of the
        routers' gradients before clipping (nan without router parameters).
        """
        return self.learn(*self.begin(number))

    def begin(self, number: int) -> tuple[Tensor, Tensor]:
        """The host's part of a step: set what learns, the seed and the learning rate; return inputs and targets."""
        run = self.run
        if run.train_mode != "joint":
            steps.freeze(self.model, *steps.frozen(run, number))
        # Whatever is drawn in a step depends on its number, not on what was drawn before.
        torch.manual_seed(run.seed * 1_000_003 + number)
        for group in self.optimizer.param_groups:
            group["lr"] = steps.learning_rate(run, number)
        return self.train.take(self.train.batch(number, run.batch, run.seed))

    def learn(self, inputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The device's part of a step, which never waits for the host: forwards, backwards, update.

        Returns as `step`.
        """
        with evaluate.autocast(self.device):
            logits = self.model(inputs)
        loss = F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten(), ignore_index=steps.IGNORED)
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


def go_on(
    training: Training,
    checkpoint: Path,
    name: str,
    spec: str,
    fixed: Mapping[str, Any],
    evaluation: Callable[[bool], dict[str, Any]],
) -> list[dict[str, Any]]:
    """Train to the last step and return one row per evaluation.

    Starts from the checkpoint where there is one of this spec, code and text, else from the first step, and writes a
    checkpoint after each evaluation. The last one stays, so that a finished run whose file is lost is not trained again;
    it holds the weights only where something is made of them. `fixed` are fields of every row, `evaluation` returns
    those of one evaluation, and takes whether it is the last.
    """
    run, device = training.run, training.device
    made_of = {"spec": spec} | {name: fixed[name] for name in ("code_fingerprint", "corpus_sha256")}
    rows, done = _resumed(training, checkpoint, made_of)
    while done < run.steps:
        end = min(run.steps, (done // run.eval_every + 1) * run.eval_every)
        measured, spent = _steps(training, done, end)
        started = time.perf_counter()
        metrics = evaluation(end == run.steps)
        tokens = end * run.tokens_per_step
        row = {**fixed, **measured, **metrics} | {
            "step": end,
            "tokens_seen": tokens,
            "epochs": tokens / training.train.total,
            "eval_seconds": time.perf_counter() - started,
            "run_step_ms": 1e3 * spent / (end - done),
            "peak_memory_bytes": torch.cuda.max_memory_allocated() if device == "cuda" else None,
            "ended_at": now(),
        }
        rows.append(row)
        rate = (end - done) * run.tokens_per_step / spent
        losses = f"train {row['train_loss']:.4f} val {row['val_loss']:.4f} {row['bits_per_byte']:.3f} bits/byte"
        print(f"{name} step {end}/{run.steps} {losses} {rate:.0f} bytes/s", flush=True)
        done = end
        state = training.state() if done < run.steps or run.keep_weights or run.trace_tokens else {}
        save(checkpoint, state | made_of | {"rows": json.dumps(rows), "step": done})
    return rows


def _resumed(training: Training, checkpoint: Path, made_of: Mapping[str, str]) -> tuple[list[dict[str, Any]], int]:
    """The rows and the number of steps that a checkpoint holds, whose state is taken over; none, with a line of output
    that says why, from one that cannot be read or is of something else."""
    if not checkpoint.is_file():
        return [], 0
    again = f"{checkpoint} is not used, the run starts afresh:"
    try:
        kept = saved(checkpoint, training.device)
    except UserError:
        print(f"{again} it is damaged", flush=True)
        return [], 0
    if others := [name for name, value in made_of.items() if kept.get(name) != value]:
        print(f"{again} it is of another {' and '.join(others)}", flush=True)
        return [], 0
    rows, step = json.loads(kept["rows"]), kept["step"]
    if "model" in kept:
        training.load(kept)
    print(f"goes on from {checkpoint}, step {step} of {training.run.steps}", flush=True)
    return rows, step


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


def _steps(training: Training, first: int, end: int) -> tuple[dict[str, Any], float]:
    """Train steps first to end - 1: row fields, and the seconds that the steps alone took."""
    losses: list[tuple[Tensor, Tensor, Tensor]] = []
    _wait(training.device)
    start = time.perf_counter()
    for number in range(first, end):
        losses.append(training.step(number))
    _wait(training.device)
    seconds = time.perf_counter() - start
    loss, added, norm = (torch.stack(values).double().mean().item() for values in zip(*losses, strict=True))
    fields = {
        "train_loss": loss,
        "router_loss": added,
        "router_grad_norm": None if math.isnan(norm) and not training.router_parameters else norm,
        "train_drop_rate": drop_rate(training.model),
    }
    return fields, seconds


def _wait(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()
