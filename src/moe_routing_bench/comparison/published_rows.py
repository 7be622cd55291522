"""Published rows of other projects next to ours of the same cell: whether the same kernel takes as long here. Pure functions; no torch.

A cell is the same if model, tokens, sizes and formats are, on one GPU or one tensor-parallel rank, with balanced loads. Their times and ours have different boundaries, so they take
no part in verdicts, headlines and figures of ours.
"""

from pathlib import Path

import numpy as np
import pandas as pd

from moe_routing_bench.benches.registry import BENCHES
from moe_routing_bench.comparison import regret
from moe_routing_bench.config.claims import Source
from moe_routing_kernels import choices as table_of_choices
from moe_routing_kernels import guarded
from moe_routing_kernels.errors import bad

REPRODUCED, NOT, NO_ROW, NO_IMPLEMENTATION, NO_TIME = (
    "reproduced",
    "not reproduced",
    "no row of this implementation yet",
    "no implementation here",
    "no time here",
)
CELL = ["model", "tokens", "hidden", "intermediate", "experts", "top_k", "weights", "packed", "tensor_parallel"]
_MODEL = ["hidden", "experts", "top_k"]
TIME = "warm_median_us"  # theirs are warm


def read(path: Path) -> pd.DataFrame:
    """The rows of a file as published. Those of a tensor-parallel rank have the model whose whole layer the file has. Raises `UserError` for
    no CSV file."""
    try:
        return _with_models(pd.read_csv(guarded.csv_of(path), dtype={"model": "string"}))
    except (OSError, ValueError, KeyError, TypeError) as error:
        hint = getattr(error, "strerror", None) or str(error)
        raise bad("published rows", str(path), "a CSV file with the columns of config/published", hint) from error


def _with_models(rows: pd.DataFrame) -> pd.DataFrame:
    """Rows with the model of those that have none, by the sizes of whole layers."""
    whole = rows[rows["model"].notna()]
    known = dict(zip(whole[[*_MODEL, "intermediate"]].itertuples(index=False, name=None), whole["model"], strict=True))
    widths = rows[_MODEL].assign(width=rows["intermediate"] * rows["tensor_parallel"])
    found = [known.get(sizes) for sizes in widths.itertuples(index=False, name=None)]
    return rows.assign(model=rows["model"].fillna(pd.Series(found, rows.index, "string")))


def comparable(published: pd.DataFrame) -> pd.DataFrame:
    """The rows of layers on one GPU, or of a tensor-parallel rank, with balanced loads: those that cells here can be like."""
    even = (published["expert_parallel"] == 1) & (published["loads"] == "balanced")
    return published[even & published["model"].notna()]


def matched(source: Source, published: pd.DataFrame, rows: pd.DataFrame) -> pd.DataFrame:
    """The published rows whose cell `rows` has, a line each, with what was measured here.

    Columns: `CELL`, package, version, kernel and `published_us`; `implementation`, the one here that runs the kernel, or empty; `here_us`, its warm
    median, NaN without a row; `ratio`, here over published; `ours` and `ours_us`, what `auto` runs and its warm median; `status`, and `why`.
    Rows of another card than the source's are left out.
    """
    ok = _plain(rows, source)
    lines = []
    cells = dict(list(ok.groupby(CELL))) if len(ok) else {}
    ours: dict[tuple[object, ...], dict[str, object]] = {}
    for row in comparable(published).to_dict("records"):
        key = tuple(row[name] for name in CELL)
        if key in cells:
            if key not in ours:
                ours[key] = _ours(cells[key])
            lines.append(_line(source, row, cells[key]) | ours[key])
    return pd.DataFrame(lines)


def _plain(rows: pd.DataFrame, source: Source) -> pd.DataFrame:
    """Rows of the bench and card of a source with balanced loads, without a limit of capacity and shared experts; of a cell that several runs have, the last."""
    kept = rows[(rows["bench"] == source.bench) & rows["model"].notna() & rows["gpu_name"].eq(source.hardware)]
    even = (kept["skew"].fillna(0) == 0) & (kept["sampler"].fillna("exact") == "exact") & kept["trace"].isna()
    kept = kept[even & kept[["capacity_factor", "shared_intermediate", "ep"]].isna().all(axis=1)]
    kept = kept.assign(
        model=kept["model"].astype("string"),
        weights=kept["weights"].fillna(kept["dtype"]),
        tensor_parallel=kept["tp"].fillna(1).astype(int),
    )
    return kept.sort_values("started_at", kind="stable").drop_duplicates([*CELL, "implementation"], keep="last")


def _ours(cell: pd.DataFrame) -> dict[str, object]:
    """What `auto` runs among ours of a cell, and its warm time."""
    timed = regret.as_chosen(cell[cell["status"] == "ok"])
    name = regret.runs(timed, table_of_choices.load())
    return {"ours": name or "", "ours_us": timed.set_index("implementation").at[name, TIME] if name else np.nan}


def _line(source: Source, row: dict[str, object], cell: pd.DataFrame) -> dict[str, object]:
    """A published row, and the row of the same kernel in a cell."""
    kernel = source.kernel(str(row["kernel"]), str(row["weights"]))
    line = {name: row[name] for name in (*CELL, "package", "version", "kernel")}
    line |= {"published_us": row["median_us"], "implementation": kernel.implementation, "here_us": np.nan}
    line["ratio"] = np.nan
    if kernel.lacks:
        return line | {"status": NO_IMPLEMENTATION, "why": kernel.lacks}
    if kernel.implementation not in {one.name for one in BENCHES[source.bench].implementations}:
        return line | {"status": NO_IMPLEMENTATION, "why": f"{kernel.implementation} is not one of `{source.bench}`"}
    found = cell[cell["implementation"] == kernel.implementation]
    if found.empty:
        return line | {"status": NO_ROW, "why": ""}
    here = found.iloc[0]
    if here["status"] != "ok":
        return line | {"status": NO_TIME, "why": f"{here['status']}: {here['reason']}"}
    ratio = here[TIME] / float(str(row["median_us"]))
    status = REPRODUCED if abs(ratio - 1) <= source.within else NOT
    return line | {"here_us": here[TIME], "ratio": ratio, "status": status, "why": _why(here, row, kernel.differs)}


def _why(here: pd.Series, row: dict[str, object], differs: str) -> str:
    """What differs between both rows: versions, doubts about ours, and what the source says of the kernel."""
    version = here["implementation_version"]
    parts = [f"version {version} here"] if pd.notna(version) and version != row["version"] else []
    parts += [differs] if differs else []
    parts += ["suspect here"] if here["suspect"] == True else []  # noqa: E712
    return "; ".join(parts)


def summary(lines: pd.DataFrame) -> dict[str, int]:
    """How many published rows have a cell here, how many have a time of the same kernel, and how many of these are reproduced."""
    counts = lines["status"].value_counts() if len(lines) else pd.Series(dtype=int)
    reproduced = int(counts.get(REPRODUCED, 0))
    return {"matched": len(lines), "compared": reproduced + int(counts.get(NOT, 0)), "reproduced": reproduced}


def sentence(source: Source, published: pd.DataFrame, lines: pd.DataFrame) -> str:
    """The reproduced share, and what has no row yet, in sentences."""
    found = summary(lines)
    text = f"{found['matched']} of {len(comparable(published))} published rows of {source.title} (one GPU or tensor-parallel rank, balanced loads) are of cells here."
    if found["compared"]:
        share, verb = found["reproduced"] / found["compared"], "is" if found["reproduced"] == 1 else "are"
        text += f" {found['compared']} have a row of the same kernel, of which {found['reproduced']} ({100 * share:.0f} %) {verb} reproduced within {100 * source.within:.0f} %."
    else:
        text += " None has a row of the same kernel yet, so none is reproduced or not."
    return text + (_without(lines) if len(lines) else "")


def _without(lines: pd.DataFrame) -> str:
    """How many rows have no row of the same kernel, and why: by implementation, or by what is lacking."""
    parts = []
    for status, column in ((NO_ROW, "implementation"), (NO_TIME, "implementation"), (NO_IMPLEMENTATION, "why")):
        counts = lines.loc[lines["status"] == status, column].value_counts(sort=False).sort_index()
        if len(counts):
            parts.append(f" {status.capitalize()}: {', '.join(f'{text} ({n})' for text, n in counts.items())}.")
    return "".join(parts)
