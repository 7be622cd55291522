"""The columns of an adaptation's Parquet, one row an evaluation, the first before any step; and their summary. No torch."""

import pandas as pd
import pyarrow as pa

from moe_routing_bench.quality.compare import half_width

_S, _I, _F, _B = pa.string(), pa.int64(), pa.float64(), pa.bool_()
_LIST, _NAMES = pa.list_(_F), pa.list_(_S)
COLUMNS: dict[str, pa.DataType] = {
    # identity; params are the trainable ones, active_params those of them that a token meets
    "schema_version": pa.int32(), "run": _S, "config_hash": _S, "label": _S, "purpose": _S, "base": _S, "router": _S, "seed": _I,
    "variant": _S, "rank": _I, "adapters": _I, "top_k": _I, "alpha": _F, "experts": _I, "base_params": _I, "params": _I,
    "active_params": _I, "sequence": _I, "batch": _I, "steps": _I, "lr": _F, "pilot_lrs": _LIST, "pilot_losses": _LIST,
    "domains": _NAMES, "old_domains": _NAMES, "train_bytes": _I, "val_bytes": _I, "corpus_sha256": _S,
    # the evaluation: of the new text, and of each domain of the base's
    "step": _I, "tokens_seen": _I, "epochs": _F, "train_loss": _F, "router_loss": _F, "router_grad_norm": _F, "val_loss": _F,
    "bits_per_byte": _F, "old_bits_per_byte": _F, "old_bits_per_byte_by_domain": _LIST,
    # time: beside other runs
    "run_step_ms": _F, "eval_seconds": _F, "peak_memory_bytes": _I,
    # provenance
    "device": _S, "platform": _S, "torch_version": _S, "cuda_version": _S, "python_version": _S, "cpu_threads": _I, "git_sha": _S,
    "git_dirty": _B, "code_fingerprint": _S, "ended_at": _S,
}  # fmt: skip
SCHEMA = pa.schema(list(COLUMNS.items()))
METRICS = ("bits_per_byte", "forgetting", "gain")


def finals(table: pd.DataFrame) -> pd.DataFrame:
    """The last evaluation of every final adaptation, with two more columns in bits per byte: `gain`, by how much the new
    text became better than before the first step, and `forgetting`, by how much the old text became worse."""
    rows = table[table["purpose"] == "final"].sort_values("step").groupby("run", sort=False)
    last, first = rows.tail(1).set_index("run"), rows.head(1).set_index("run")
    gain = first["bits_per_byte"] - last["bits_per_byte"]
    forgetting = last["old_bits_per_byte"] - first["old_bits_per_byte"]
    return last.assign(gain=gain, forgetting=forgetting).reset_index()


def summary(table: pd.DataFrame) -> pd.DataFrame:
    """One row a variant and rank of each config: trainable parameters and, over the seeds, mean and 95 % half width of
    `METRICS`; in the order of the rows."""
    found = []
    keys = ["label", "config_hash", "variant", "rank"]
    for key, rows in finals(table).groupby(keys, sort=False):
        one = dict(zip(keys, key, strict=True))
        one |= {"params": int(rows["params"].iloc[0]), "active_params": int(rows["active_params"].iloc[0]), "seeds": len(rows), "lr": rows["lr"].iloc[0]}  # fmt: skip
        for metric in METRICS:
            values = rows[metric].to_numpy(float)
            one |= {metric: float(values.mean()), f"{metric}_half_width": half_width(values)}
        found.append(one)
    return pd.DataFrame(found)


def text(table: pd.DataFrame) -> str:
    """The summary as lines to print, the least loss first."""
    lines, rows = [], summary(table)
    for (label, config), group in rows.groupby(["label", "config_hash"], sort=False):
        lines.append(f"\n{label} ({config}), bits per byte of the new text, and by how much the old text became worse")
        lines.append(f"{'adapters':<12} {'trainable':>10} {'active':>8} {'new':>8} {'± 95 %':>8} {'old':>8} {'± 95 %':>8} {'seeds':>5} {'lr':>8}")  # fmt: skip
        for row in group.sort_values("bits_per_byte").to_dict("records"):
            lines.append(f"{'PERFT-' + row['variant'] + ' r' + str(row['rank']):<12} {row['params']:>10} {row['active_params']:>8} {row['bits_per_byte']:>8.4f}"
                         f" {row['bits_per_byte_half_width']:>8.4f} {row['forgetting']:>+8.4f} {row['forgetting_half_width']:>8.4f} {row['seeds']:>5} {row['lr']:>8.2g}")  # fmt: skip
    return "\n".join(lines)
