"""The columns of a run's Parquet, which has one row per evaluation, and how runs are written, read and joined.

Without torch.
"""

import os
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa

from moe_routing_bench.store import parquet, paths
from moe_routing_bench.store.parquet import outvoted, read_table, some, write_table
from moe_routing_kernels.errors import UserError, bad

SCHEMA_VERSION = 6
_S, _I, _F, _B = pa.string(), pa.int64(), pa.float64(), pa.bool_()
_LIST, _LOADS, _BITS = pa.list_(_F), pa.list_(pa.list_(pa.list_(_F))), pa.map_(_S, _F)
STAGES = {f"{stage}_ms": _F for stage in ("router", "dispatch", "experts", "combine", "rest")}
# Where the same router and config has a timing run, its values replace these, which the run itself measured.
TIMING: dict[str, pa.DataType] = {
    "train_tokens_per_s": _F,
    "step_ms": _F,
    "step_half_width_ms": _F,
    "step_mode": _S,
    "eager_step_ms": _F,
    **STAGES,
    "peak_memory_bytes": _I,
    "timed_alone": _B,
}
BY_DOMAIN, MIXED = "by_domain", "mixed"  # validation_batches: of one domain each, as stored runs had them, or of all
EAGER, GRAPH = "eager", "cuda_graph"  # step_mode: launched one by one from Python, or replayed as a graph
# where numbers come from: the last columns of runs and of adaptations
PROVENANCE: dict[str, pa.DataType] = {
    "device": _S,
    "platform": _S,
    "torch_version": _S,
    "cuda_version": _S,
    "python_version": _S,
    "cpu_threads": _I,
    "git_sha": _S,
    "git_dirty": _B,
    "code_fingerprint": _S,
    "ended_at": _S,
    "host": _S,
    "slurm_job_id": _S,
}
# Columns that were added to this version of the schema: a file that lacks one reads as if it were null.
LATER = (
    "host",
    "slurm_job_id",
    "bits_by_format",
    "bits_by_capacity",
    "engine",
    "vocabulary",
    "shared_hidden",
    "shared_gate",
    "bits_of_one_domain",
    "pilot_losses_by_seed",
    "lr_source",
    "recurring_share",
    "token_bits_by_layer",
    "attention",
)
COLUMNS: dict[str, pa.DataType] = {
    # identity
    "schema_version": pa.int32(),
    "run": _S,
    "config_hash": _S,
    "label": _S,
    "purpose": _S,
    "router": _S,
    "network": _S,
    "seed": _I,
    "causal": _B,
    "causal_in_evaluation": _B,
    "learns": _B,
    "experts": _I,
    "top_k": _I,
    "capacity_factor": _F,
    "drop_policy": _S,
    "train_mode": _S,
    "match": _S,
    "dim": _I,
    "layers": _I,
    "expert_hidden": _I,
    "sequence": _I,
    "batch": _I,
    "steps": _I,
    "lr": _F,
    "pilot_lrs": _LIST,
    "pilot_losses": _LIST,
    "params": _I,
    "active_params": _I,
    "flops_per_token": _I,
    "domains": pa.list_(_S),
    "byte_classes": pa.list_(_S),
    "train_bytes": _I,
    "val_bytes": _I,
    "corpus_sha256": _S,
    # the evaluation
    "step": _I,
    "tokens_seen": _I,
    "epochs": _F,
    "train_loss": _F,
    "router_loss": _F,
    "val_loss": _F,
    "bits_per_byte": _F,
    "perplexity": _F,
    "validation_batches": _S,
    "val_loss_with_capacity": _F,
    "load_cv": _F,
    "load_cv_by_layer": _LIST,
    "max_violation_by_layer": _LIST,
    "dead_experts": _I,
    "gate_entropy": _F,
    "experts_per_token": _F,
    "drop_rate": _F,
    "token_drop_rate": _F,
    "capacity_factors": _LIST,
    "drop_rate_by_factor": _LIST,
    "train_drop_rate": _F,
    "router_grad_norm": _F,
    "load_by_domain": _LOADS,
    "load_by_class": _LOADS,
    # time, of training steps alone
    **TIMING,
    "run_step_ms": _F,
    "eval_seconds": _F,
    **PROVENANCE,
    # of the last evaluation: bits per byte by the format of the experts' weights, and by capacity factor
    "bits_by_format": _BITS,
    "bits_by_capacity": _BITS,
    # what trained it: "eager", or which of graph, operators and compiled
    "engine": _S,
    "vocabulary": _I,
    "shared_hidden": _I,
    "shared_gate": _S,
    # with the capacity of training, and validation batches of one domain each
    "bits_of_one_domain": _F,
    # nats per token of every pilot, by learning rate; whose pilots chose the rate, where not the run's own
    "pilot_losses_by_seed": pa.list_(_LIST),
    "lr_source": _S,
    # share of validation bytes in strings of 64 bytes that training has too; information of experts about the token, in bits
    "recurring_share": _F,
    "token_bits_by_layer": _LIST,
    "attention": _S,
}
SCHEMA = pa.schema(list(COLUMNS.items()))
_SPEC = b"moe_routing_bench.run"
# Stored rows keep the name that a rule had when they were written. These two were called like the published rules of
# `gate`, from which they differ: they have 4 groups of experts, of which 2 are kept. No rule of the zoo may take a
# former name.
FORMER_NAMES = {"deepseek_v2": "deepseek_v2_small", "deepseek_v3": "deepseek_v3_small"}


def write(path: Path, rows: Sequence[Mapping[str, Any]], spec: str, schema: pa.Schema = SCHEMA) -> None:
    """Write rows as one Parquet file, which appears whole or not at all; columns that a row lacks are null.

    Raises `KeyError` for a column that the schema lacks.
    """
    unknown = {name for row in rows for name in row} - set(schema.names)
    if unknown:
        raise KeyError(f"columns not in the schema: {sorted(unknown)}")
    table = pa.Table.from_pylist([{name: row.get(name) for name in schema.names} for row in rows], schema=schema)
    write_table(path, table.replace_schema_metadata({_SPEC: spec.encode()}))


def read(path: Path, schema: pa.Schema = SCHEMA) -> pa.Table:
    """Rows of this schema version, routers under their names of today, with a null column for what was added since.

    Raises `UserError` for a file that is missing or unreadable, or that holds something else.
    """
    try:
        table = read_table(path)
    except (OSError, pa.ArrowException) as error:
        hint = (
            f"{_again(path)} ({str(error)[-60:]})"
            if os.path.exists(path)
            else "run `snakemake`, or `moe-routing-bench train`"
        )
        raise bad("training run", str(path), "a readable Parquet file", hint) from error
    parquet.check_versions(path, table, SCHEMA_VERSION)
    for name in schema.names:
        if name in LATER and name not in table.column_names:
            table = table.append_column(name, pa.nulls(len(table), schema.field(name).type))
    if set(table.column_names) == set(schema.names):
        table = table.select(schema.names)
    if not table.schema.equals(schema) or parquet.versions(table) != {SCHEMA_VERSION}:
        raise bad("training run", f"other columns in {path}", f"run schema {SCHEMA_VERSION}", _again(path))
    return _renamed(table)


def _again(path: Path) -> str:
    """How to replace a file of runs that cannot be used."""
    commands = {"quality.parquet": "collect-quality", "perft.parquet": "collect-perft"}
    if (command := commands.get(path.name)) and path.parent.parent.name == "results":
        return f"`moe-routing-bench {command} --platform {shlex.quote(path.parent.name)}` writes it from the runs"
    return f"`rm {shlex.quote(str(path))}`, then `snakemake`"


def _renamed(table: pa.Table) -> pa.Table:
    """The table with today's names in place of `FORMER_NAMES`."""
    routers = [FORMER_NAMES.get(name, name) for name in table["router"].to_pylist()]
    return table.set_column(table.column_names.index("router"), "router", pa.array(routers, _S))


def spec_of(table: pa.Table) -> str:
    """The spec that a run's file was trained for."""
    return (table.schema.metadata or {}).get(_SPEC, b"").decode(errors="replace")


def weights_of(run: Path) -> Path:
    """The weights that a run kept next to its Parquet. Raises `UserError` where it kept none."""
    kept = paths.weights_file(run)
    if not kept.is_file():
        raise bad("weights", f"no {kept}", "a run with keep_weights", "train it again")
    return kept


def last(path: Path, schema: pa.Schema = SCHEMA) -> dict[str, Any]:
    """The row of a run's last evaluation."""
    return read(path, schema).to_pylist()[-1]


def collect(files: Mapping[Path, Any], timing: Mapping[Path, Sequence[str]], schema: pa.Schema = SCHEMA) -> pa.Table:
    """All rows of the runs, or of the adaptations, in `files`, with the times of those that were timed alone.

    `timing` maps the file of a timing run to the names of the runs that it speaks for. Raises `UserError` that names
    the files which are unreadable, of another spec or of other code than the rest, and where runs that are compared were
    trained on different text.
    """
    tables, problems, later, texts, codes = [], [], [], {}, {}
    times = {name: last(path) for path, names in timing.items() for name in names}
    for path, run in files.items():
        try:
            table = read(path, schema)
        except UserError as error:
            problems.append(str(error))
            later.append(isinstance(error, parquet.Newer))
            continue
        if spec_of(table) != run.spec:
            problems.append(f"{path} was trained for another spec")
        texts.setdefault(run.config_hash, set()).update(table["corpus_sha256"].to_pylist())
        codes[path] = set(table["code_fingerprint"].to_pylist())
        if time := times.get(run.name):
            for name, kind in TIMING.items():
                column = pa.array([time[name]] * len(table), kind)
                table = table.set_column(table.column_names.index(name), name, column)
        tables.append(table)
    problems += [
        f"the runs of config {name} were trained on different text" for name, hashes in texts.items() if len(hashes) > 1
    ]
    versions, again = outvoted(codes)
    if again:
        problems.append(f"{versions} versions of the code trained the runs: {some(again, 3)}")
    if problems:
        problem = f"{len(problems)} that do not fit: " + "; ".join(problems[:5])
        again = "train them again: delete the files and run `snakemake`"
        raise bad("training runs", problem, "runs of this config", parquet.KEEP if any(later) else again)
    return pa.concat_tables(table.replace_schema_metadata(None) for table in tables)
