"""The tables of whole layers: each way's time in every measured cell, and what `auto` runs against the fastest rival.

Ours in these tables is what `auto`, and so `ops.layer`, runs. A rival is every implementation with kernels of another package, torch included;
our routing around the products of another package is one, too, and is named.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import groupby

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

from moe_routing_bench.benches.registry import BENCHES
from moe_routing_bench.comparison import origins, regret
from moe_routing_bench.figures import row_groups
from moe_routing_bench.measure.completion import share_of_mixed
from moe_routing_bench.quantities import count, energy
from moe_routing_kernels import choices as table_of_choices

BENCH = "layer"
SERVED, PUBLISHED = ("served",), ("published", "published-more")  # runs
FEW = 64  # tokens: decoding, next to prefill from 1024 on
BASELINE = BENCHES[BENCH].baseline
PRODUCTION = {  # what people run to serve these models, and how a table names it; absent: no row yet
    "vllm_triton": "vLLM's Triton kernel",
    "sglang_triton": "SGLang's Triton kernel",
    "flashinfer": "FlashInfer's CuTe DSL kernel",
    "trtllm_cutlass": "TensorRT-LLM's CUTLASS kernel",
}
OF_SERVERS = {*PRODUCTION, *(f"{name}_fp8" for name in PRODUCTION)}
WAYS = (
    *("torch_grouped_mm", "cute", "cute_gather", "cute_dependent", "cute_quack_gather", "triton_gather", "sonicmoe"),
    *PRODUCTION,
)
MANY = 7  # implementations, from which on a layer has all of them in a table
TRAINERS = ("sonicmoe",)  # made for training: rows of it say little of what people run to decode
NO_ROW = "no row"


def shape(row: pd.Series) -> str:
    """What a row was measured on: the model or the sizes, shared experts, and loads that are not balanced."""
    sizes = ", ".join(f"{SYMBOLS[axis]}={row[axis]}" for axis in ("hidden", "intermediate", "experts", "top_k"))
    uneven = f", loads that vary by {row['skew']:g}" if row["skew"] else ""
    shared = "" if pd.isna(row.get("shared_intermediate")) else ", with shared experts"
    return (sizes if pd.isna(row["model"]) else row["model"]) + shared + uneven


def measured(phase: str, run: str = "") -> pd.DataFrame:
    """The rows of a phase with a time, of its own run by default; those of `auto` are rows of what it ran."""
    own = DECODE if phase == "decode" else LAYERS
    rows = stored_tables.stored((f"../nvidia-h200.{run}/" if run else own) + "measurements.parquet")
    timed = rows[(rows["bench"] == BENCH) & (rows["status"] == "ok") & (rows["phase"] == phase)]
    return regret.as_chosen(timed)


def with_servers(phase: str) -> pd.DataFrame:
    """The rows of a phase with even loads. Where no kernel that serves models was measured in a cell, those of the same layer in a run that has one."""
    found = even(measured(phase))
    for run in PUBLISHED:
        there = even(measured(phase, run))
        lacking = set(found["cell"]) - _served_cells(found)
        taken = lacking & _served_cells(there)
        found = pd.concat([found[~found["cell"].isin(taken)], there[there["cell"].isin(taken)]], ignore_index=True)
    return found


def _served_cells(rows: pd.DataFrame) -> set[str]:
    """The cells in which a kernel that serves models has a time."""
    return set(rows.loc[rows["implementation"].isin(PRODUCTION), "cell"])


def failed(phase: str) -> pd.DataFrame:
    """The rows of a phase that have no time, because the implementation crashed or was wrong; with even loads."""
    rows = stored_tables.stored((DECODE if phase == "decode" else LAYERS) + "measurements.parquet")
    without = rows["status"].isin(("crashed", "incorrect", "timeout"))
    return even(rows[(rows["bench"] == BENCH) & (rows["phase"] == phase) & without])


def chosen(cell: pd.DataFrame) -> str:
    """What `auto` runs in a cell, among ours that were measured there."""
    name = regret.runs(cell, table_of_choices.load())
    assert name is not None, f"{cell['cell'].iloc[0]}: none of ours was measured"
    return name


def rivals(cell: pd.DataFrame) -> pd.Series:
    """The times of all that is not ours in a cell, by implementation."""
    others = cell[~cell["implementation"].isin(origins.ours(BENCH))]
    return others.set_index("implementation", drop=False)["median_us"]


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
                "over dense GEMMs": digits(found.at[mine, "over_dense"]),
                "mJ per token": energy(found.at[mine, "energy_mj_per_token"]),
            }
        lines.append(line)
    shown = explained(table(sorted(lines, key=lambda line: (line["layer"], int(line["T"])))))
    return "\n".join([shown, *together(even(rows))]).rstrip() + f"{_without(failed(phase))}\n"


FIRST, OF_FIRST = "qwen3-30b-a3b", (1, 64, 4096)
QUANTISED = ("deepseek-v3", "e4m3_block128", 64)  # the cell of the headline with weights as a model is published


def headline() -> str:
    """Four layers: one model by the number of tokens, and another in the format that it is published in; below them what all layers of a phase say."""
    both = [with_servers(phase) for phase in ("decode", "prefill")]
    rows = pd.concat([phase[phase["cell"].notna()] for phase in both])
    lines = []
    for tokens in OF_FIRST:
        cell = _cell(rows, FIRST, tokens)
        lines.append(_headline(f"{FIRST}, bf16, T={tokens}", cell, chosen(cell), rivals(cell)))
    model, weights, tokens = QUANTISED
    (cell,) = [
        cell
        for cell in _served(PUBLISHED)
        if _model(cell) == (model, 1) and tuple(cell.iloc[0][["weights", "tokens"]]) == (weights, tokens)
    ]
    lines.append(_headline(f"{model}, fp8 (`{weights}`), T={tokens}", cell, "auto", _served_rivals(cell)))
    shown = explained(table(lines))
    means = [f"{name} {_mean(phase)}" for name, phase in zip(("decoding", "prefill"), both, strict=True)]
    lacking = " ".join(_absent(rows))
    return f"{shown}\nGeometric mean over the fastest rival of each bf16 layer: {'; '.join(means)}. {lacking}\n"


def _headline(layer: str, cell: pd.DataFrame, own: str, others: pd.Series) -> dict[str, str]:
    """A line of the headline: ours, what serves models as far as it has rows, and the fastest rival."""
    line = {"layer on one H200, µs": layer, "`ops.layer` (ours)": time(cell, own)}
    for name in ("vllm_triton", "sglang_triton"):
        there = [one for one in (name, f"{name}_fp8") if one in cell.index]
        line[PRODUCTION[name]] = time(cell, there[0]) if there else NO_ROW
    fastest = str(others.idxmin())
    line["fastest rival"] = f"{time(cell, fastest)} (`{fastest}`)"
    return line | {"speed-up": f"{digits(others.min() / cell.at[own, 'median_us'])}x"}


def _mean(rows: pd.DataFrame) -> str:
    """The lead of a phase, with its ends, the number of layers and of those with suspect rows."""
    cells = _led([cell for _, cell in rows.groupby("cell", sort=False)])
    ahead = _ahead(cells)
    if not ahead:
        return "no layer with a rival that people use"
    doubted = sum(bool((cell["suspect"] == True).any()) for cell in cells)  # noqa: E712
    suspect = f", {doubted} of them with suspect rows" * bool(doubted)
    return f"{digits(stats.gmean(ahead))}x ({digits(min(ahead))}x to {digits(max(ahead))}x in {count(len(cells), 'layer')}{suspect})"


def _led(cells: Sequence[pd.DataFrame]) -> list[pd.DataFrame]:
    """The cells of one phase in a lead: those with another rival than torch, and in decoding than libraries made for training, too."""
    found = []
    for cell in cells:
        names = origins.besides_torch(BENCH, cell["implementation"])
        if names - set(TRAINERS) if set(cell["phase"]) == {"decode"} else names:
            found.append(cell)
    return found


def _served(runs: Sequence[str]) -> list[pd.DataFrame]:
    """The cells of layers as they are served, with a rival, by weights, model, ranks of tensor parallelism and tokens."""
    tables = [
        stored_tables.stored(f"../nvidia-h200.{run}/measurements.parquet").query("status == 'ok'") for run in runs
    ]
    cells = [cell.set_index("implementation", drop=False) for rows in tables for _, cell in rows.groupby("cell")]
    with_rivals = [cell for cell in cells if origins.besides_torch(BENCH, cell.index)]
    return sorted(with_rivals, key=lambda cell: (cell["weights"].iloc[0], *_model(cell), cell["tokens"].iloc[0]))


def _model(cell: pd.DataFrame) -> tuple[str, int]:
    """The model of a cell, and over how many ranks its experts are split."""
    ranks = cell["tp"].iloc[0]
    return cell["model"].iloc[0], 1 if pd.isna(ranks) else int(ranks)


def _served_rivals(cell: pd.DataFrame) -> pd.Series:
    """The times of kernels of other packages than torch, the fastest first."""
    return cell["median_us"][sorted(origins.besides_torch(BENCH, cell.index))].sort_values()


def against_servers() -> str:
    """A line per model and format of the layers that others published: times of `auto` and of the fastest rival, by the number of tokens."""
    cells, lines = _served(PUBLISHED), []
    columns = {f"T={tokens}": "–" for tokens in sorted({cell["tokens"].iloc[0] for cell in cells})}
    for (weights, model, ranks), of_model in groupby(cells, lambda cell: (cell["weights"].iloc[0], *_model(cell))):
        split = f", a rank of {ranks}" if ranks > 1 else ""
        line = {"layer": f"{model}, `{weights}`{split}"} | columns
        for cell in of_model:
            line[f"T={cell['tokens'].iloc[0]}"] = (
                f"{time(cell, 'auto')} / {time(cell, str(_served_rivals(cell).idxmin()))}"
            )
        lines.append(line)
    return explained(table(lines))


def served() -> str:
    """A line per layer as it is served: `auto` and the rivals, and how many times as long the fastest of these takes."""
    lines = []
    for cell in _served(SERVED):
        first, found = cell.iloc[0], _served_rivals(cell)
        line = {"layer": f"{first['model']}, `{first['weights']}`", "T": str(first["tokens"])}
        line |= {"`ops.layer`, µs": time(cell, "auto")}
        line |= {"rivals": ", ".join(f"{time(cell, str(name))} (`{name}`)" for name in found.index)}
        line |= {"speed-up": f"{digits(found.min() / cell.at['auto', 'median_us'])}x"}
        lines.append(line | {"of the limit": percent(cell.at["auto", "share_of_roofline"])})
    return explained(table(lines))


def served_lead() -> str:
    """How much faster than the fastest rival layers are as they are served: by weights, for few tokens and many; and a model of other weights."""
    several = {
        weights: list(cells) for weights, cells in groupby(_served(PUBLISHED), lambda cell: cell["weights"].iloc[0])
    }
    said = []
    for weights, cells in several.items():
        for few in (True, False):
            of_size = [cell for cell in cells if (cell["tokens"].iloc[0] <= FEW) == few]
            over = _over_rivals(of_size)
            if len(over) > 1:
                size = f"T ≤ {FEW}" if few else "more"
                strange = {str(_served_rivals(cell).idxmin()) for cell in of_size} - OF_SERVERS
                size += f", over {_and([f'`{name}`' for name in sorted(strange)])}" if strange else ""
                said.append(
                    f"`{weights}`, {size}: {digits(stats.gmean(over))}x ({digits(min(over))}x to {digits(max(over))}x in {len(over)})"
                )
    alone = []
    for (model, weights), cells in groupby(_served(SERVED), lambda cell: tuple(cell.iloc[0][["model", "weights"]])):
        if len(several.get(weights, [])) > 1:
            continue
        of_model = list(cells)
        names = sorted({f"`{_served_rivals(cell).idxmin()}`" for cell in of_model})
        tokens = row_groups.words([str(cell["tokens"].iloc[0]) for cell in of_model])
        ratios = row_groups.words([f"{digits(ratio)}x" for ratio in _over_rivals(of_model)])
        alone.append(f"{model} in `{weights}`, T={tokens}: {ratios} over {_and(names)}.")
    return (
        "Geometric mean of the speed-up over the faster of vLLM's and SGLang's Triton kernels: "
        f"{'; '.join(said)}. {' '.join(alone)}\n"
    )


def _over_rivals(cells: Sequence[pd.DataFrame]) -> list[float]:
    """How many times as long as `auto` the fastest rival of each cell takes."""
    return [_served_rivals(cell).min() / cell.at["auto", "median_us"] for cell in cells]


def _without(rows: pd.DataFrame) -> str:
    """Which implementations have rows without a time, in a sentence: they are no rivals."""
    if rows.empty:
        return ""
    names = _and([f"`{name}`" for name in sorted(rows["implementation"].unique())])
    when = " while they were prepared" if rows["reason"].str.startswith("preparing: ").all() else ""
    return f" Left out at {_and(sorted(rows['model'].unique()))}, because they failed{when} (`reason`): {names}."


def _cell(rows: pd.DataFrame, model: str, tokens: int) -> pd.DataFrame:
    """The rows of the one cell of a model and a number of tokens, by implementation."""
    cell = rows[(rows["model"] == model) & (rows["tokens"] == tokens)]
    assert cell["cell"].nunique() == 1, f"{model}, T={tokens}: not one cell"
    return cell.set_index("implementation", drop=False)


def even(rows: pd.DataFrame) -> pd.DataFrame:
    """The rows of cells with even loads."""
    return rows[~(rows["skew"] > 0)]


def together(rows: pd.DataFrame) -> list[str]:
    """What the cells of one phase say together, with the names of all rivals; nothing of a single cell.

    The lead over the fastest rival is that over cells with another rival than torch, and then with those in which torch runs alone. Cells of
    decoding whose only other rivals are made for training are in no lead.
    """
    cells = [cell for _, cell in rows.groupby("cell", sort=False)]
    if len(cells) < 2:
        return []
    decoding_only = set(rows["phase"]) == {"decode"}
    said = [_rivals([origins.besides_torch(BENCH, cell["implementation"]) for cell in cells])]
    wide = _led(cells)
    if wide or not decoding_only:
        kind = "another rival than torch" + " and libraries made for training" * decoding_only
        said.append(_leads(wide or cells, f"that have {kind}" if wide else "in which torch is the only rival"))
    if decoding_only and len(wide) < len(cells):
        said.append(_undecided([cell for cell in cells if not any(cell is other for other in wide)]))
    elif wide and len(wide) < len(cells):
        alone = len(cells) - len(wide)
        said.append(
            f"Over all {len(cells)}, with the {alone} in which torch is the only rival, {digits(stats.gmean(_ahead(cells)))}x."
        )
    said += _absent(rows)
    doubted = sum(bool((cell["suspect"] == True).any()) for cell in cells)  # noqa: E712
    if doubted:
        said.append(f"{doubted} of the {len(cells)} have suspect rows.")
    return [" ".join(said) + "\n"]


def _rivals(others: Sequence[set[str]]) -> str:
    """Which rivals there are, by the number of layers that have them."""
    packages = pd.Series([name for names in others for name in names], dtype=object).value_counts(sort=False)
    groups = [
        f"in {layers}: {', '.join(f'`{name}`' for name in sorted(names))}"
        for layers, names in sorted(packages.groupby(packages).groups.items(), reverse=True)
    ]
    return f"{'; '.join(['Rivals: torch in every layer', *groups])}."


def _ahead(cells: Sequence[pd.DataFrame]) -> list[float]:
    """How many times as long as ours the fastest rival of each cell takes."""
    return [_over(cell, rivals(cell).min()) for cell in cells]


def _leads(cells: Sequence[pd.DataFrame], which: str) -> str:
    """The means over cells: over the fastest rival, over the faster of the kernels that serve models in cells with their rows, and over torch."""
    ahead = _ahead(cells)
    torch = [_over(cell, rivals(cell)[BASELINE]) for cell in cells if BASELINE in rivals(cell)]
    of_torch = f"{digits(stats.gmean(torch))}x over `{BASELINE}`" if torch else f"no row of `{BASELINE}`"
    of_torch += f" in {len(torch)}" * (0 < len(torch) < len(cells))
    served = [(cell, rivals(cell).reindex(list(PRODUCTION)).min()) for cell in cells]
    over = [_over(cell, us) for cell, us in served if not pd.isna(us)]
    names = [name for name in PRODUCTION if any(name in cell["implementation"].to_list() for cell in cells)]
    of_servers = f"{digits(stats.gmean(over or [1]))}x over the faster of {_and([f'`{name}`' for name in names])} in {len(over)}; "
    return (
        f"Speed-up of `ops.layer`, geometric mean over {count(len(cells), 'layer')} with even loads {which}: "
        f"{digits(stats.gmean(ahead))}x over the fastest rival (least {digits(min(ahead))}x); "
        f"{of_servers * (len(over) > 0 and over != ahead)}{of_torch}."
    )


def _undecided(cells: Sequence[pd.DataFrame]) -> str:
    """For which layers of decoding no lead follows, because nothing that people decode with has a row."""
    names = row_groups.words(list(dict.fromkeys(shape(cell.iloc[0]) for cell in cells)))
    trained = sorted({name for cell in cells for name in cell["implementation"]} & set(TRAINERS))
    there = row_groups.words(["torch", *(f"`{name}`, a library made for training," for name in trained)])
    return f"At {names} only {there} ran, so no lead is stated there."


def _over(cell: pd.DataFrame, us: float) -> float:
    return us / cell.set_index("implementation", drop=False).at[chosen(cell), "median_us"]


def _absent(rows: pd.DataFrame) -> list[str]:
    """Which of the kernels that serve models have no row yet, in a sentence."""
    lacking = [f"{label} (`{name}`)" for name, label in PRODUCTION.items() if name not in set(rows["implementation"])]
    port = " `flag_gems` is a port of vLLM's without its table of tiles." * (
        "vllm_triton" not in set(rows["implementation"]) and "flag_gems" in set(rows["implementation"])
    )
    return [f"No rows yet of {_and(lacking)}.{port}"] if lacking else []


def _and(parts: Sequence[str]) -> str:
    return " and ".join([", ".join(parts[:-1]), parts[-1]] if len(parts) > 1 else parts)


def others(run: str, ways: Sequence[str]) -> str:
    """One line per cell of a run: the time of each way, of which `ops` is ours, and how many times as long the fastest other takes."""
    rows = stored_tables.stored(run + "measurements.parquet").query("status == 'ok'")
    lines = []
    for _, cell in rows.groupby("cell", sort=False):
        found, first = cell.set_index("implementation"), cell.iloc[0]
        medians = found["median_us"]
        line = {"model": first["model"], "T": str(first["tokens"])}
        line |= {f"`{way}`": time(found, way) for way in ways}
        best = medians.drop("ops")
        lines.append(
            line | {"`ops`, against the best other": f"{digits(best.min() / medians['ops'])}x (`{best.idxmin()}`)"}
        )
    return explained(table(lines))


def all_layers() -> str:
    """Every implementation of the layers that most were measured of, in the order of their times at most tokens, which the last columns are of."""
    rows = stored_tables.stored(LAYERS + "measurements.parquet").query("bench == 'layer'")
    several = [cell.set_index("implementation") for _, cell in rows.groupby("cell") if len(cell) > MANY]
    assert len({cell["model"].iloc[0] for cell in several}) == 1, "each line would need its model"
    cells = sorted(several, key=lambda cell: cell["tokens"].iloc[0], reverse=True)
    lines = []
    for name in dict.fromkeys(name for cell in cells for name in cell.sort_values("median_us").index):
        line = {"implementation": f"`{name}`"}
        for cell in reversed(cells):
            row, tokens = cell.reindex([name]).iloc[0], cell["tokens"].iloc[0]
            line[f"T={tokens}, µs"] = time(cell, name)
        line |= {"over dense GEMMs": digits(row["over_dense"]), "mJ per token": energy(row["energy_mj_per_token"])}
        lines.append(line)
    return explained(table(lines))


BLOCKS: Mapping[str, Callable[[], str]] = {
    "stored-layers": partial(stored_cells, LAYERS + "measurements.parquet"),
    "stored-decode": partial(stored_cells, DECODE + "measurements.parquet"),
    "headline": headline,
    "layers": partial(layers, "prefill"),
    "all-layers": all_layers,
    "decode": partial(layers, "decode"),
    "served": served,
    "stored-published": against_servers,
    "served-lead": served_lead,
    "training": partial(
        others, TRAINING, ("torch_grouped_mm", "transformers_grouped_mm", "liger", "moe_ops", "sonicmoe", "ops")
    ),
    "models": partial(
        others, MODEL, ("transformers_eager", "transformers_batched_mm", "transformers_grouped_mm", "ops")
    ),
}
