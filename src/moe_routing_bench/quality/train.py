"""One training run from its spec to its rows: the loop, its checkpoint, and the times of the training steps alone."""

import hashlib
import json
import math
import platform as python_platform
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from moe_routing_bench import files, paths, platforms
from moe_routing_bench.errors import bad
from moe_routing_bench.measure import provenance
from moe_routing_bench.quality import corpora, data, evaluate, model, runs
from moe_routing_bench.quality.model import TinyLM
from moe_routing_bench.quality.run import DENSE, Run
from moe_routing_bench.routers.zoo import ZOO

BETAS = (0.9, 0.95)
FLOOR = 0.1  # of the learning rate, where the cosine ends
EXPERTS_FIRST = 0.5  # of the steps; after these the experts are frozen and the router learns


class Training:
    """A run's model, optimizer and text on a device, able to do one step after another."""

    def __init__(self, run: Run, device: str) -> None:
        """Build everything. Raises `UserError` for a router or a text that cannot be, and for too many epochs."""
        self.run, self.device = run, device
        self.corpora = corpora.load(run.corpora, run.validation_share)
        self.train, self.validation = data.windows(self.corpora, run.sequence, device)
        check_epochs(run, self.train.total)
        self.model = self.build()
        self.router_parameters = [p for router in self.model.routers for p in router.parameters()]
        learn = [p for p in self.model.parameters() if p.requires_grad]
        matrices, others = [p for p in learn if p.ndim >= 2], [p for p in learn if p.ndim < 2]
        groups = [{"params": matrices, "weight_decay": run.weight_decay}, {"params": others, "weight_decay": 0.0}]
        self.optimizer = torch.optim.AdamW(
            [g for g in groups if g["params"]], lr=0.0, betas=BETAS, fused=device == "cuda"
        )

    def build(self) -> TinyLM:
        """The model as the first step finds it."""
        return model.build(self.run, data.frequencies(self.corpora)).to(self.device).train()

    def step(self, number: int) -> tuple[Tensor, Tensor, Tensor]:
        """Train on batch `number`; the loss of the bytes, what the routers added, and the routers' gradient norm before
        clipping (nan without router parameters): scalars on the device."""
        return self.learn(*self.begin(number))

    def begin(self, number: int) -> tuple[Tensor, Tensor]:
        """What the host does for a step: what learns, the seed, the learning rate, and the batch (inputs, targets)."""
        run = self.run
        if run.train_mode != "joint":
            freeze(self.model, *frozen(run, number))
        torch.manual_seed(
            run.seed * 1_000_003 + number
        )  # whatever is drawn depends on the step, not on what came before
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate(run, number)
        return self.train.take(self.train.batch(number, run.batch, run.seed))

    def learn(self, inputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """What the device does for a step, without waiting for the host: forwards, backwards, update; returns as `step`."""
        with evaluate.autocast(self.device):
            logits = self.model(inputs)
        loss = F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten(), ignore_index=data.IGNORED)
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


def learning_rate(run: Run, step: int) -> float:
    """Linear warm-up, then a cosine from `lr` to a tenth of it."""
    assert run.lr is not None
    if step < run.warmup:
        return run.lr * (step + 1) / run.warmup
    share = (step - run.warmup) / max(1, run.steps - run.warmup)
    return run.lr * (FLOOR + (1 - FLOOR) * 0.5 * (1 + math.cos(math.pi * share)))


def frozen(run: Run, step: int) -> tuple[bool, bool]:
    """Whether the routers, and whether the experts, are frozen in a step.

    After 2306.08586, which compares the joint training of gate and experts with decoupled training: `frozen_router` keeps
    the routers as they start; `experts_first` does so in the first half of the steps, and in the second keeps the experts.
    Everything else always learns.
    """
    if run.train_mode == "experts_first":
        first = step < EXPERTS_FIRST * run.steps
        return first, not first
    return run.train_mode == "frozen_router", False


def freeze(model: TinyLM, routers: bool, experts: bool) -> None:
    """Say which part of the MoE layers learns. Frozen routers route as in evaluation, without noise, losses or new state."""
    for layer in model.layers:
        layer.routers.train(not routers)
        for name, parameter in layer.named_parameters():
            parameter.requires_grad_(not (routers if name.startswith("routers.") else experts))


def check_epochs(run: Run, train_bytes: int) -> None:
    """Raise `UserError` when the run would see its text too often."""
    epochs = run.steps * run.tokens_per_step / train_bytes
    if epochs > run.max_epochs:
        most = int(run.max_epochs * train_bytes / run.tokens_per_step)
        raise bad("quality steps", run.steps, f"at most {most}: {run.max_epochs:g} epochs of {train_bytes} bytes",
                  "add a corpus, or raise max_epochs")  # fmt: skip


def train(
    run: Run, out: Path, device: str, chosen: Mapping[str, Any] | None = None, spec: str | None = None
) -> list[dict[str, Any]]:
    """Train, evaluate every `eval_every` steps and at the end, and write the rows to `out`.

    A checkpoint beside `out` is written at every evaluation, taken up by the next call, and removed at the end: on a CPU
    the rows (but for times) and the weights are those of an unbroken run, bit for bit. `chosen` are row fields of the
    pilots; `spec` is stored in place of the run's own where the learning rate was chosen by pilots.
    """
    training, checkpoint = Training(run, device), out.with_suffix(".ckpt")
    fixed = _fixed(training) | dict(chosen or {})
    rows = go_on(
        training, checkpoint, run.name, run.spec, fixed,
        lambda: evaluate.evaluate(training.model, training.validation, run.batch),
    )  # fmt: skip
    for row in rows:  # until a timing run says otherwise
        row |= {"step_ms": row["run_step_ms"], "train_tokens_per_s": 1e3 * run.tokens_per_step / row["run_step_ms"], "step_mode": runs.EAGER, "timed_alone": False}  # fmt: skip
    if run.keep_weights:
        _save(weights(out), training.state() | {"spec": run.spec})
    if run.trace_tokens:
        _trace(training, paths.trace_file(out))
    runs.write(out, rows, spec or run.spec)
    checkpoint.unlink(missing_ok=True)
    return rows


def go_on(
    training: Training, checkpoint: Path, name: str, spec: str, fixed: Mapping[str, Any], evaluation: Callable[[], dict[str, Any]]
) -> list[dict[str, Any]]:  # fmt: skip
    """Train from the start, or from the checkpoint where it is of this spec, to the last step: a row an evaluation."""
    run, device = training.run, training.device
    rows, done = [], 0
    if (
        checkpoint.is_file()
        and (kept := torch.load(checkpoint, map_location=device, weights_only=True))["spec"] == spec
    ):
        training.load(kept)
        rows, done = json.loads(kept["rows"]), kept["step"]
    while done < run.steps:
        end = min(run.steps, (done // run.eval_every + 1) * run.eval_every)
        measured, spent = _steps(training, done, end)
        started = time.perf_counter()
        found = evaluation()
        tokens = end * run.tokens_per_step
        rows.append(
            {**fixed, **measured, **found} | {
                "step": end, "tokens_seen": tokens, "epochs": tokens / training.train.total, "eval_seconds": time.perf_counter() - started,
                "run_step_ms": 1e3 * spent / (end - done),
                "peak_memory_bytes": torch.cuda.max_memory_allocated() if device == "cuda" else None, "ended_at": now(),
            }
        )  # fmt: skip
        rate = (end - done) * run.tokens_per_step / spent
        done = end
        print(f"{name} step {done}/{run.steps} train {measured['train_loss']:.4f} val {found['val_loss']:.4f} "
              f"{found['bits_per_byte']:.3f} bits/byte {rate:.0f} bytes/s", flush=True)  # fmt: skip
        if done < run.steps:
            _save(checkpoint, training.state() | {"spec": spec, "rows": json.dumps(rows), "step": done})
    return rows


def now() -> str:
    """The time as rows have it."""
    return datetime.now(UTC).isoformat(timespec="seconds")


def weights(out: Path) -> Path:
    """Where a run keeps its last state for a timing run."""
    return out.with_suffix(".pt")


def _steps(training: Training, first: int, end: int) -> tuple[dict[str, Any], float]:
    """Train steps first to end - 1: row fields, and the seconds that they took and nothing else did."""
    losses: list[tuple[Tensor, Tensor, Tensor]] = []
    _wait(training.device)
    start = time.perf_counter()
    for number in range(first, end):
        losses.append(training.step(number))
    _wait(training.device)
    seconds = time.perf_counter() - start
    loss, added, norm = (torch.stack(one).double().mean().item() for one in zip(*losses, strict=True))
    return {
        "train_loss": loss, "router_loss": added, "router_grad_norm": None if math.isnan(norm) and not training.router_parameters else norm,
        "train_drop_rate": _train_drop_rate(training.model),
    }, seconds  # fmt: skip


def _train_drop_rate(trained: TinyLM) -> float | None:
    """Share of the choices of the last training step that were over the capacity; None where nothing is chosen."""
    chosen = dropped = 0
    for layer in trained.layers:
        for seen in layer.seen:
            if seen.ids_TK is not None and seen.kept_TK is not None:
                wanted = (seen.ids_TK >= 0) & (seen.ids_TK < layer.count)
                chosen += int(wanted.sum())
                dropped += int((wanted & ~seen.kept_TK).sum())
    return dropped / chosen if chosen else None


def _wait(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def _save(path: Path, state: Mapping[str, Any]) -> None:
    """Appears whole or not at all."""
    with files.replacing(path) as temporary:
        torch.save(state, temporary)


def _trace(training: Training, path: Path) -> None:
    """Write the routing of the middle layer as a trace that `skew: trace` takes, or say why there is none."""
    import pyarrow as pa

    from moe_routing_bench import records

    run, layer = training.run, training.run.layers // 2
    ids, reason = evaluate.routing_ids(training.model, training.validation, run.batch, run.trace_tokens, layer)
    if ids is None:
        print(f"no trace: {reason}", flush=True)
        return
    records.write_table(path, pa.table({"expert_ids": pa.array(ids.tolist(), pa.list_(pa.int32()))}))
    print(f"wrote {path}: layer {layer} of {run.layers}", flush=True)


def _fixed(training: Training) -> dict[str, Any]:
    """Row fields that are the same in every row of a run."""
    run, total = training.run, training.train.total
    params, active = model.parameters(training.model)
    rule = None if run.router == DENSE else ZOO[run.router]
    names = ("purpose", "label", "router", "network", "seed", "experts", "top_k", "capacity_factor", "drop_policy", "train_mode", "match", "dim",
             "layers", "expert_hidden", "sequence", "batch", "steps", "lr")  # fmt: skip
    return {name: getattr(run, name) for name in names} | {
        "schema_version": runs.SCHEMA_VERSION, "run": run.name, "config_hash": run.config_hash,
        "causal": rule is None or rule.causal, "causal_in_evaluation": rule is None or rule.causal_in_evaluation, "learns": rule is not None and rule.learns,
        "params": params, "active_params": active, "flops_per_token": model.flops_per_token(training.model, run, active),
        "domains": [one.name for one in training.corpora], "byte_classes": list(evaluate.BYTE_CLASSES),
        "train_bytes": total, "corpus_sha256": corpus_hash(training.corpora),
        **origin(training.device, paths.training_files()),
    }  # fmt: skip


def origin(device: str, files: list[str]) -> dict[str, Any]:
    """Row fields that say where the numbers come from; `files` are the sources that they depend on."""
    cuda, versions = device == "cuda", provenance.versions()
    return {
        "device": torch.cuda.get_device_name() if cuda else versions["cpu_model"], "platform": platforms.current(),
        "torch_version": versions["torch_version"], "cuda_version": versions["cuda_version"],
        "python_version": python_platform.python_version(), "cpu_threads": torch.get_num_threads(),
        "code_fingerprint": provenance.fingerprint(files), **provenance.git_state(),
    }  # fmt: skip


def corpus_hash(texts: Sequence[corpora.Corpus]) -> str:
    """One hash for all domains: 16 hex digits."""
    return hashlib.sha256("".join(f"{one.name}:{one.sha256}\n" for one in texts).encode()).hexdigest()[:16]
