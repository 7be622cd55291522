"""What our kernels with quantised weights set out to reach on one H200, and what the rows say. Pure functions; no torch.

As in `targets`, a bar is a number that was fixed before anything was measured; it stays when it is missed.
"""

from collections.abc import Callable

import pandas as pd
from scipy import stats

from moe_routing_bench.figures import format_rows
from moe_routing_bench.formats.weights import WEIGHTS
from moe_routing_bench.report.targets import PLATFORM, Target

QUANTISED, FP8 = "cute_quantised", "cute_fp8"
_FIRST = ("dequant", "dequant_cute", "cute_dequant")  # a kept workspace of 16 bits, then products of 16 bits
_FEW = 64  # rows per expert
_DECODE = {1: 0.50, 8: 0.65, 64: 0.70}  # tokens: share of a copy's bandwidth
_PREFILL = 16384  # tokens
_CELL = ["shape", "tokens", "dtype", "format", "card"]


def bars(table: pd.DataFrame) -> list[Target]:
    """All lines for which there are rows; none on another platform."""
    rows = format_rows.beside_quantised(table[table["platform"] == PLATFORM])
    decode = [_decode(rows, tokens, bar) for tokens, bar in _DECODE.items()]
    prefill = [_prefill(rows, QUANTISED, "int4_g128", 0.85), _prefill(rows, FP8, "e4m3_block128", 1.5)]
    found = [_never_slower(rows), _dequantised(rows), *decode, *_peers(rows), *prefill]
    return [line for line in found if line is not None]


def _times(rows: pd.DataFrame, names: Callable[[pd.Series], pd.Series]) -> pd.Series:
    """The least time of each cell among the implementations for which `names` holds."""
    return rows[names(rows["implementation"])].groupby(_CELL)["median_us"].min()


def _ours(rows: pd.DataFrame) -> pd.Series:
    return _times(rows, lambda names: names.isin((QUANTISED, FP8)))


def _over_dequantised(rows: pd.DataFrame) -> pd.Series:
    """Time of dequantising first over ours in the cells of `experts` with quantised weights that both ran."""
    own = rows[(rows["bench"] == "experts") & rows["weights"].isin(WEIGHTS)]
    return (_times(own, lambda names: names.isin(_FIRST)) / _ours(own)).dropna()


def _spread(ratios: pd.Series) -> str:
    return f"{stats.gmean(ratios):.2f}x in the geometric mean, {ratios.min():.2f}x to {ratios.max():.2f}x"


def _never_slower(rows: pd.DataFrame) -> Target | None:
    few = rows[rows["tokens"] * rows["top_k"] <= _FEW * rows["experts"]]
    ratios = _over_dequantised(few)
    if ratios.empty:
        return None
    slower = int((ratios < 1).sum())
    what = f"experts, at most {_FEW} rows per expert: ours over dequantising first"
    return Target(what, "never slower", f"slower in {slower}; {_spread(ratios)}", len(ratios), slower == 0)


def _dequantised(rows: pd.DataFrame) -> Target | None:
    ratios = _over_dequantised(rows)
    if ratios.empty:
        return None
    what = "experts: ours over dequantising into a kept workspace and multiplying"
    return Target(
        what, "≥ 2x, geometric mean", _spread(ratios), len(ratios), bool(stats.gmean(ratios.astype(float)) >= 2)
    )


def _decode(rows: pd.DataFrame, tokens: int, bar: float) -> Target | None:
    """Bytes over time: at these sizes all but a percent of them are weights."""
    own = rows[(rows["bench"] == "experts") & (rows["implementation"] == QUANTISED) & (rows["tokens"] == tokens)]
    own = own[(own["format"] == "int4_g128") & own["share_of_copy"].notna()]
    if own.empty:
        return None
    shown = "; ".join(f"{shape}: {share:.0%}" for shape, share in zip(own["shape"], own["share_of_copy"], strict=True))
    met = bool((own["share_of_copy"] >= bar).all())
    return Target(
        f"experts, int4_g128, T={tokens}: weight bytes over time", f"≥ {bar:.0%} of copy", shown, len(own), met
    )


def _peers(rows: pd.DataFrame) -> list[Target]:
    """Against the fastest package of somebody else, format by format."""
    own = rows[rows["weights"].isin(WEIGHTS)]
    peers = own[~own["ours"].astype(bool)].groupby(_CELL)["median_us"].min()
    ratios = (peers / _ours(own)).dropna()
    return [
        Target(f"{name}: fastest peer over ours", "≥ 1x, geometric mean", _spread(each), len(each), bool(stats.gmean(each.astype(float)) >= 1))
        for name, each in ratios.groupby("format")
    ]  # fmt: skip


def _prefill(rows: pd.DataFrame, name: str, weights: str, bar: float) -> Target | None:
    """Whole layers, against the fastest of ours with unquantised weights."""
    own = rows[(rows["bench"] == "layer") & (rows["tokens"] == _PREFILL) & rows["ours"].astype(bool)]
    key = ["shape", "dtype", "card"]
    plain = own[own["weights"] == own["dtype"]].groupby(key)["median_us"].min()
    kernel = own[(own["implementation"] == name) & (own["weights"] == weights)].groupby(key)["median_us"].min()
    ratios = (plain / kernel).dropna()
    if ratios.empty:
        return None
    what = f"layer, {weights}, T={_PREFILL}: speed over our unquantised layer"
    return Target(what, f"≥ {bar:g}x", _spread(ratios), len(ratios), bool((ratios >= bar).all()))
