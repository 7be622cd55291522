"""Time of a rank's experts, from stored rows of whole layers on one GPU.

Experts spread over EP ranks, with T tokens of each, have as many rows each as in a layer of T EP tokens on one GPU, of which a rank has 1 / EP:

    time(T, EP) = fixed + (layer(T EP) - fixed) / EP

`fixed` is what does not shrink (launches, routing): the median of time - roofline of the stored layers of one token. Between two stored numbers of tokens, the
ratio of time to roofline is interpolated, linear in the logarithm of tokens; beyond the largest it stays. Every answer says which it is. Below the smallest there is none.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from math import expm1, log, log1p

import numpy as np
import pandas as pd

from moe_routing_bench.store import paths, records
from moe_routing_kernels.errors import UserError, bad
from moe_routing_kernels.formats.weights import WEIGHTS

_ABSENT = ["trace", "capacity_factor", "shared_intermediate"]
_PRODUCTS = 3  # gate, up and down projection


@dataclass(frozen=True)
class Sizes:
    """A layer: `intermediate` is that of a tensor-parallel rank."""

    hidden: int
    intermediate: int
    experts: int
    top_k: int
    weights: str

    @property
    def expert_bytes(self) -> float:
        """Bytes of an expert's weights."""
        bits = WEIGHTS[self.weights].bits if self.weights in WEIGHTS else 16
        return _PRODUCTS * self.hidden * self.intermediate * bits / 8


@dataclass(frozen=True)
class Answer:
    """Time in µs, whether it is `measured` as it is, and where it comes from in words."""

    us: float
    measured: bool
    source: str


@cache
def stored(platform: str) -> pd.DataFrame:
    """The layers with a time of all runs of a platform, with even loads and nothing dropped. Raises `UserError` for rows of another schema version."""
    names = sorted(path.parent.name for path in paths.results("").glob(f"{platform}*/measurements.parquet"))
    tables = []
    for name in (name for name in names if name.partition(".")[0] == platform):
        table = records.read(paths.measurements(name))
        rows = records.frame(table.filter([bench == "layer" for bench in table["bench"].to_pylist()]))
        tables.append(rows.assign(run=name))
    rows = pd.concat(tables, ignore_index=True) if tables else pd.DataFrame(columns=[*records.COLUMNS, "run"])
    kept = rows[(rows["status"] == "ok") & (rows["skew"].fillna(0) == 0) & rows[_ABSENT].isna().all(axis=1)]
    return kept.assign(
        weights=kept["weights"].fillna(kept["dtype"]),
        ranks=kept["ep"].fillna(1).astype(int),
    )


class Experts:
    """The stored layers of these sizes, the fastest implementation of each number of tokens."""

    def __init__(self, rows: pd.DataFrame, sizes: Sizes, model: str = "") -> None:
        """Raises `UserError` where no row has these sizes."""
        self.sizes, self.model = sizes, model
        same = (
            (rows["hidden"] == sizes.hidden)
            & (rows["intermediate"] == sizes.intermediate)
            & (rows["experts"] == sizes.experts)
        )
        mine = rows[
            same & (rows["top_k"] == sizes.top_k) & (rows["weights"] == sizes.weights) & (rows["dtype"] == "bf16")
        ]
        best = mine.sort_values("median_us", kind="stable").drop_duplicates(["ranks", "tokens"])
        self.exact: Mapping[tuple[int, int], pd.Series] = {
            (row["ranks"], row["tokens"]): row for _, row in best.iterrows()
        }
        whole = best[best["ranks"] == 1].sort_values("tokens")
        self.tokens, self.rows = [int(tokens) for tokens in whole["tokens"]], whole
        if whole.empty:
            raise self._missing(1)
        self.memory, self.rate = whole["copy_gb_per_s"].median() * 1e3, whole["peak_tflops"].median() * 1e6
        single = rows[(rows["tokens"] == 1) & (rows["dtype"] == "bf16")].sort_values("median_us", kind="stable")
        single = single.drop_duplicates(["hidden", "intermediate", "experts", "weights"])
        self.fixed = max(0.0, float((single["median_us"] - single["roofline_us"]).median())) if len(single) else 0.0
        self.over = [row["median_us"] / self.roofline(row["tokens"]) for _, row in whole.iterrows()]

    def least(self, tokens: float) -> float:
        """Least time (µs) of the products of so many tokens."""
        sizes = self.sizes
        return 2 * _PRODUCTS * tokens * sizes.top_k * sizes.hidden * sizes.intermediate / self.rate

    def roofline(self, tokens: float) -> float:
        """Least time (µs) of a layer of so many tokens on one GPU: products, or weights of the experts in use and token rows."""
        sizes, chance = self.sizes, self.sizes.top_k / self.sizes.experts
        active = sizes.experts * (-expm1(tokens * log1p(-chance)) if chance < 1 else 1.0)
        return max((active * sizes.expert_bytes + 4 * tokens * sizes.hidden) / self.memory, self.least(tokens))

    def layer(self, tokens: float, load: float = 1.0) -> Answer:
        """The layer of so many tokens on one GPU, if all experts had `load` times the rows. Raises `UserError` below the smallest stored number of tokens."""
        if tokens < self.tokens[0]:
            raise self._missing(tokens)
        if load == 1 and tokens in self.tokens:
            row = self.rows.iloc[self.tokens.index(int(tokens))]
            doubt = ", suspect" if row["suspect"] == True else ""  # noqa: E712
            return Answer(
                row["median_us"], True, f"measured at T={tokens:g} ({row['implementation']}, {row['run']}{doubt})"
            )
        if tokens > self.tokens[-1] and self.least(self.tokens[-1]) < self.roofline(self.tokens[-1]):
            raise self._missing(tokens, f"of {self.tokens[-1]} or more tokens that products limit, not weights")
        over = float(np.interp(log(tokens * load), [log(known) for known in self.tokens], self.over))
        return Answer(over * self.roofline(tokens * load), False, self._between(tokens))

    def rank(self, tokens: int, ep: int, load: float = 1.0) -> Answer:
        """The experts of one of `ep` ranks with `tokens` tokens each, whose rows are `load` times the mean."""
        row = self.exact.get((ep, tokens * ep))
        if row is not None and load == 1 and ep > 1:
            return Answer(
                row["median_us"], True, f"measured at T={tokens * ep}, EP={ep} ({row['implementation']}, {row['run']})"
            )
        whole = self.layer(tokens * ep, load)
        if ep == 1:
            return whole
        return Answer(self.fixed + max(0.0, whole.us - self.fixed) / ep, False, f"1/{ep} of a layer, {whole.source}")

    def _between(self, tokens: float) -> str:
        if tokens in self.tokens:
            return f"measured at T={tokens:g}"
        if tokens > self.tokens[-1]:
            return f"beyond T={self.tokens[-1]}"
        place = int(np.searchsorted(self.tokens, tokens))
        return f"between T={self.tokens[place - 1]} and T={self.tokens[place]}"

    def _missing(self, tokens: float, which: str = "") -> UserError:
        sizes = self.sizes
        axes = f"--hidden {sizes.hidden} --intermediate {sizes.intermediate} --experts {sizes.experts} --top-k {sizes.top_k}"
        form = "" if sizes.weights == "bf16" else f" --weights {sizes.weights}"
        return bad(
            f"stored layers of hidden={sizes.hidden}, intermediate={sizes.intermediate}, experts={sizes.experts}, weights={sizes.weights}",
            f"tokens {', '.join(map(str, self.tokens)) or 'none'}",
            f"rows {which or f'of at most {tokens:g} tokens'}",
            f"`moe-routing-bench measure layer {f'--model {self.model}' if self.model else axes}{form} --tokens {tokens:g}` measures one",
        )
