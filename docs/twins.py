"""How far equals come out: the A/A table of docs/method.md, of the twins of the stored runs of an H200 and of results/nvidia-h200/twins.csv.

`python docs/twins.py RUN ...` writes that file: the twins of runs that are not stored, as that of config/twins.yaml, whose cells have no rivals.
"""

import sys
from pathlib import Path

import numpy as np
import pandas as pd

from moe_routing_bench.comparison import verdicts

KEPT = (
    *("kind", "bench", "implementation", "cell", "status", "turns", "converged", "median_us", "twin_median_us"),
    *("twin_speedup", "twin_speedup_ci_low", "twin_speedup_ci_high", "twin_speedup_p"),
    *("gpu_name", "gpu_uuid", "git_sha"),
)


def kind(row: pd.Series) -> str:
    """The kind of a stored row: its bench, but for layers that decode and experts with quantised weights."""
    if row["bench"] == "layer" and row["phase"] == "decode":
        return "decode layer"
    return "quantised" if row["bench"] == "experts" and row["weights"] != row["dtype"] else row["bench"]


def among(rows: pd.DataFrame) -> pd.DataFrame:
    """The twins among rows, and their kind."""
    found = rows[(rows["status"] == "ok") & rows["twin_speedup"].notna()]
    kinds = [kind(row) for _, row in found.iterrows()]
    return found.reindex(columns=[*KEPT]).assign(kind=kinds)


def known(folder: Path, stored: pd.DataFrame) -> pd.DataFrame:
    """The twins of these stored rows, and those that the folder's file has."""
    return pd.concat([among(stored), pd.read_csv(folder / "twins.csv")], ignore_index=True)


def lines(twins: pd.DataFrame) -> list[dict[str, str]]:
    """A line per kind: how many twins, how far apart, how many of their intervals exclude 1, and how many the verdicts call different, each
    judged by the floor of the others of its kind and size."""
    found = []
    for name, rows in [*twins.groupby("kind"), ("all", twins)]:
        gaps = np.log(rows["twin_speedup"].astype(float)).abs()
        excluded = ((rows["twin_speedup_ci_low"] > 1) | (rows["twin_speedup_ci_high"] < 1)).sum()
        wrong, judged = verdicts.false_verdicts(rows.assign(bench=rows["kind"]).reset_index(drop=True))
        quantiles = {"median": 0.5, "p95": 0.95, "most": 1.0}
        found.append(
            {"kind": str(name), "twins": str(len(rows)), "in long turns": str(int((rows["turns"] == "long").sum()))}
            | {title: f"{100 * gaps.quantile(q):.2f}" for title, q in quantiles.items()}
            | {"intervals without 1": str(int(excluded)), "called different": f"{wrong} of {judged}" if judged else "–"}
        )
    return found


if __name__ == "__main__":
    rows = pd.concat([pd.read_parquet(Path(name) / "measurements.parquet") for name in sys.argv[1:]], ignore_index=True)
    path = Path(__file__).parents[1] / "results/nvidia-h200/twins.csv"
    among(rows).to_csv(path, index=False, float_format="%.6g")
