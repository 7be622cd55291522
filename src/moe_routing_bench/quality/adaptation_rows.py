"""The columns of an adaptation's Parquet, which has one row per evaluation, the first before any step.

Without torch.
"""

import pyarrow as pa

from moe_routing_bench.quality.run_rows import PROVENANCE

_S, _I, _F, _B = pa.string(), pa.int64(), pa.float64(), pa.bool_()
_LIST, _NAMES = pa.list_(_F), pa.list_(_S)
COLUMNS: dict[str, pa.DataType] = {
    # identity; params: those that are trained, active_params: those of them that a token meets; causal: the frozen
    # routers are
    "schema_version": pa.int32(),
    "run": _S,
    "config_hash": _S,
    "label": _S,
    "purpose": _S,
    "base": _S,
    "router": _S,
    "causal": _B,
    "seed": _I,
    "variant": _S,
    "rank": _I,
    "adapters": _I,
    "top_k": _I,
    "alpha": _F,
    "experts": _I,
    "base_params": _I,
    "params": _I,
    "active_params": _I,
    "sequence": _I,
    "batch": _I,
    "steps": _I,
    "lr": _F,
    "pilot_lrs": _LIST,
    "pilot_losses": _LIST,
    "domains": _NAMES,
    "old_domains": _NAMES,
    "train_bytes": _I,
    "val_bytes": _I,
    "corpus_sha256": _S,
    # the evaluation, on the new text and on each domain of the base's
    "step": _I,
    "tokens_seen": _I,
    "epochs": _F,
    "train_loss": _F,
    "router_loss": _F,
    "router_grad_norm": _F,
    "val_loss": _F,
    "bits_per_byte": _F,
    "old_bits_per_byte": _F,
    "old_bits_per_byte_by_domain": _LIST,
    # time, beside other runs
    "run_step_ms": _F,
    "eval_seconds": _F,
    "peak_memory_bytes": _I,
    **PROVENANCE,
}
SCHEMA = pa.schema(list(COLUMNS.items()))
