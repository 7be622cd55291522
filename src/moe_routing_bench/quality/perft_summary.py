"""What adapters reached, by variant and rank: loss on the new text, what it cost on the old, and parameters. Without torch."""

import pandas as pd

from moe_routing_bench.quality.compare import half_width

METRICS = ("bits_per_byte", "forgetting", "gain")


def finals(table: pd.DataFrame) -> pd.DataFrame:
    """The last evaluation of every final adaptation, with two more columns in bits per byte: `gain`, by how much the new
    text became better than before the first step, and `forgetting`, by how much the old text became worse."""
    rows = table[table["purpose"] == "final"].sort_values("step").groupby("run", sort=False)
    last, first = rows.tail(1).sort_index().set_index("run"), rows.head(1).set_index("run")
    gain = first["bits_per_byte"] - last["bits_per_byte"]
    forgetting = last["old_bits_per_byte"] - first["old_bits_per_byte"]
    return last.assign(gain=gain, forgetting=forgetting).reset_index()


def contests(table: pd.DataFrame) -> pd.DataFrame:
    """The same as rows of `compare.finals`: variants of one rank compete, as `perft_r` and so on; small ranks first."""
    rows = finals(table).sort_values("rank", kind="stable")
    names = "perft_" + rows["variant"].str.lower()
    return rows.assign(label=rows["label"] + " r" + rows["rank"].astype(str), contestant=names)


def summary(table: pd.DataFrame) -> pd.DataFrame:
    """One row a variant and rank of each config: trainable parameters and, over the seeds, mean and 95 % half width of
    `METRICS`; in the order of the rows."""
    found = []
    keys = ["label", "config_hash", "variant", "rank"]
    for key, rows in finals(table).groupby(keys, sort=False):
        one = dict(zip(keys, key, strict=True))
        one |= {"params": int(rows["params"].iloc[0]), "active_params": int(rows["active_params"].iloc[0]), "seeds": len(rows), "lr": rows["lr"].iloc[0]}  # fmt: skip
        for metric in METRICS:
            values = rows[metric].to_numpy(float)
            one |= {metric: float(values.mean()), f"{metric}_half_width": half_width(values)}
        found.append(one)
    return pd.DataFrame(found)


def text(table: pd.DataFrame) -> str:
    """The summary as lines to print, the least loss first."""
    lines, rows = [], summary(table)
    for (label, config), group in rows.groupby(["label", "config_hash"], sort=False):
        lines.append(f"\n{label} ({config}), bits per byte of the new text, and by how much the old text became worse")
        lines.append(f"{'adapters':<12} {'trainable':>10} {'active':>8} {'new':>8} {'± 95 %':>8} {'old':>8} {'± 95 %':>8} {'seeds':>5} {'lr':>8}")  # fmt: skip
        for row in group.sort_values("bits_per_byte").to_dict("records"):
            lines.append(f"{'PERFT-' + row['variant'] + ' r' + str(row['rank']):<12} {row['params']:>10} {row['active_params']:>8} {row['bits_per_byte']:>8.4f}"
                         f" {row['bits_per_byte_half_width']:>8.4f} {row['forgetting']:>+8.4f} {row['forgetting_half_width']:>8.4f} {row['seeds']:>5} {row['lr']:>8.2g}")  # fmt: skip
    return "\n".join(lines)
