"""Which training runs tell what a capacity drops and costs: those whose validation batches had all domains. Pure functions; no torch.

Stored runs of before 2026-11-22 validated on batches of one domain each. The tokens of one domain choose the same experts, so a capacity seemed
to drop, and to cost, many times as much as of mixed batches, which is what a model meets. Such figures are withdrawn: they are of the batches and not
of the rules.
"""

import pandas as pd

from moe_routing_bench.quality.spec.run_rows import MIXED

WITHDRAWN = "withdrawn, because these runs validated on batches of one domain each, of which a capacity drops many times as much as of mixed ones"


def mixed(rows: pd.DataFrame) -> pd.DataFrame:
    """The rows that validated on batches of all domains; of others nothing on capacity is said."""
    return rows[known(rows)]


def known(rows: pd.DataFrame) -> pd.Series:
    """Whether each row is one of `mixed`."""
    return rows["validation_batches"] == MIXED


def why(rows: pd.DataFrame, otherwise: str) -> str:
    """Why nothing on capacity is shown of rows, all of which may have been withdrawn."""
    return WITHDRAWN if len(rows) and mixed(rows).empty else otherwise
