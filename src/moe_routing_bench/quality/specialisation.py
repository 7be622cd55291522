"""How far experts specialise: the mutual information between a choice's expert and its byte's domain, from stored rows."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd

from moe_routing_bench.quality import compare


def mutual_information(counts: Any) -> float:
    """Mutual information in bits of row and column, from counts (domains, E) of choices; nan without any.

    With the correction of Miller and Madow (Paninski 2003, Neural Computation 15, section 4) for the bias of finite counts:
    independent counts have a mean of 0, so that single values may lie below it. At most the entropy of the domains.
    """
    joint = np.asarray(counts, dtype=float)
    total = joint.sum()
    if not total:
        return float("nan")
    rows, columns = joint.sum(1), joint.sum(0)
    plain = entropy(rows) + entropy(columns) - entropy(joint)
    cells, lines = np.count_nonzero(joint), np.count_nonzero(rows) + np.count_nonzero(columns)
    return plain - float(cells - lines + 1) / (2 * total * np.log(2))


def entropy(counts: Any) -> float:
    """Entropy in bits of the shares of non-negative counts, without correction."""
    shares = np.asarray(counts, dtype=float)
    shares = shares[shares > 0] / shares.sum()
    return float(-(shares * np.log2(shares)).sum())


def by_layer(loads: Sequence[Any]) -> list[float]:
    """Bits of each layer, from a row's `load_by_domain`."""
    return [mutual_information(np.array([list(domain) for domain in layer])) for layer in loads]


def mean_bits(loads: Sequence[Any] | None) -> float:
    """Bits, mean over the layers, from a row's `load_by_domain`; nan without one."""
    return float("nan") if loads is None else float(np.mean(by_layer(loads)))


def finals(table: pd.DataFrame) -> pd.DataFrame:
    """The last evaluation of every run with routers, with two more columns: `expert_domain_bits`, the mean over the
    layers, and `domain_bits`, the entropy of the domains, which it cannot exceed."""
    rows = compare.finals(table)
    rows = rows[rows["load_by_domain"].notna()]
    bits = [mean_bits(loads) for loads in rows["load_by_domain"]]
    most = [entropy([np.sum(list(domain)) for domain in loads[0]]) for loads in rows["load_by_domain"]]
    return rows.assign(expert_domain_bits=bits, domain_bits=most)


def summary(table: pd.DataFrame) -> pd.DataFrame:
    """One row a contestant of each config: mean and 95 % half width over the seeds of `expert_domain_bits` and of
    `bits_per_byte`, the most specialised first."""
    found = []
    for (label, config, name), rows in finals(table).groupby(["label", "config_hash", "contestant"], sort=False):
        both = {metric: rows[metric].to_numpy(float) for metric in ("expert_domain_bits", "bits_per_byte")}
        found.append(
            {"label": label, "config_hash": config, "contestant": name, "seeds": len(rows), "domain_bits": rows["domain_bits"].mean()}
            | {metric: values.mean() for metric, values in both.items()}
            | {f"{metric}_half_width": compare.half_width(values) for metric, values in both.items()}
        )  # fmt: skip
    order = pd.DataFrame(found)
    return order if order.empty else order.sort_values(["label", "config_hash", "expert_domain_bits"], ascending=[True, True, False])  # fmt: skip


def text(table: pd.DataFrame) -> str:
    """The summary as lines to print."""
    lines = []
    rows = summary(table)
    for (label, config), group in rows.groupby(["label", "config_hash"], sort=False) if len(rows) else ():
        lines.append(
            f"\n{label} ({config}), bits between expert and domain, of {group['domain_bits'].max():.3f} at most"
        )
        lines.append(f"{'router':<32} {'bits':>8} {'± 95 %':>8} {'bits/byte':>10} {'± 95 %':>8} {'seeds':>5}")
        for row in group.to_dict("records"):
            lines.append(f"{row['contestant']:<32} {row['expert_domain_bits']:>8.4f} {row['expert_domain_bits_half_width']:>8.4f}"
                         f" {row['bits_per_byte']:>10.4f} {row['bits_per_byte_half_width']:>8.4f} {row['seeds']:>5}")  # fmt: skip
    return "\n".join(lines)
