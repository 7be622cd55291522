"""Seed 003's table of whole models: prefill and decoding with quantised experts and in full precision."""

from collections.abc import Iterator, Mapping
from typing import Any

import pandas as pd

from moe_routing_bench.benches.registry import BENCHES
from moe_routing_bench.report.parts import ABSENT, Group, Table
from moe_routing_bench.report.seeds import divisor, figures, gain, number, ratio
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
NAIVE = "torch_loop"
_SHAPE = ("tokens", "hidden", "intermediate", "experts", "top_k")
_DIVIDED = ("hidden", "intermediate")  # on a CPU


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
            label(own.iloc[0]),
            own["dtype"].iloc[0],
            str(weights),
            number(most, "x") if quantised else ABSENT,
            str(name),
            number(times["prefill"]),
            number(decode),
            number(None if decode is None else 1000 / decode),
            *(number(gains[phase], "x") for phase in full),
            within if quantised else ABSENT,
            ", ".join(doubts) or ABSENT,
            why(phases.values()),
        ]


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


def layer_tables(rows: pd.DataFrame, source: Mapping[str, Any], platform: str) -> list[Table]:
    """A table for each format of the activations that was measured, float32 first, which is the published one."""
    measured = rows[rows["bench"] == "layer"]
    formats = sorted(measured["dtype"].unique(), key=lambda name: name != "fp32")
    return [_layer_table(measured[measured["dtype"] == name], name, source, platform) for name in formats]


def _layer_table(rows: pd.DataFrame, dtype: str, source: Mapping[str, Any], platform: str) -> Table:
    known = figures("000")
    divisors: set[int] = set()
    lines = [_layer_line(one, rows, divisors) for one in known.to_dict("records")]
    sizes = "".join(f" Hidden and intermediate sizes are divided by {one}." for one in sorted(divisors - {1}))
    atol, rtol = known["atol"].iloc[0], known["rtol"].iloc[0]
    return Table(
        f"Ten shapes in {dtype}, the published figures in fp32",
        (
            Group("shape", ("test", "T", "H", "I", "E", "k")),
            Group(f"published ({source['short']})", ("naive µs", "custom µs", "their speed-up", "naive / custom")),
            Group(
                f"measured ({platform}, {dtype})",
                (
                    f"{NAIVE} µs",
                    "fastest other",
                    "µs",
                    "by their formula",
                    "naive / other",
                    "largest |error|",
                    "allclose",
                ),
            ),
        ),
        lines,
        f"Their speed-up is {source['speed_up']}. allclose: every |error| is within {atol:g} + {rtol:g} |reference|, which is certain "
        f"where the largest one is at most {atol:g}; the reference is in float64 for fp32, float32 otherwise.{sizes}",
    )


def _layer_line(known: Mapping[str, Any], rows: pd.DataFrame, divisors: set[int]) -> list[str]:
    """One shape; what its sizes were divided by is added to `divisors`."""
    found = {one["implementation"]: one for one in rows.to_dict("records") if _divisor(known, one)}
    divisors |= {_divisor(known, one) or 1 for one in found.values()}
    ok = {name: one for name, one in found.items() if one["status"] == "ok"}
    others = sorted((one["median_us"], name) for name, one in ok.items() if name != NAIVE)
    naive, (best, name) = ok.get(NAIVE, {}).get("median_us"), others[0] if others else (None, ABSENT)
    ours, theirs = ratio(naive, best), ratio(known["naive_us"], known["custom_us"])
    error = max((ok[one]["max_abs_error"] for one in (NAIVE, name) if one in ok), default=None)
    close = ABSENT if error is None else "yes" if error <= known["atol"] else "not told by the largest error"
    return [
        str(known["test"]),
        *(str(known[axis]) for axis in _SHAPE),
        *(number(known[f"{one}_us"]) for one in ("naive", "custom")),
        f"{known['speedup_percent']:.2f} %",
        number(theirs, "x"),
        number(naive),
        name,
        number(best),
        number(gain(ours), " %"),
        number(ours, "x"),
        number(error),
        close,
    ]


def _divisor(known: Mapping[str, Any], row: Mapping[str, Any]) -> int | None:
    """What a row's sizes were divided by, if it is of this shape at all."""
    if any(known[axis] != row[axis] for axis in _SHAPE if axis not in _DIVIDED):
        return None
    return divisor({axis: known[axis] for axis in _DIVIDED}, {axis: row[axis] for axis in _DIVIDED})
