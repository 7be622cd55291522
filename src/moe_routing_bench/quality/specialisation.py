"""How far experts specialise: the mutual information of a choice's expert and its byte's domain, from stored rows."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd

from moe_routing_bench.quality import compare
from moe_routing_bench.statistics import mean_half_width


def mutual_information(counts: Any) -> float:
    """Mutual information in bits of row and column, from counts (domains, E) of choices; nan without any.

    It is at most the entropy of the domains. The correction of Miller and Madow (Paninski 2003, Neural Computation 15,
    section 4) removes the bias of finite counts: those of independent choices have a mean of 0, so some are below it.
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
    from scipy import special  # takes a fifth of a second to import

    shares = np.ravel(counts) / np.sum(counts)
    return float(special.entr(shares).sum() / np.log(2))


def by_layer(loads: Sequence[Any]) -> list[float]:
    """The bits of each layer, from a row's `load_by_domain`."""
    return [mutual_information(np.array([list(domain) for domain in layer])) for layer in loads]


def mean_bits(loads: Sequence[Any] | None) -> float:
    """The mean of the bits over the layers, from a row's `load_by_domain`; nan without one."""
    return float("nan") if loads is None else float(np.mean(by_layer(loads)))


# Columns of `with_information`: what the expert of a choice says about its token.
INFORMATION = {
    "expert_domain_bits": "its domain",
    "expert_class_bits": "the class of its byte, the first of a token",
    "expert_token_bits": "the token itself",
}


def with_information(rows: pd.DataFrame) -> pd.DataFrame:
    """Rows with the columns of `INFORMATION`, each the mean over layers, nan where it is not known, and `choices`: those of a layer."""
    tokens = [np.nan if layers is None else float(np.mean(list(layers))) for layers in rows["token_bits_by_layer"]]
    return rows.assign(
        expert_domain_bits=rows["load_by_domain"].map(mean_bits).astype(float),
        expert_class_bits=rows["load_by_class"].map(mean_bits).astype(float),
        expert_token_bits=tokens,
        choices=[
            np.nan if one is None else float(np.sum([list(part) for part in one[0]])) for one in rows["load_by_domain"]
        ],
    )


def finals(table: pd.DataFrame) -> pd.DataFrame:
    """The last evaluation of every run with routers, with two more columns.

    `expert_domain_bits` is the mean over the layers, and `domain_bits` the entropy of the domains, which it cannot
    exceed.
    """
    rows = compare.finals(table)
    rows = rows[rows["load_by_domain"].notna()]
    bits = [mean_bits(loads) for loads in rows["load_by_domain"]]
    most = [entropy([np.sum(list(domain)) for domain in loads[0]]) for loads in rows["load_by_domain"]]
    return rows.assign(expert_domain_bits=bits, domain_bits=most)


def summary(table: pd.DataFrame) -> pd.DataFrame:
    """One row per contestant and config, the most specialised first.

    It has the mean over the seeds, and half of its 95 % interval, of `expert_domain_bits` and of `bits_per_byte`.
    """
    lines = []
    for (label, config, name), rows in finals(table).groupby(["label", "config_hash", "contestant"], sort=False):
        both = {metric: rows[metric].to_numpy(float) for metric in ("expert_domain_bits", "bits_per_byte")}
        row = {"label": label, "config_hash": config, "contestant": name, "seeds": len(rows)}
        row |= {"domain_bits": rows["domain_bits"].mean()}
        row |= {metric: values.mean() for metric, values in both.items()}
        lines.append(row | {f"{metric}_half_width": mean_half_width(values) for metric, values in both.items()})
    order = ["label", "config_hash", "expert_domain_bits"]
    return pd.DataFrame(lines).sort_values(order, ascending=[True, True, False]) if lines else pd.DataFrame()


def text(table: pd.DataFrame) -> str:
    """The summary as lines to print."""
    lines = []
    rows = summary(table)
    for (label, config), group in rows.groupby(["label", "config_hash"], sort=False) if len(rows) else ():
        most = group["domain_bits"].max()
        lines.append(f"\n{label} ({config}), bits between expert and domain, of {most:.3f} at most")
        lines.append(f"{'router':<32} {'bits':>8} {'± 95 %':>8} {'bits/byte':>10} {'± 95 %':>8} {'seeds':>5}")
        for row in group.to_dict("records"):
            bits = f"{row['expert_domain_bits']:>8.4f} {row['expert_domain_bits_half_width']:>8.4f}"
            losses = f"{row['bits_per_byte']:>10.4f} {row['bits_per_byte_half_width']:>8.4f}"
            lines.append(f"{row['contestant']:<32} {bits} {losses} {row['seeds']:>5}")
    return "\n".join(lines)
