"""How far equals come out: `python docs/twins.py FILE.jsonl ...` keeps the twins of rows from a GPU in results/nvidia-h200/twins.csv.

`table` makes the A/A table of docs/method.md from that file, or where there is none from the twins of the stored runs of an H200.
"""

import json
import sys
from pathlib import Path

import numpy as np
import pandas as pd

from moe_routing_bench.comparison import verdicts

KEPT = (
    *("kind", "bench", "implementation", "cell", "status", "turns", "converged", "median_us", "twin_median_us"),
    *("twin_speedup", "twin_speedup_ci_low", "twin_speedup_ci_high", "twin_speedup_p", "gpu_name", "gpu_uuid"),
)


def kind(row: pd.Series) -> str:
    """The kind of a stored row: its bench, but for layers that decode and experts with quantised weights."""
    if row["bench"] == "layer" and row["phase"] == "decode":
        return "decode layer"
    return "quantised" if row["bench"] == "experts" and row["weights"] != row["dtype"] else row["bench"]


def known(folder: Path, stored: pd.DataFrame) -> pd.DataFrame:
    """The twins that were collected for the table, or those of these stored rows."""
    path = folder / "twins.csv"
    if path.exists():
        return pd.read_csv(path)
    found = stored[(stored["status"] == "ok") & stored["twin_speedup"].notna()].copy()
    return found.assign(kind=[kind(row) for _, row in found.iterrows()])[list(KEPT)].reset_index(drop=True)


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
    rows = pd.DataFrame([json.loads(line) for name in sys.argv[1:] for line in Path(name).read_text().splitlines()])
    rows = rows[(rows["status"] == "ok") & rows["twin_speedup"].notna()]
    rows.reindex(columns=list(KEPT)).to_csv(
        Path(__file__).parents[1] / "results/nvidia-h200/twins.csv", index=False, float_format="%.6g"
    )
