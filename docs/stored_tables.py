"""The tables of the documents whose figures are stored rows: each is made of a file below results/nvidia-h200/, or below that of
another run (layers, decode, training, model, quantised, quantised-decode or quantised-floats) or of an H100.

Times are medians of device time in µs. `floor` is `roofline_us`: the compulsory bytes at the copy bandwidth, or the FLOPs
at the matrix rate, both measured in the same process.
"""

import itertools
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cache, partial
from pathlib import Path

import numpy as np
import pandas as pd
import twins
from scipy import stats

from moe_routing_bench.comparison import origins, regret
from moe_routing_bench.measure.completion import share_of_mixed
from moe_routing_bench.quality import compare, family, run_rows
from moe_routing_bench.quantities import count, significant
from moe_routing_bench.report import format_bars, layer_bars, reached, routing_bars, run_pages, trained_rules, words
from moe_routing_bench.report.parts import BarLine
from moe_routing_bench.store import companions, records
from moe_routing_kernels import choices as table_of_choices

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "results/nvidia-h200"
MEASURED = "measurements.parquet"  # the routing grid
LAYERS, DECODE = "../nvidia-h200.layers/", "../nvidia-h200.decode/"  # from there
TRAINING, MODEL = "../nvidia-h200.training/", "../nvidia-h200.model/"
QUANTISED, QUANTISED_DECODE, QUANTISED_FLOATS = (
    f"../nvidia-h200.quantised{part}/" for part in ("", "-decode", "-floats")
)
QUALITY_FORMATS = "../nvidia-h200.quality-formats/"
H100 = "../nvidia-h100-80gb-hbm3/"
PUBLISHED = "repeat_published.csv"  # the published rows of routing and layers, and those of the run before
WAYS = ("torch", "triton", "cute")
SYMBOLS = {"tokens": "T", "experts": "E", "hidden": "H", "intermediate": "I", "top_k": "k"}


def table(lines: Sequence[Mapping[str, str]]) -> str:
    """A Markdown table of lines that have the same keys, which are its header."""
    rows = [list(lines[0]), ["---"] * len(lines[0]), *(list(line.values()) for line in lines)]
    return "".join(f"| {' | '.join(row)} |\n" for row in rows)


def digits(value: float) -> str:
    """Three significant digits, or all digits before the point; a dash for a missing value."""
    if pd.isna(value):
        return "–"
    return f"{value:.0f}" if abs(value) >= 1000 else significant(value, 3)


SUSPECT, WIDE, WARM, UNTUNED = "†", "°", "‡", "¶"
_MARKS = {
    SUSPECT: "suspect (`suspect_reason`)",
    WIDE: "interval wider than asked for",
    WARM: "the L2 cache may be warm (`cold`)",
    UNTUNED: "default tiles, as the package has no tuned table for this layer",
}


def doubts(row: pd.Series) -> str:
    """The marks of a row's time."""
    marks = {SUSPECT: row["suspect"] == True, WIDE: row["converged"] == False, WARM: row["cold"] == False}  # noqa: E712
    marks[UNTUNED] = "default tiles" in str(row.get("configuration"))
    return "".join(mark for mark, there in marks.items() if there)


def time(rows: pd.DataFrame, way: str, unit: str = "") -> str:
    """The time of an implementation among rows that it indexes, with its marks; a dash where there is none."""
    if way not in rows.index or pd.isna(rows.at[way, "median_us"]):
        return "–"
    return digits(rows.at[way, "median_us"]) + unit + doubts(rows.loc[way])


def explained(text: str) -> str:
    """A table, and below it what the marks in it mean."""
    said = [f"{mark} {meaning}" for mark, meaning in _MARKS.items() if mark in text]
    return f"{text}\n{'; '.join(said)}.\n" if said else text


def percent(value: float) -> str:
    """A share in whole per cent; a dash for a missing value."""
    return "–" if pd.isna(value) else f"{100 * value:.0f} %"


@cache
def stored(name: str) -> pd.DataFrame:
    """A stored table by the name of its file."""
    path = RESULTS / name
    if path.name == "measurements.parquet":  # an axis may have been added since: its column is then null
        return records.frame(records.read(path))
    return pd.read_csv(path) if path.suffix == ".csv" else pd.read_parquet(path)


def timed(bench: str) -> pd.DataFrame:
    """The timed rows of a bench, with `format`: that of the packed rows where they have their own, else the dtype."""
    rows = stored("measurements.parquet")
    found = rows[(rows["bench"] == bench) & (rows["status"] == "ok")]
    return found.assign(format=found["packed"].fillna(found["dtype"]))


def plain(bench: str, where: str) -> pd.DataFrame:
    """The timed rows of a bench with balanced loads and without a capacity limit for which `where` holds."""
    rows = timed(bench)
    balanced = (rows["skew"].fillna(0) == 0) & (rows["sampler"].fillna("exact") == "exact")
    return rows[balanced & rows["capacity_factor"].isna()].query(where, engine="python")


def times(bench: str, axes: Sequence[str], where: str, ways: Sequence[str] = WAYS) -> str:
    """A line per value of `axes`, a column per implementation, and the floor."""
    lines = []
    for _, cell in plain(bench, where).groupby(list(axes)):
        found, first = cell.set_index("implementation"), cell.iloc[0]
        assert found.index.is_unique, f"{bench}: more than one cell of {where}"
        line = {SYMBOLS.get(axis, axis): _whole(first[axis]) for axis in axes}
        lines.append(line | {way: time(found, way) for way in ways} | {"floor": digits(first["roofline_us"])})
    return explained(table(lines))


def _whole(value: object) -> str:
    """An axis value; whole numbers that pandas holds as floats lose their point."""
    return f"{value:.0f}" if isinstance(value, float) else str(value)


PEERS = {"quack": "QuACK", "vllm": "vLLM", "sglang": "SGLang"}
ANOTHER = dict.fromkeys(("gate", "router", "permute", "pack", "combine", "routing"), tuple(PEERS)) | {
    "router": ("matmul_cute",)
}


def cute_against_others() -> str:
    """Over all cells of a bench, how many times as long as cute another implementation takes."""
    lines = []
    for bench, another in ANOTHER.items():
        medians = timed(bench).pivot(index="cell", columns="implementation", values="median_us")
        line = {"bench": f"`{bench}`", "cells": str(len(medians))}
        for heading, ways in (("torch", ("torch",)), ("triton", ("triton",)), ("another", another)):
            ratios = [_ratios(medians[way] / medians["cute"], way) for way in ways if way in medians]
            line[heading] = "; ".join(ratios) or "–"
        lines.append(line)
    return table(lines)


def _ratios(ratios: pd.Series, way: str) -> str:
    ratios = ratios.dropna()
    named = "" if way in WAYS else f"`{way}`, {len(ratios)} cells: "
    slower = f", cute slower in {count}" if (count := int((ratios < 1).sum())) else ""
    return named + ranged(stats.gmean(ratios), ratios, slower)


def ranged(middle: float, ratios: pd.Series, more: str = "") -> str:
    """A number between the least and the most of what it stands for."""
    return f"{digits(middle)} ({digits(ratios.min())} to {digits(ratios.max())}{more})"


def stream_shares() -> str:
    """How close to a stream of its own mix of reads and writes a kernel comes: minimum, median and maximum over cells."""
    lines = []
    for bench in ("pack", "combine"):
        rows = timed(bench)
        large = (rows["tokens"] >= 16384) & (rows["hidden"] >= 2048) & (rows["format"] != "fp32")
        balanced = (rows["skew"].fillna(0) == 0) & rows["capacity_factor"].isna() & (rows["layout"] == "compact")
        for (form, top_k), found in rows[large & balanced].groupby(["format", "top_k"]):
            line = {"bench": bench, "format": form, "k": str(top_k), "cells": str(found["cell"].nunique())}
            for way in ("cute", "triton"):
                mine = found[found["implementation"] == way]
                line |= {
                    f"{way}, of the stream": _span(mine["share_of_stream"]),
                    f"{way}, of one as short": _span(mine["share_of_short_stream"]),
                }
            lines.append(line)
    return table(lines)


def _span(shares: pd.Series) -> str:
    shown = [f"{100 * value:.1f}" for value in (shares.min(), shares.median(), shares.max())]
    return f"{', '.join(shown) if len(shares) > 1 else shown[0]} %"


def ceilings() -> str:
    """GB/s of copy, fill and streams of several mixes, the best of the configurations, by the size of a buffer."""
    rows = stored("ceilings.csv")
    kind = rows["kind"].where(rows["kind"] != "stream", rows["reads"].astype(str) + ":" + rows["writes"].astype(str))
    best = rows.assign(kind=kind).pivot_table(index="buffer_gib", columns="kind", values="gb_per_s", aggfunc="max")
    names = {
        "copy": "copy",
        "fill": "fill",
        "1:0": "read only",
        **{mix: mix for mix in ("8:1", "2:1", "1:1", "1:2", "1:8")},
    }
    return table(
        [
            {"buffer": f"{size:g} GiB"} | {heading: f"{row[name]:.0f}" for name, heading in names.items()}
            for size, row in best.iterrows()
        ]
    )


def backward() -> str:
    """Both directions of the differentiable operators at T=16384, H=4096, E=128, compact rows."""
    rows = stored("backward.csv").query("tokens == 16384 and hidden == 4096 and experts == 128 and layout == 'compact'")
    rows = rows[rows["capacity_factor"].isna()]
    lines = []
    for direction in ("pack", "pack_backward", "combine", "combine_backward"):
        for top_k in (2, 8):
            found = rows[(rows["direction"] == direction) & (rows["top_k"] == top_k)].set_index("implementation")
            lines.append(
                {
                    "direction": direction.replace("_", ", "),
                    "k": str(top_k),
                    "triton": digits(found.at["triton", "us"]),
                    "share of a copy": percent(found.at["triton", "share_of_copy"]),
                    "torch": digits(found["us"].get("torch", np.nan)),
                }
            )
    return table(lines)


PROFILED = (("pack", 16384), ("combine", 4096), ("gate", 65536))  # operations and numbers of tokens; the file has more


def profiled() -> str:
    """What Nsight Compute counted, one line per kernel; for pack with k of 1 and 8."""
    return table(
        [
            {
                "bench": f"{row.bench}, {row.implementation}",
                "form": "–" if pd.isna(row.form) else row.form,
                "T": str(row.tokens),
                "H": "–" if pd.isna(row.hidden) else f"{row.hidden:.0f}",
                "E": str(row.experts),
                "k": str(row.top_k),
                "µs": digits(row.duration_us),
                "DRAM read, MB": f"{row.dram_read_mb:.0f}",
                "written, MB": f"{row.dram_write_mb:.0f}",
                "DRAM, of peak": f"{row.dram_percent_of_peak:.0f} %",
                "L2, of peak": f"{row.l2_percent_of_peak:.0f} %",
            }
            for row in stored("ncu.csv").itertuples()
            if (row.bench, row.tokens) in PROFILED and (row.bench != "pack" or row.top_k in (1, 8))
        ]
    )


def software(rows: pd.DataFrame) -> str:
    """Driver and packages that measured rows."""
    one = rows[rows["cutlass_dsl_version"].notna()].iloc[0]
    return (
        f"driver {one['driver']}, torch {one['torch_version']}, triton {one['triton_version']}, "
        f"nvidia-cutlass-dsl {one['cutlass_dsl_version']}"
    )


def stored_cells(name: str = MEASURED) -> str:
    """Where the measured rows come from, in a part of a sentence for each commit with the number of its cards, those of most cells first.

    Their software is named where it is not that of the routing grid.
    """
    lines, usual = [], software(stored(MEASURED))
    for _, rows in stored(name).groupby("git_sha"):
        cards = rows["gpu_uuid"].nunique()
        used = software(rows)
        days = sorted({start[:10] for start in rows["started_at"]})
        cells = rows.groupby(["bench", "cell"]).ngroups
        text = (
            f"{'One' if cards == 1 else cards} {rows['gpu_name'].iloc[0]}, commit {words.commits(rows)}, "
            f"{f'{used}, ' * (used != usual or name == MEASURED)}{' and '.join(days)}, {count(cells, 'cell')}"
        )
        benches = rows["bench"].unique()
        lines.append((cells, text if len(benches) > 1 else f"{text} of `{benches[0]}`"))
    found = [text for _, text in sorted(lines, reverse=True)]
    return "; ".join([found[0], *(text.replace("One ", "another ", 1) for text in found[1:])]) + ".\n"


def platforms() -> str:
    """The same cells on an H200 and an H100: how often the same implementation has the lowest median, how often both runs tell it from the next, and what cute and its floors take longer there."""
    both = run_pages.rows(stored("measurements.parquet"), stored(H100 + "measurements.parquet"))
    best, cute = run_pages.cells(both), both[both["implementation"] == "cute"]
    lines = []
    for bench, cells in best.groupby("bench", sort=False):
        over = 1 / cute.loc[cute["bench"] == bench, ["ratio", "ceiling"]]
        same, told = run_pages.agreement(cells)
        lines.append(
            {
                "bench": f"`{bench}`",
                "cells": str(len(cells)),
                "the same has the lowest time": str(int(same.sum())),
                "both runs tell it from the next": str(int((same & told).sum())),
                "both tell different ones": str(int((~same & told).sum())),
                "cute, H100 over H200": ranged(over["ratio"].median(), over["ratio"]),
                "its floor": ranged(over["ceiling"].median(), over["ceiling"]),
            }
        )
    return table(lines)


def gaps(name: str) -> pd.DataFrame:
    """Rows of two runs with `gap`, the share by which the second median differs from the first."""
    return stored(name).assign(gap=lambda rows: (rows["second_us"] / rows["first_us"] - 1).abs())


def repeat() -> str:
    """How far the medians of the same kernels and code are apart on another card of the same kind, in a sentence."""
    gap = (rows := gaps("repeat.csv"))["gap"]
    return (
        f"The same kernels were measured twice on {_day(rows['first_started_at'])}, on two H200 with three hours between them, by code older than the published rows (`results/nvidia-h200/repeat.csv`): {100 * (gap <= 0.005).mean():.0f} % of {count(len(rows), 'median')} "
        f"are within 0.5 % and {100 * (gap <= 0.02).mean():.1f} % within 2 %; the largest gap is {100 * gap.max():.1f} %.\n"
    )


def repeat_published() -> str:
    """How far the medians of the published rows are from those of the run before, a line per operation."""
    rows = gaps(PUBLISHED)
    lines = []
    for bench, found in (*rows.groupby("bench"), ("all", rows)):
        gap = found["gap"]
        lines.append(
            {
                "bench": f"`{bench}`" if bench != "all" else bench,
                "rows": str(len(found)),
                "cells": str(found["cell"].nunique()),
                "within 0.5 %": f"{100 * (gap <= 0.005).mean():.2f} %",
                "within 2 %": f"{100 * (gap <= 0.02).mean():.2f} %",
                "95th percentile": f"{100 * gap.quantile(0.95):.2f} %",
            }
        )
    return table(lines)


LIKE_OTHERS = (  # kinds of simulated noise whose lines say what others say
    *("correlated, r = 0.3", "correlated, r = 0.8", "r = 0.8, shared by a round", "a step", "spikes"),
    *("3 blocks, r = 0.5", "6 blocks", "6 blocks, r = 0.5", "10 blocks, r = 0.5", "10 blocks, r = 0.9"),
    "long turns that differ, heavy tails",
    *("long turns, r = 0.9 within", "long turns, drift"),
)


def coverage() -> str:
    """How often intervals cover the truth, equals are called different, and slowdowns are found, by kind of simulated noise (docs/coverage.py)."""
    shown = {
        "alone": "a row alone",
        "given": "given",
        "time": "times",
        "ratio": "ratios",
        "false": "equals told apart",
        "1%": "1 % found",
        "2%": "2 %",
    }
    lines = pd.read_csv(ROOT / "docs/coverage.csv").query("noise not in @LIKE_OTHERS")
    return table(
        [
            {"noise": line["noise"]}
            | {title: "–" if hidden(line, name) else f"{100 * line[name]:.1f}" for name, title in shown.items()}
            for line in lines.to_dict("records")
        ]
    )


def hidden(line: dict[str, float], name: str) -> bool:
    """Whether too few pairs have an interval for a share of theirs."""
    return name in ("time", "ratio") and line["given" if name == "time" else "ratios given"] < 0.2


def equals() -> str:
    """How far implementations that take part twice come out, and how often they are called different (docs/twins.py); the noise of a ratio, and how
    often a small difference is found (docs/power.py)."""
    runs = [pd.read_parquet(path) for path in sorted((ROOT / "results").glob("nvidia-h200*/measurements.parquet"))]
    lines = twins.lines(twins.known(ROOT / "results/nvidia-h200", pd.concat(runs, ignore_index=True)))
    power = pd.read_csv(ROOT / "docs/power.csv").set_index("kind")
    shown = {
        "noise of blocks": ("blocks", 2),
        "of turns": ("turns", 2),
        "1 % found": ("1%", 0),
        "80 % from": ("least", 1),
    }
    for line in lines:
        for title, (column, digits) in shown.items():
            value = power[column].get(line["kind"], np.nan)
            line[title] = "–" if np.isnan(value) else f"{100 * value:.{digits}f}"
    return table(lines)


def repeatability() -> str:
    """How many medians of the published rows are near those of the run before, in a sentence."""
    rows = gaps(PUBLISHED)
    grid = rows[rows["bench"] != "layer"]["gap"]
    return (
        f"The published rows were not measured twice by the same code. Compared with the run before, by the code of {_day(rows['first_started_at'])} on another card, "
        f"{percent((grid <= 0.005).mean())} of {count(len(grid), 'median')} are within 0.5 % and {percent((grid <= 0.02).mean())} within 2 % ([method](method.md#verdicts)).\n"
    )


def _day(times: pd.Series) -> str:
    return str(times.min())[:10]


_ROWS = "hidden == 4096 and format == 'bf16' and layout == 'compact'"
STAGES = (
    ("gate", "k=8, fp32 scores", "top_k == 8 and dtype == 'fp32' and router == 'softmax_topk_renorm'"),
    ("permute", "k=8", "top_k == 8 and layout == 'compact'"),
    ("pack", "H=4096, k=2, bf16", f"top_k == 2 and {_ROWS}"),
    ("pack", "H=4096, k=8, bf16", f"top_k == 8 and {_ROWS}"),
    ("combine", "H=4096, k=2, bf16", f"top_k == 2 and {_ROWS}"),
    ("combine", "H=4096, k=8, bf16", f"top_k == 8 and {_ROWS}"),
    ("routing", "H=2048, k=8, bf16", "top_k == 8 and hidden == 2048 and model.isna()"),
)


def stages() -> str:
    """One line per operation at T=16384, E=128."""
    lines = []
    for bench, shape, where in STAGES:
        rows = plain(bench, f"tokens == 16384 and experts == 128 and {where}").set_index("implementation")
        assert rows.index.is_unique, f"{bench}, {shape}: more than one cell"
        cute, rivals = rows.loc["cute"], rows.loc[~rows.index.isin(origins.ours(bench)), "median_us"]
        fastest = rivals.idxmin()
        lines.append(
            {
                "stage": "all four in a row" if bench == "routing" else bench,
                "shape": shape,
                **{way: time(rows, way, " µs") for way in WAYS},
                **{name: time(rows, way, " µs") for way, name in PEERS.items()},
                "cute, share of the copy bandwidth": percent(cute["share_of_copy"]),
                "cute, against the fastest rival": f"{digits(rivals[fastest] / cute['median_us'])}x ({PEERS.get(fastest, f'`{fastest}`')})",
            }
        )
    absent = {name for name in PEERS.values() if all(line[name] == "–" for line in lines)}
    return explained(table([{name: value for name, value in line.items() if name not in absent} for line in lines]))


FORMAT_WAYS = ("dequant_cute", "cute_quantised", "humming", "marlin", "mslk_int4")
FLOAT_WAYS = (
    "dequant_cute",
    "cute_quantised",
    "cute_fp8",
    "humming",
    "marlin",
    "deepgemm_fp8",
    "mslk_fp8",
    "scaled_grouped_mm",
)


def quantised(run: str, ways: Sequence[str] = FORMAT_WAYS) -> str:
    """One line per cell of `experts` with quantised weights: the time of each way, and of our kernel with weights of 16 bits in the same run;
    of one that is wrong the line says so. The last column is of the one of ours among `ways` that takes the cell."""
    rows = stored(run + "measurements.parquet").query("bench == 'experts'")
    plain = rows[(rows["weights"] == rows["dtype"]) & (rows["implementation"] == "cute")].set_index(["model", "tokens"])
    ours = [way for way in ways if way in (format_bars.QUANTISED, format_bars.FP8)]
    share = f"`{ours[0]}`, of reading" if len(ours) == 1 else "ours, of reading"
    several, lines = rows["packed"].nunique() > 1, []
    models = rows["model"].nunique() > 1
    for _, cell in rows[rows["weights"] != rows["dtype"]].groupby("cell", sort=False):
        found, first = cell.set_index("implementation"), cell.iloc[0]
        line = {"model": first["model"]} if models else {}
        line |= {"T": str(first["tokens"]), "weights": f"`{first['weights']}`"}
        if several:
            line["rows"] = first["packed"] if first["layout"] == "compact" else f"{first['packed']}, in blocks"
        for way in ways:
            wrong = way in found.index and found.at[way, "status"] == "incorrect"
            line[f"`{way}`"] = "wrong" if wrong else time(found, way)
        near = plain.loc[[(first["model"], first["tokens"])]].set_index("implementation")
        line[f"`cute`, {first['dtype']}"] = time(near, "cute")
        shares = [
            share_of_mixed(row)
            for _, row in found.loc[found.index.intersection(ours)].dropna(subset="gb_per_s").iterrows()
        ]
        lines.append(line | {share: percent(max(shares, default=math.nan))})
    return explained(table(lines))


SHOWN_REGRET = 0.01


def choices() -> str:
    """What `auto` chooses for every stored layer with a regret, and the regret; under it the means and the worst of all stored layers."""
    found = table_of_choices.load()
    lines = regret.lines(found, found)
    chosen = table(
        [
            {
                "cell": line.entry.label + (" (suspect)" if line.suspect else ""),
                "best (of ours)": f"`{line.best}`" + f" (`{line.best_own}`)" * (line.best != line.best_own),
            }
            | {
                kind: f"`{one.name}`: {one.own:.1%} ({one.all:.1%})"
                for kind, one in zip(regret.KINDS, line.choices, strict=True)
            }
            for line in lines
            if any(max(choice.own, choice.all) >= SHOWN_REGRET for choice in line.choices)
        ]
    )
    said = [f"{one.what}: {one.mean:.1%}, {one.worst:.1%}" for one in regret.summaries(lines)]
    fixed = regret.always(lines)[0]
    return (
        f"{chosen}\nOver {len(lines)} cells, {sum(line.suspect for line in lines)} of them suspect, mean and worst: {'; '.join(said)}. "
        f"Always `{fixed.what}`: {fixed.mean:.1%}, {fixed.worst:.1%} over {fixed.cells} cells.\n"
    )


@cache
def runs() -> dict[str, pd.DataFrame]:
    """The rows of every stored run of the H200, by its name."""
    files = sorted(RESULTS.parent.glob("nvidia-h200*/measurements.parquet"))
    return {_run(path): records.frame(records.read(path)) for path in files}


def runs_of_layers() -> dict[str, pd.DataFrame]:
    """Without runs of one or two layers, whose mean says little: their own reports have it."""
    return {
        name: rows for name, rows in runs().items() if rows[rows["bench"] == "layer"]["cell"].nunique() not in (1, 2)
    }


def matrices() -> dict[str, pd.DataFrame]:
    """The accuracy matrix of every stored run of the H200 that has one, by the run's name."""
    files = sorted(RESULTS.parent.glob("nvidia-h200*/accuracy.parquet"))
    return {_run(path): companions.read_matrix(path, "nvidia-h200").to_pandas() for path in files}


def _run(path: Path) -> str:
    return path.parent.name.partition(".")[2] or "–"


def bars(lines: Sequence[BarLine]) -> str:
    """A line per bar that is not reached: what was fixed, what is measured with its interval and its worst cell, and the verdict; then the others in short.

    Reports have the best cell, how cells of a mean differ, and means with suspect cells, too. A bar that is open in more than two places has one line.
    """
    several = any(line.where not in ("", "–") for line in lines)
    merged = _merged(lines)
    others = [line for line in merged if line.verdict not in REACHED]
    reached = "".join(f"- {_in_short(line)}\n" for line in merged if line.verdict in REACHED)
    return "\n".join(
        part
        for part in (
            _bar_table(others, several),
            reached and f"Reached (`moe-routing-bench targets` prints the intervals):\n\n{reached}",
        )
        if part
    )


REACHED = ("reached", "reached, and the stretch")


def _in_short(line: BarLine) -> str:
    """A bar that is reached, with what is measured, without intervals; a bar for each cell has its worst cell."""
    others = r"; best: .*$| \[[^]]+\]" if "each" in line.bar else r"; (?:worst|best): .*$| \[[^]]+\]"
    part, _, total = line.cells.partition(" of ")
    cells = [] if line.cells == "1 of 1" else [f"{part if part == total else line.cells} cells"]
    where = [line.where] if line.where not in ("", "–") else []
    stretch = f" and stretch {line.stretch}" if line.verdict == REACHED[1] else ""
    measured = _mean(re.sub(others, "", _measured(line)))
    bars = _mean(f"bar {line.bar}{stretch}")
    if measured.startswith("mean "):
        bars = bars.replace("mean ", "")
    return f"{line.what}: {'; '.join([measured, *cells, *where])}; {bars}."


def _bar_table(lines: Sequence[BarLine], several: bool) -> str:
    if not lines:
        return ""
    return table(
        [
            {
                "what": line.what,
                "bar (stretch)": _mean(line.bar + (f" ({line.stretch})" if line.stretch != "–" else "")),
                "measured": _mean(_measured(line)),
                "cells": line.cells + (f"; left out: {line.left_out}" if line.left_out != "–" else ""),
            }
            | ({"run": _CARD.sub(r"\1", line.where) or "–"} if several else {})
            | {"verdict": line.verdict}
            for line in lines
        ]
    )


def _measured(line: BarLine) -> str:
    """What is measured, without what only reports and kernels.md have, and without the names of our implementations, which the bar names."""
    missed = line.measured.rpartition("; ")[2].removesuffix(" the bar of each")
    if line.measured.startswith("k=1: ") and "miss" in missed:
        return f"{missed} ([by k](kernels.md#pack-and-combine))"
    alone = _ALONE.sub("", line.measured) if line.cells == "1 of 1" else line.measured
    return _OURS.sub(lambda found: f" ({found[1]})" if found[1] else "", _ELSEWHERE.sub("", alone))


def _merged(lines: Sequence[BarLine]) -> list[BarLine]:
    """The lines, with those of a bar that several cards or codes leave open as one without figures: none of them decides it."""
    merged: dict[tuple[str, str], list[BarLine]] = {}
    for line in lines:
        merged.setdefault((line.what, line.bar), []).append(line)
    return [several for (_, _), group in merged.items() for several in ([_open(group)] if _all_open(group) else group)]


def _all_open(group: Sequence[BarLine]) -> bool:
    return len(group) > 2 and {line.verdict for line in group} == {"open"}


def _open(group: Sequence[BarLine]) -> BarLine:
    """One line for all parts of an open bar, with the cells of each."""
    total = group[0].cells.rpartition(" of ")[2]
    cells = f"{' + '.join(line.cells.partition(' of ')[0] for line in group)} of {total}"
    runs = " and ".join(dict.fromkeys(line.where.partition(",")[0] for line in group))
    return replace(group[0], measured="on several cards or by several codes", cells=cells, where=runs, left_out="–")


_OURS = re.compile(r" ?\((?:cute|cute_quantised|cute_fp8|ops)(?:, ([^()]*))?\)")
_CARD = re.compile(r"(GPU-[0-9a-f]{8})[0-9a-f-]*")
_ALONE = re.compile(r" in the geometric mean; worst: .*")
_ELSEWHERE = re.compile(
    r" \(of a stream as short: [^)]*\)|, of a stream as short: [^)]*(?=\))|; with the suspect cells: .*| of cells that differ in [^;]+(?=;)|; best: .*?(?=;|$)"
)


def _mean(text: str) -> str:
    """The text with `mean` in front of a number in place of words behind it."""
    return re.sub(r"((?:[≤≥] )?[\d.]+x(?: \[[^]]+\])?) in the geometric mean", r"mean \1", text)


def routing_lines() -> list[BarLine]:
    """The bars of the routing grid; reports of the seeds have those of their own runs."""
    return [line for line in reached.lines(routing_bars.BARS, runs(), absent=True) if line.where in ("", "–")]


def layer_lines() -> list[BarLine]:
    """The bars of layers and models: not those of `auto`, whose regret measurements.md has, nor those that count QuACK's kernels as ours."""
    shown = [bar for bar in layer_bars.BARS if not bar.what.startswith(("auto", "layer, QuACK"))]
    return reached.lines(shown, runs_of_layers(), absent=True)


def products() -> str:
    """The grouped products of our kernel and of QuACK where both were timed: the best of the tiles that were tried."""
    rows = stored(LAYERS + "products.csv")
    axes = ["tokens", "hidden", "intermediate", "experts", "top_k"]
    rows = rows[rows["product"].isin(("up", "up, gathered", "down"))]
    best = (
        rows.pivot_table(index=axes, columns=["kernel", "product"], values="us", aggfunc="min").dropna().reset_index()
    )
    return table(
        [
            {SYMBOLS[axis]: str(line[(axis, "")]) for axis in axes}
            | {
                f"{product}, {kernel}": digits(line[(kernel, product)])
                for product, kernel in (
                    ("up", "cute"),
                    ("up", "quack"),
                    ("up, gathered", "cute"),
                    ("up, gathered", "quack"),
                    ("down", "cute"),
                    ("down", "quack"),
                )
            }
            for line in best.to_dict("records")
        ]
    )


def few_rows() -> str:
    """Our grouped products where an expert has few rows: time and the bandwidth of the weights, the best of the tiles that were tried."""
    rows = stored(LAYERS + "products.csv").query("weights_gb_per_s.notna() and tokens <= 512")
    best = rows.loc[rows.groupby(["hidden", "tokens", "product"])["us"].idxmin()]
    lines = []
    for (hidden, tokens), found in best.groupby(["hidden", "tokens"]):
        line = {
            "H": str(hidden),
            "E": str(found["experts"].iloc[0]),
            "k": str(found["top_k"].iloc[0]),
            "T": str(tokens),
        }
        for product in ("up", "down"):
            one = found[found["product"] == product].iloc[0]
            line |= {
                product: digits(one["us"]),
                f"{product}, GB/s of weights": f"{one['weights_gb_per_s']:.0f}",
                f"{product}, tile": f"{one['tile_rows']} x {one['tile_columns']}",
            }
        lines.append(line)
    return table(lines)


@cache
def study() -> pd.DataFrame:
    """The final rows of study A0's causal rules, of all entries: they have the same text, tokens and active FLOPs, but for the dense model of equal parameters."""
    rows = compare.finals(run_rows.read(RESULTS / "quality.parquet").to_pandas())
    rows = rows[rows["causal"].astype(bool) & (compare.refusals(rows) == "")]
    dense = rows["router"] == "dense"
    named = rows["contestant"].where(
        ~dense, "dense, equal " + rows["match"].map({"active_flops": "FLOPs"}).fillna("parameters")
    )
    return rows.assign(contestant=named)


def quality() -> str:
    """Bits per byte after the last step, adjusted for the seeds that a rule lacks, with Tukey's letters; the best first."""
    by_seed = family.by_seed(study(), compare.METRIC)
    found = family.family(by_seed)
    names = sorted(by_seed.columns, key=found.means.__getitem__)
    letters = family.letters(found, names)
    halves = (names[: -(-len(names) // 2)], names[-(-len(names) // 2) :])
    cells = [
        [(f"`{name}`" if "dense" not in name else name, f"{found.means[name]:.3f}", letters[name]) for name in half]
        for half in halves
    ]
    rows = [("rule", "bits", "letters") * 2, ["---"] * 6]
    rows += [one + other for one, other in itertools.zip_longest(*cells, fillvalue=("",) * 3)]
    return "".join(f"| {' | '.join(row)} |\n" for row in rows)


def told_apart() -> str:
    """How many pairs of these rules are different, equivalent and undecided, what noise the runs have, and which runs are far from the others."""
    by_seed = family.by_seed(study(), compare.METRIC)
    found = family.family(by_seed)
    numbers = ", ".join(f"{sum(pair.verdict == word for pair in found.pairs)} {word}" for word in family.VERDICTS)
    first = set(sorted(by_seed.columns, key=found.means.__getitem__)[:2])
    seeds = by_seed.count()
    fewer = f", {seeds.min()} of {', '.join(seeds.index[seeds < seeds.max()])}" if seeds.min() < seeds.max() else ""
    (best,) = (pair.statement for pair in found.pairs if {pair.better, pair.worse} == first)
    return f"Pairs, by Tukey and TOST in a rule + seed ANOVA (noise {found.noise:.4f}): {numbers}; {best}. n = {seeds.max()} seeds{fewer}. {family.told_far(by_seed, found)}.\n"


def formats_in_models() -> str:
    """What experts in each format add to the bits per byte of trained models, by rule; without formats that add less than 0.001 in all."""
    found = trained_rules.altered_costs(run_rows.read(RESULTS / (QUALITY_FORMATS + "quality.parquet")).to_pandas())[0]
    lines = []
    for rule, trained, added in found.lines:
        by_format = {f"`{name}`": cost for name, cost in zip(found.names, added, strict=True)}
        lines.append({"rule": f"`{rule}`", "as trained": trained} | by_format)
    cheap = {
        name
        for name in lines[0]
        if name.startswith("`") and all(float(line[name].split()[0]) < 0.001 for line in lines)
    }
    lines = [{name: cost for name, cost in line.items() if name not in cheap} for line in lines]
    return table(lines)


_GATE = "router == 'softmax_topk_renorm' and top_k == 8"
_PERMUTE = "layout == 'compact' and top_k == 8 and experts == 128"
BLOCKS: Mapping[str, Callable[[], str]] = {
    "stored-cells": stored_cells,
    "stored-training": partial(stored_cells, TRAINING + "measurements.parquet"),
    "stored-model": partial(stored_cells, MODEL + "measurements.parquet"),
    "stored-quantised": partial(stored_cells, QUANTISED + "measurements.parquet"),
    "quantised": partial(quantised, QUANTISED),
    "stored-quantised-decode": partial(stored_cells, QUANTISED_DECODE + "measurements.parquet"),
    "quantised-decode": partial(quantised, QUANTISED_DECODE),
    "stored-quantised-floats": partial(stored_cells, QUANTISED_FLOATS + "measurements.parquet"),
    "quantised-floats": partial(quantised, QUANTISED_FLOATS, FLOAT_WAYS),
    "choices": choices,
    "routing-bars": lambda: bars(routing_lines()),
    "bars": lambda: bars(layer_lines()),
    "format-bars": lambda: bars(format_bars.lines(runs(), matrices(), absent=True)),
    "formats-in-models": formats_in_models,
    "products": products,
    "few-rows": few_rows,
    "stages": stages,
    "quality": quality,
    "quality-told": told_apart,
    "ceilings": ceilings,
    "cute-against-others": cute_against_others,
    "stream-shares": stream_shares,
    "backward": backward,
    "profiled": profiled,
    "coverage": coverage,
    "equals": equals,
    "repeat": repeat,
    "repeat-published": repeat_published,
    "repeatability": repeatability,
    "platforms": platforms,
    "stored-h100": partial(stored_cells, H100 + "measurements.parquet"),
    "gate-times": partial(times, "gate", ("dtype", "tokens"), f"{_GATE} and experts == 128", (*WAYS, "quack")),
    "gate-experts": partial(times, "gate", ("dtype", "experts"), f"{_GATE} and tokens == 16384", (*WAYS, "quack")),
    "rule-times": partial(times, "gate", ("router",), "tokens == 16384 and experts == 256 and top_k == 8"),
    "router-times": partial(
        times, "router", ("experts", "hidden", "tokens"), "dtype == 'bf16'", ("torch", "matmul_cute", "triton", "cute")
    ),
    "permute-times": partial(times, "permute", ("tokens",), _PERMUTE),
    "routing-times": partial(times, "routing", ("tokens",), "hidden == 2048 and experts == 128 and model.isna()"),
    "fp8-times": partial(
        times,
        "pack",
        ("format",),
        "format in ('fp8_row', 'fp8_block128')",
        ("torch", "torch_compile", "triton", "cute"),
    ),
}
