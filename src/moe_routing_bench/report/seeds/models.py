"""Seed 003's table of whole models: prefill and decoding with quantised experts, beside full precision."""

from collections.abc import Iterator, Mapping
from typing import Any

import pandas as pd

from moe_routing_bench.benches.registry import BENCHES
from moe_routing_bench.report.seeds.published import figures
from moe_routing_bench.report.seeds.tables import ABSENT, Group, Table, number, ratio
from moe_routing_kernels.formats.weights import WEIGHTS

LIBRARY = "transformers_"  # how names of the library's own forms begin: full precision, as theirs is
_OURS = (
    *("implementation", "prefill ms", "decode ms per token", "tokens/s", "prefill, speed-up", "decode, speed-up"),
    *("within the guard", "in doubt", "not measured, because"),
)
_COLUMNS = (
    *("implementation", "phase", "model", "hidden", "intermediate", "experts", "top_k", "dtype", "weights"),
    *("status", "reason", "median_us", "anomaly"),
)
_Row = Mapping[str, Any]


def guard() -> float:
    """How many times as long as at full precision decoding may take, at most: the assertion of their test."""
    return float(figures("003_models")["guard"].max())


def label(row: _Row) -> str:
    """The model of a row, or the sizes of one that has no preset."""
    if isinstance(row["model"], str):
        return row["model"]
    return ", ".join(
        f"{short}={row[axis]:.0f}"
        for short, axis in zip("HIEk", ("hidden", "intermediate", "experts", "top_k"), strict=True)
    )


def reduced(rows: pd.DataFrame, what: str) -> str:
    """A sentence for rows whose sizes are no model's, as on a CPU."""
    return (
        f" {what} stands for theirs, hidden and intermediate sizes a sixteenth of Qwen's."
        if rows["model"].isna().any()
        else ""
    )


def tables(rows: pd.DataFrame, source: Mapping[str, Any], platform: str) -> list[Table]:
    """The table: a line per model, formats and implementation, also for what has no time."""
    own = rows.loc[rows["bench"] == "model", list(_COLUMNS)]
    lines = [
        line for _, model in own.groupby([own.apply(label, axis=1), "dtype"], sort=False) for line in _model(model)
    ]
    groups = (
        Group("model", ("model", "activations", "weights")),
        Group(f"published ({source['short']})", ("guard of decoding: at most",)),
        Group(f"measured ({platform})", _OURS),
    )
    note = (
        "Speed-ups are over the fastest of the library's own forms at full precision, phase by phase. Prefill is of 128 tokens; decoding of one sequence "
        f"behind 128 tokens. Weights are random. In doubt: phases whose time the rule for rows of this benchmark doubts.{reduced(own, 'A model of two layers')}"
    )
    return [Table("Whole models, quantised against full precision", groups, lines, note)]


def _model(rows: pd.DataFrame) -> Iterator[list[str]]:
    """The lines of one model with activations of one format, full precision first."""
    order = {one.name: i for i, one in enumerate(BENCHES["model"].implementations)}
    plain = rows[~rows["weights"].isin(WEIGHTS) & rows["implementation"].str.startswith(LIBRARY)]
    full = {phase: _fastest(plain, phase) for phase in ("prefill", "decode")}
    place, most = rows["implementation"].map(order), guard()
    for (weights, _, name), own in rows.groupby(
        [rows["weights"].fillna(rows["dtype"]), place, "implementation"], sort=False
    ):
        quantised = weights in WEIGHTS
        phases = {one["phase"]: one for one in own.to_dict("records")}
        times = {phase: milliseconds(phases.get(phase)) for phase in full}
        gains = {phase: ratio(full[phase], time) for phase, time in times.items()}
        doubts = [phase for phase, one in phases.items() if isinstance(one["anomaly"], str)]
        within = ABSENT if gains["decode"] != gains["decode"] else "yes" if gains["decode"] >= 1 / most else "no"
        decode = times["decode"]
        yield [
            label(own.iloc[0]), own["dtype"].iloc[0], str(weights), number(most, "x") if quantised else ABSENT, str(name),
            number(times["prefill"]), number(decode), number(None if decode is None else 1000 / decode),
            *(number(gains[phase], "x") for phase in full), within if quantised else ABSENT, ", ".join(doubts) or ABSENT, why(phases.values()),
        ]  # fmt: skip


def why(rows: Any) -> str:
    """The reasons of rows that have no time, each once."""
    said = (f"{one['status']}: {one['reason']}" for one in rows if one["status"] != "ok")
    return "; ".join(dict.fromkeys(said)) or ABSENT


def milliseconds(row: _Row | None) -> float | None:
    """The median time of a row in ms, where it has one."""
    return row["median_us"] / 1000 if row is not None and row["status"] == "ok" else None


def _fastest(rows: pd.DataFrame, phase: str) -> float | None:
    """The least time of a phase in ms."""
    times = rows.loc[(rows["status"] == "ok") & (rows["phase"] == phase), "median_us"]
    return times.min() / 1000 if len(times) else None
