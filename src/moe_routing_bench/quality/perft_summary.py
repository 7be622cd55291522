"""What adapters reached, by variant and rank: the loss on the new text, its cost on the old one, and parameters."""

import pandas as pd

from moe_routing_bench.statistics import mean_half_width

METRICS = ("bits_per_byte", "forgetting", "gain")


def finals(table: pd.DataFrame) -> pd.DataFrame:
    """The last evaluation of every final adaptation, with two more columns in bits per byte.

    `gain` is how much better the new text became since before the first step, and `forgetting` how much worse the old
    one.
    """
    rows = table[table["purpose"] == "final"].sort_values("step").groupby("run", sort=False)
    last, first = rows.tail(1).sort_index().set_index("run"), rows.head(1).set_index("run")
    gain = first["bits_per_byte"] - last["bits_per_byte"]
    forgetting = last["old_bits_per_byte"] - first["old_bits_per_byte"]
    return last.assign(gain=gain, forgetting=forgetting).reset_index()


def summary(table: pd.DataFrame) -> pd.DataFrame:
    """One row per config, variant and rank, in the order of the rows.

    It has the trainable parameters and, over the seeds, the mean of each of `METRICS` and half its 95 % interval.
    """
    found = []
    keys = ["label", "config_hash", "variant", "rank"]
    for key, rows in finals(table).groupby(keys, sort=False):
        one = dict(zip(keys, key, strict=True))
        one |= {name: int(rows[name].iloc[0]) for name in ("params", "active_params")}
        one |= {"seeds": len(rows), "lr": rows["lr"].iloc[0]}
        for metric in METRICS:
            values = rows[metric].to_numpy(float)
            one |= {metric: float(values.mean()), f"{metric}_half_width": mean_half_width(values)}
        found.append(one)
    return pd.DataFrame(found)


def text(table: pd.DataFrame) -> str:
    """The summary as lines to print, the least loss first."""
    lines, rows = [], summary(table)
    for (label, config), group in rows.groupby(["label", "config_hash"], sort=False):
        lines.append(f"\n{label} ({config}), bits per byte of the new text, and by how much the old text became worse")
        heads = f"{'new':>8} {'± 95 %':>8} {'old':>8} {'± 95 %':>8} {'seeds':>5} {'lr':>8}"
        lines.append(f"{'adapters':<12} {'trainable':>10} {'active':>8} {heads}")
        for row in group.sort_values("bits_per_byte").to_dict("records"):
            name = f"PERFT-{row['variant']} r{row['rank']}"
            losses = f"{row['bits_per_byte']:>8.4f} {row['bits_per_byte_half_width']:>8.4f}"
            costs = f"{row['forgetting']:>+8.4f} {row['forgetting_half_width']:>8.4f}"
            sizes = f"{row['params']:>10} {row['active_params']:>8}"
            lines.append(f"{name:<12} {sizes} {losses} {costs} {row['seeds']:>5} {row['lr']:>8.2g}")
    return "\n".join(lines)
