"""The table of the documents on two GPUs: the rows of results/nvidia-h200.ep2, .ep2-training and .ep2-exchange."""

from collections.abc import Callable, Mapping

import pandas as pd
import stored_tables
from stored_tables import digits, explained, percent, table, time

RUNS = {"ep_layer": "ep2", "ep_training": "ep2-training", "ep_exchange": "ep2-exchange"}
# Columns, and the implementations of a bench that they have: the faster one where there are two.
OURS = {
    "messages": ("ops_ep", "ops_ep_static"),
    "messages, graph": ("ops_ep_graph",),
    "mailbox": ("ops_ep_push", "cute_push"),
    "mailbox, graph": ("ops_ep_push_graph", "cute_push_graph"),
}


def two_gpus() -> str:
    """A line per cell with even loads of whole layers, of training and of the exchange alone: ours, the fastest other, and what a GPU does."""
    return explained(table([_line(bench, cell) for bench in RUNS for cell in _cells(bench)]))


def _cells(bench: str) -> list[pd.DataFrame]:
    """The timed cells of a bench with even loads, most tokens last."""
    rows = _stored(bench, RUNS[bench])
    return [cell.set_index("implementation") for _, cell in rows.groupby("tokens")]


def _stored(bench: str, run: str) -> pd.DataFrame:
    """The timed rows of a bench with even loads in a run of two GPUs."""
    rows = stored_tables.stored(f"../nvidia-h200.{run}/measurements.parquet")
    return rows.query("bench == @bench and status == 'ok' and skew == 0")


def _line(bench: str, cell: pd.DataFrame) -> dict[str, str]:
    """The times of a cell."""
    first, medians = cell.iloc[0], cell["median_us"]
    own = medians[medians.index.str.startswith(("ops_", "cute_"))]
    others = medians.drop(own.index)
    line = {"bench": f"`{bench}`", "T of a GPU": str(first["tokens"] // first["ranks"]), "H": str(first["hidden"])}
    for column, ways in OURS.items():
        there = medians.reindex(ways).dropna()
        line[column] = time(cell, str(there.idxmin())) if len(there) else "–"
    line["fastest other"] = f"{time(cell, str(others.idxmin()))} (`{others.idxmin()}`)"
    line |= {"ours is": f"{digits(others.min() / own.min())}x", "a GPU does": _rate(cell.loc[own.idxmin()])}
    return line | {"kept": _kept(bench, int(first["tokens"] // first["ranks"]), own.min())}


def _kept(bench: str, tokens: int, median: float) -> str:
    """The throughput of a GPU in a layer over ranks as a share of that of one GPU with so many tokens and all experts, in the same run."""
    rows = (
        _stored("layer", "ep2").query("implementation == 'auto' and tokens == @tokens") if bench == "ep_layer" else ()
    )
    return percent(rows["median_us"].item() / median) if len(rows) else "–"


def _rate(row: pd.Series) -> str:
    """FLOPs over time, or where there are none the bytes that a GPU sends, and their share of the bandwidth of a copy to the other GPU."""
    if row["flops"]:
        return f"{row['tflops']:.0f} TFLOP/s"
    sent = sum(row["rank_deduplicated_bytes"]) / row["ranks"] / row["median_us"] / 1e3
    return f"{sent:.0f} GB/s, {percent(sent / row['peer_copy_gb_per_s'])}"


BLOCKS: Mapping[str, Callable[[], str]] = {"two-gpus": two_gpus}
