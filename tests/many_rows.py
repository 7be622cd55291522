"""Very many rows, as a grid that goes on growing has them."""

from pathlib import Path

import numpy as np
import pandas as pd

from moe_routing_bench.store import records

STORED = Path(__file__).parents[1] / "results/nvidia-h200/measurements.parquet"
MANY = 5_000
FULL = 20_000  # rows of a page that may have the bytes it is allowed
_KEPT = ("skew", "capacity_factor", "tolerance", "over_dense")  # numbers that are of a choice, not of a measurement
_SHARES = ("_p", "share_of_roofline", "drop_rate", "gini")  # which end the names of what is at most 1


def many() -> pd.DataFrame:
    """The stored rows, and as many more of other hidden sizes, whose every measured number is another: by a tenth from cell to cell, and by a thousandth from row to row where the rows of
    a cell differ, as ceilings do not. They have no twins, of which the floors of noise would take as long as all the rest."""
    stored = records.frame(records.read(STORED))
    rng, cells = np.random.default_rng(0), stored.groupby(["bench", "cell"], sort=False).ngroup().to_numpy()
    measured = [
        name
        for name in stored
        if stored[name].dtype.kind == "f" and name not in _KEPT and not (stored[name].dropna() % 1 == 0).all()
    ]
    noise = [1e-3 if stored[name].groupby(cells).nunique().max() > 1 else 0 for name in measured]
    parts = [stored]
    for turn in range(1, -(-MANY // len(stored))):
        of_cells = rng.normal(1, 0.1, (len(measured), cells.max() + 1)).clip(0.7)
        numbers = {
            name: stored[name] * factors[cells] * rng.normal(1, apart, len(stored))
            for name, factors, apart in zip(measured, of_cells, noise, strict=True)
        }
        numbers |= {name: held.clip(upper=1) for name, held in numbers.items() if name.endswith(_SHARES)}
        numbers["twin_speedup"] = np.nan
        scale = numbers["median_us"] / stored["median_us"]
        lists = {
            name: [
                held if held is None else held * by * rng.normal(1, 1e-3, len(held))
                for held, by in zip(stored[name], scale, strict=True)
            ]
            for name in ("samples_us", "set_aside_samples_us")
        }
        clocks = {
            name: (
                pd.to_datetime(stored[name]) + pd.to_timedelta(turn * 86_400 + rng.uniform(0, 9, len(stored)), unit="s")
            ).map(lambda time: time.isoformat())
            for name in ("started_at", "ended_at")
        }
        hashes = [None if held is None else f"{rng.integers(16**8):08x}" for held in stored["cell_hash"]]
        parts.append(
            stored.assign(
                **numbers,
                **lists,
                **clocks,
                cell_hash=hashes,
                hidden=stored["hidden"] + 8 * turn,
                cell=stored["cell"] + f"-{turn}",
            )
        )
    return pd.concat(parts, ignore_index=True).iloc[:MANY].copy()
