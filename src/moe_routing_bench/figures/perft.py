"""What adapters on a frozen model reach, against how many parameters they train, and against how many a token meets."""

import numpy as np
import pandas as pd

from moe_routing_bench.figures import palette
from moe_routing_bench.figures.chart import Chart, Scale, marks, nothing
from moe_routing_bench.grid.run_spec import VARIANTS
from moe_routing_bench.quality import perft_summary
from moe_routing_bench.quantities import count

_PANELS = (("params", "trainable parameters"), ("active_params", "trainable parameters that a token meets"))
_MISSING = "no final adaptation of a trained run"
_BITS = Scale("validation bits per byte of the new text (less is better)")


def chart(table: pd.DataFrame) -> Chart:
    """The same for the page: a line per variant through its ranks, in a panel per entry and way to count parameters."""
    found = perft_summary.summary(table)
    if found.empty:
        return nothing("lines", Scale("parameters", "log"), _BITS, table.iloc[:0], _MISSING)
    rows, records, own = perft_summary.finals(table), [], {}
    for label in found["label"].unique():
        about = _describe(rows[rows["label"] == label]).replace("\n", "; ")
        for column, name in _PANELS:
            panel = f"{about}; against {name}"
            own[panel] = (Scale(name, "log"), _BITS)
            for one in found[found["label"] == label].sort_values("rank").to_dict("records"):
                half = np.nan_to_num(one["bits_per_byte_half_width"])
                records.append(
                    {
                        "panel": panel,
                        "series": f"PERFT-{one['variant']}",
                        "x": one[column],
                        "y": one["bits_per_byte"],
                        "low": one["bits_per_byte"] - half,
                        "high": one["bits_per_byte"] + half,
                        "says": f"rank {one['rank']}, n = {one['seeds']} seeds",
                        "text": f"r={one['rank']}",
                    }
                )
    tints = palette.assigned(f"PERFT-{variant}" for variant in VARIANTS if variant in set(found["variant"]))
    return Chart("lines", Scale("parameters", "log"), _BITS, marks(records), tints, rows, own=own, timed=False)


def _describe(rows: pd.DataFrame) -> str:
    """Base, texts, and what the frozen model has without adapters."""
    one, seeds = rows.iloc[0], rows["seed"].nunique()
    frozen = (rows["bits_per_byte"] + rows["gain"]).mean()
    texts = f"{' + '.join(one['old_domains'])} → {' + '.join(one['domains'])}"
    return f"{one['label']}: {one['router']}, E={one['experts']:.0f}, {one['base_params'] / 1e6:.3g} M frozen parameters, {texts}\nwithout adapters {frozen:.3f} bits per byte; n = {count(seeds, 'seed')}"
