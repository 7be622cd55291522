"""One training run from its spec to its rows, its weights and its trace."""

import hashlib
import os
import platform as python_platform
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import torch

from moe_routing_bench.grid.run_spec import DENSE, Run
from moe_routing_bench.measure import provenance
from moe_routing_bench.packages import fingerprint
from moe_routing_bench.quality import code, engine, evaluate, language_model, run_rows, texts
from moe_routing_bench.quality.engine import Engine
from moe_routing_bench.quality.expert_loads import BYTE_CLASSES
from moe_routing_bench.quality.loop import Training, go_on, save
from moe_routing_bench.quality.texts import Corpus
from moe_routing_bench.store import paths, platforms
from moe_routing_bench.store.parquet import write_table
from moe_routing_kernels.routers import zoo

_FROM_RUN = (
    "purpose",
    "label",
    "router",
    "network",
    "seed",
    "experts",
    "top_k",
    "capacity_factor",
    "drop_policy",
    "train_mode",
    "match",
    "dim",
    "layers",
    "expert_hidden",
    "sequence",
    "batch",
    "steps",
    "lr",
    "vocabulary",
    "shared_hidden",
    "shared_gate",
    "lr_source",
    "attention",
)


def train(
    run: Run,
    out: Path,
    device: str,
    chosen: Mapping[str, Any] | None = None,
    spec: str | None = None,
    parts: Engine | None = None,
) -> list[dict[str, Any]]:
    """Train a run, evaluate every `eval_every` steps and at the end, and write the rows to `out`.

    A checkpoint next to `out` is written at every evaluation and every few minutes, and taken up by the next call. On a CPU
    the rows (apart from times) and the weights are those of an unbroken run, bit for bit. `chosen` are row fields of
    the pilots; `spec` is stored in place of the run's own where pilots chose the learning rate; `parts` are by default
    those of the device.
    """
    with engine.stream(device):
        training, checkpoint = Training(run, device, parts), out.with_suffix(".ckpt")
        fixed = _fixed(training) | dict(chosen or {})
        rows = go_on(
            training,
            checkpoint,
            run.name,
            run.spec,
            fixed,
            lambda last: _evaluated(training, last),
        )
        for row in rows:  # these hold until a timing run says otherwise
            row |= {
                "step_ms": row["run_step_ms"],
                "train_tokens_per_s": 1e3 * run.tokens_per_step / row["run_step_ms"],
                "step_mode": training.steps.mode,
                "timed_alone": False,
            }
        if run.keep_weights:
            save(paths.weights_file(out), training.state() | {"spec": run.spec})
        if run.trace_tokens:
            _trace(training, paths.trace_file(out))
    run_rows.write(out, rows, spec or run.spec)
    return rows


def _evaluated(training: Training, last: bool) -> dict[str, Any]:
    """The row fields of an evaluation; the last one of a run that is compared also alters the model."""
    run, model, windows = training.run, training.model, training.validation
    metrics = evaluate.evaluate(model, windows, run.batch)
    if last and run.altered and run.purpose == "final":
        metrics |= evaluate.altered_fields(model, windows, run.batch)
    return metrics


def _trace(training: Training, path: Path) -> None:
    """Write the routing of the middle layer as a trace that `skew: trace` takes, or print why there is none."""
    run, layer = training.run, training.run.layers // 2
    ids, reason = evaluate.routing_ids(training.model, training.validation, run.batch, run.trace_tokens, layer)
    if ids is None:
        print(f"no trace: {reason}", flush=True)
        return
    write_table(path, pa.table({"expert_ids": pa.array(ids.tolist(), pa.list_(pa.int32()))}), dictionaries=True)
    print(f"wrote {path}: layer {layer} of {run.layers}", flush=True)


def _fixed(training: Training) -> dict[str, Any]:
    """The fields that are the same in every row of a run."""
    run = training.run
    params, active = language_model.parameters(training.model)
    rules = () if run.router == DENSE else zoo.by_layer(run.router)
    return {name: getattr(run, name) for name in _FROM_RUN} | {
        "schema_version": run_rows.SCHEMA_VERSION,
        "run": run.name,
        "config_hash": run.config_hash,
        "causal": is_causal(run),
        "causal_in_evaluation": is_causal(run, training=False),
        "learns": any(rule.learns for rule in rules),
        "params": params,
        "active_params": active,
        "flops_per_token": language_model.flops_per_token(training.model, run, active),
        "domains": [corpus.name for corpus in training.corpora],
        "byte_classes": list(BYTE_CLASSES),
        "train_bytes": training.train.size,
        "corpus_sha256": corpus_hash(training.corpora),
        "recurring_share": texts.recurring_share(training.corpora),
        "engine": training.engine.name,
        **origin(training.device, code.training_files()),
    }


def is_causal(run: Run, training: bool = True) -> bool:
    """Whether no later token of a sequence can change a decision, in training or evaluation with the run's own capacity."""
    rules = () if run.router == DENSE else zoo.by_layer(run.router)
    if run.capacity_factor is None:
        return all(rule.causal if training else rule.causal_in_evaluation for rule in rules)
    return all(rule.causal_with_capacity(run.drop_policy, training) for rule in rules)


def origin(device: str, files: list[Path]) -> dict[str, Any]:
    """The row fields that say where numbers come from; `files` are the sources that the numbers depend on."""
    cuda, versions = device == "cuda", provenance.versions()
    return {
        "device": torch.cuda.get_device_name() if cuda else versions["cpu_model"],
        "platform": platforms.current(),
        "torch_version": versions["torch_version"],
        "cuda_version": versions["cuda_version"],
        "python_version": python_platform.python_version(),
        "cpu_threads": torch.get_num_threads(),
        "code_fingerprint": fingerprint(files),
        **provenance.git_state(lambda: files),
        "host": versions["host"],
        "slurm_job_id": os.environ.get("SLURM_JOB_ID"),
    }


def corpus_hash(corpora: Sequence[Corpus]) -> str:
    """One hash over all domains: 16 hex digits."""
    return hashlib.sha256("".join(f"{corpus.name}:{corpus.sha256}\n" for corpus in corpora).encode()).hexdigest()[:16]
