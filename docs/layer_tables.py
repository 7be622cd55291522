"""The tables of whole layers: each way's time in every measured cell, and what `auto` runs against the fastest rival.

Ours in these tables is what `auto`, and so `ops.layer`, runs. A rival is every implementation with kernels of another package, torch included;
our routing around the products of another package is one, too, and is named.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial

import pandas as pd
import stored_tables
from scipy import stats
from stored_tables import (
    DECODE,
    LAYERS,
    MODEL,
    SYMBOLS,
    TRAINING,
    digits,
    explained,
    percent,
    stored_cells,
    table,
    time,
)

from moe_routing_bench.benches.layer.auto import AUTO
from moe_routing_bench.benches.registry import BENCHES
from moe_routing_bench.ceilings import share_of_mixed
from moe_routing_bench.comparison import choices as layer_choices
from moe_routing_bench.comparison import origins, regret
from moe_routing_bench.figures import row_groups
from moe_routing_bench.quantities import count, energy
from moe_routing_kernels.choices import table as table_of_choices

BENCH = "layer"
BASELINE = BENCHES[BENCH].baseline
WAYS = ("torch_grouped_mm", "cute", "cute_gather", "cute_dependent", "cute_quack_gather", "triton_gather", "sonicmoe")
TRAINERS = ("sonicmoe",)  # made for training: rows of it say little of what people run to decode
SERVERS = {"vllm": "vLLM", "sglang": "SGLang"}  # how the names of their kernels for experts begin


def shape(row: pd.Series) -> str:
    """What a row was measured on: the model or the sizes, shared experts, and loads that are not balanced."""
    sizes = ", ".join(f"{SYMBOLS[axis]}={row[axis]}" for axis in ("hidden", "intermediate", "experts", "top_k"))
    uneven = f", loads that vary by {row['skew']:g}" if row["skew"] else ""
    shared = "" if pd.isna(row.get("shared_intermediate")) else ", with shared experts"
    return (sizes if pd.isna(row["model"]) else row["model"]) + shared + uneven


def measured(phase: str) -> pd.DataFrame:
    """The rows of a phase with a time, but for those of `auto`, which are of one of the others."""
    rows = stored_tables.stored((DECODE if phase == "decode" else LAYERS) + "measurements.parquet")
    return rows[
        (rows["bench"] == BENCH)
        & (rows["status"] == "ok")
        & (rows["implementation"] != AUTO)
        & (rows["phase"] == phase)
    ]


def chosen(cell: pd.DataFrame) -> str:
    """What `auto` runs in a cell, among ours that were measured there."""
    mine = cell[cell["implementation"].isin(origins.ours(BENCH))]
    (entry,) = layer_choices.entries(mine, "")
    (line,) = regret.lines([entry], table_of_choices.load())
    return line.choices[0].name


def rivals(cell: pd.DataFrame) -> pd.Series:
    """The times of all that is not ours in a cell, by implementation."""
    return cell[~cell["implementation"].isin(origins.ours(BENCH))].set_index("implementation")["median_us"]


def layers(phase: str) -> str:
    """One line per layer that was measured in a phase, with what `auto` runs against its fastest rival; below it what the lines say together."""
    rows = measured(phase)
    lines = []
    ways = [way for way in WAYS if way in set(rows["implementation"])]
    for _, cell in rows.groupby("cell", sort=False):
        found, first = cell.set_index("implementation"), cell.iloc[0]
        others, mine = rivals(cell), chosen(cell)
        line = {"layer": shape(first), "T": str(first["tokens"])}
        line |= {f"`{way}`": time(found, way) for way in ways}
        line["`auto` (ours) runs"] = f"`{mine}`"
        line["against the fastest rival"] = (
            f"{digits(others.min() / found.at[mine, 'median_us'])}x (`{others.idxmin()}`)"
        )
        if phase == "decode":
            line["of reading"] = percent(share_of_mixed(found.loc[mine]))
        else:
            line |= {
                "over dense products": digits(found.at[mine, "over_dense"]),
                "mJ per token": energy(found.at[mine, "energy_mj_per_token"]),
            }
        lines.append(line)
    shown = explained(table(sorted(lines, key=lambda line: (line["layer"], int(line["T"])))))
    return "\n".join([shown, *together(even(rows))])


HEADLINE = {
    "qwen3-30b-a3b": (4096, 16384),
    "qwen3-next-80b-a3b": (16384,),
    "olmoe-1b-7b": (16384,),
    "deepseek-v3": (8192,),
    "gpt-oss-120b": (16384,),
    "mixtral-8x7b": (8192,),
}


def headline() -> str:
    """One line per layer of `HEADLINE`: what `auto` runs, its fastest rival and the baseline; below it the means over all layers with even loads."""
    rows, lines = even(measured("prefill")), []
    for model, tokens in ((model, tokens) for model, several in HEADLINE.items() for tokens in several):
        cell = rows[(rows["model"] == model) & (rows["tokens"] == tokens)]
        assert cell["cell"].nunique() == 1, f"{model}, T={tokens}: not one cell"
        times, ours, fastest = cell.set_index("implementation"), chosen(cell), rivals(cell).idxmin()
        lines.append(
            {
                "layer": model,
                "T": str(tokens),
                "`ops.layer`": time(times, ours),
                "fastest rival": f"{time(times, fastest)} (`{fastest}`)",
                f"`{BASELINE}`": time(times, BASELINE),
                "speed-up over the rival": f"{digits(times.at[fastest, 'median_us'] / times.at[ours, 'median_us'])}x",
            }
        )
    return "\n".join([explained(table(lines)), *together(rows), decoding("qwen3-30b-a3b")])


def decoding(model: str) -> str:
    """At which share of the bandwidth of reads `auto` reads the weights of a model, in a sentence."""
    rows = even(measured("decode")).query("model == @model").sort_values("tokens")
    shares = [share_of_mixed(cell.set_index("implementation").loc[chosen(cell)]) for _, cell in rows.groupby("tokens")]
    tokens = row_groups.words([str(tokens) for tokens in sorted(rows["tokens"].unique())])
    return f"Decoding: with {tokens} tokens of {model}, `ops.layer` reads weights at {row_groups.words([percent(share) for share in shares])} of the bandwidth that reads alone reach.\n"


def even(rows: pd.DataFrame) -> pd.DataFrame:
    """The rows of cells with even loads."""
    return rows[~(rows["skew"] > 0)]


def together(rows: pd.DataFrame) -> list[str]:
    """What the cells of one phase say together; nothing of a single cell.

    The lead over the fastest rival is given over all cells and over those with another rival than torch; where the only such rivals are made
    for training and the cells are of decoding, it is left out.
    """
    cells = [cell for _, cell in rows.groupby("cell", sort=False)]
    if len(cells) < 2:
        return []
    ahead = [_over(cell, rivals(cell).min()) for cell in cells]
    others = [origins.besides_torch(BENCH, cell["implementation"]) for cell in cells]
    packages = pd.Series([name for names in others for name in names], dtype=object).value_counts(sort=False)
    names = sorted(packages.index, key=lambda name: (-packages[name], name))
    torch = stats.gmean([_over(cell, rivals(cell)[BASELINE]) for cell in cells])
    said = [f"Rivals: torch in every layer{''.join(f', `{name}` in {packages[name]}' for name in names)}."]
    if set(rows["phase"]) == {"decode"} and set(names) <= set(TRAINERS):
        said.append(
            f"{row_groups.words([f'`{name}`' for name in names])} is a library made for training, so no lead over what people run to decode follows from these rows."
            if names
            else "So no lead over what people run to decode follows from these rows."
        )
    else:
        wide = [one for one, names_there in zip(ahead, others, strict=True) if names_there]
        over = (
            f"; over the {len(wide)} with another rival than torch {digits(stats.gmean(wide))}x"
            if 1 < len(wide) < len(ahead)
            else ""
        )
        said.append(
            f"Speed-up of what `auto` runs, geometric mean over {count(len(cells), 'layer')} with even loads: {digits(stats.gmean(ahead))}x the fastest rival (least {digits(min(ahead))}x){over}; {digits(torch)}x `{BASELINE}`."
        )
    said += _absent(rows)
    doubted = sum(bool((cell["suspect"] == True).any()) for cell in cells)  # noqa: E712
    if doubted:
        said.append(f"{doubted} of the {len(cells)} have suspect rows.")
    return [" ".join(said) + "\n"]


def _over(cell: pd.DataFrame, us: float) -> float:
    return us / cell.set_index("implementation").at[chosen(cell), "median_us"]


def _absent(rows: pd.DataFrame) -> list[str]:
    """Which of the libraries that serve models have no kernel for experts among the rows, in a sentence."""
    names = set(rows["implementation"])
    lacking = [name for start, name in SERVERS.items() if not any(one.startswith(start) for one in names)]
    port = " (`flag_gems` is a port of vLLM's without its table of tiles)" * (
        "vLLM" in lacking and "flag_gems" in names
    )
    return [f"The kernels of {' and '.join(lacking)} for experts are not among them yet{port}."] if lacking else []


def others(run: str, ways: Sequence[str]) -> str:
    """One line per cell of a run: the time of each way, of which `ops` is ours, and how many times as long the fastest other takes."""
    rows = stored_tables.stored(run + "measurements.parquet").query("status == 'ok'")
    lines = []
    for _, cell in rows.groupby("cell", sort=False):
        found, first = cell.set_index("implementation"), cell.iloc[0]
        medians = found["median_us"]
        line = {"model": first["model"], "phase": first["phase"], "T": str(first["tokens"])}
        line |= {f"`{way}`": time(found, way) for way in ways}
        best = medians.drop("ops")
        lines.append(
            line | {"`ops`, against the best other": f"{digits(best.min() / medians['ops'])}x (`{best.idxmin()}`)"}
        )
    return explained(table(lines))


def all_layers() -> str:
    """Every implementation of the layers that most were measured of, in the order of their times."""
    rows = stored_tables.stored(LAYERS + "measurements.parquet").query("bench == 'layer'")
    several = [cell for _, cell in rows.groupby("cell") if len(cell) > len(WAYS)]
    lines = []
    for cell in sorted(several, key=lambda cell: cell["tokens"].iloc[0]):
        best, found = cell["median_us"].min(), cell.set_index("implementation")
        for _, row in cell.sort_values("median_us").iterrows():
            line = {"layer": row["model"], "T": str(row["tokens"]), "implementation": f"`{row['implementation']}`"}
            line |= {
                "version": "–" if pd.isna(row["implementation_version"]) else row["implementation_version"],
                "µs": time(found, row["implementation"]),
                "over the fastest": digits(row["median_us"] / best),
            }
            line |= {
                "over dense products": digits(row["over_dense"]),
                "mJ per token": energy(row["energy_mj_per_token"]),
            }
            lines.append(line)
    return explained(table(lines))


BLOCKS: Mapping[str, Callable[[], str]] = {
    "stored-layers": partial(stored_cells, LAYERS + "measurements.parquet"),
    "stored-decode": partial(stored_cells, DECODE + "measurements.parquet"),
    "headline": headline,
    "layers": partial(layers, "prefill"),
    "all-layers": all_layers,
    "decode": partial(layers, "decode"),
    "training": partial(
        others, TRAINING, ("torch_grouped_mm", "transformers_grouped_mm", "liger", "moe_ops", "sonicmoe", "ops")
    ),
    "models": partial(
        others, MODEL, ("transformers_eager", "transformers_batched_mm", "transformers_grouped_mm", "ops")
    ),
}
