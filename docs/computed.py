"""The figures in the documents' prose that are made of stored rows: `NAME` of a mark `1.19<!--=NAME-->` (docs/prose_numbers.py), and how it is computed."""

from collections.abc import Callable, Mapping
from functools import partial

import pandas as pd
from layer_tables import BASELINE, FIRST, PRODUCTION, chosen, even, measured, rivals
from scipy import stats
from stored_tables import LAYERS, QUANTISED, QUANTISED_FLOATS, stored

from moe_routing_bench.comparison import origins
from moe_routing_kernels.formats import FORMATS


def leads(where: str) -> pd.Series:
    """How many times as long as what `auto` runs the fastest rival takes, by cell of whole layers at prefill for which `where` holds."""
    rows = measured("prefill").query(where, engine="python")
    return pd.Series({key: _over(cell, rivals(cell).min()) for key, cell in rows.groupby("cell", sort=False)})


def _over(cell: pd.DataFrame, us: float) -> float:
    return us / cell.set_index("implementation").at[chosen(cell), "median_us"]


_OURS_BY_FAR = "model in ('deepseek-v3', 'qwen3-next-80b-a3b')"
_GPT_OSS = "model == 'gpt-oss-120b'"
_LEVEL = f"not ({_OURS_BY_FAR} or {_GPT_OSS}) and skew == 0"


def ratio(where: str, edge: str) -> str:
    """The least or largest lead."""
    return f"{getattr(leads(where), edge)():.2f}"


def servers(phase: str, edge: str) -> str:
    """How many times as long as what `auto` runs the faster of the kernels that serve models takes, in cells with even loads: the least, or the largest."""
    cells = [cell for _, cell in even(measured(phase)).groupby("cell")]
    times = [(cell, rivals(cell).reindex(list(PRODUCTION)).min()) for cell in cells]
    return f"{getattr(pd.Series([_over(cell, us) for cell, us in times if not pd.isna(us)]), edge)():.2f}"


def served(tokens: int) -> str:
    """The lead over the fastest rival at decoding, of the first model with one number of tokens."""
    cell = even(measured("decode")).query(
        "model == @FIRST and tokens == @tokens", local_dict={"FIRST": FIRST, "tokens": tokens}
    )
    return f"{_over(cell, rivals(cell).min()):.2f}"


def away() -> str:
    """The largest distance from 1 of the cells that are level, in per cent."""
    return f"{100 * (leads(_LEVEL) - 1).abs().max():.0f}"


def over_sonicmoe() -> str:
    """SonicMoE over what `auto` runs: the geometric mean of the cells with even loads in which it ran."""
    cells = [cell for _, cell in even(measured("prefill")).groupby("cell") if "sonicmoe" in set(cell["implementation"])]
    return f"{stats.gmean([_over(cell, rivals(cell)['sonicmoe']) for cell in cells]):.2f}"


def mean_besides_torch() -> str:
    """The fastest rival over what `auto` runs, where another rival than torch ran."""
    rows = even(measured("prefill"))
    cells = [cell for _, cell in rows.groupby("cell") if set(rivals(cell).index) - {BASELINE}]
    return f"{stats.gmean([_over(cell, rivals(cell).min()) for cell in cells]):.2f}"


def layer_rows() -> pd.DataFrame:
    """The timed rows of the run of layers."""
    return stored(LAYERS + "measurements.parquet").query("status == 'ok'")


def drift(edge: str) -> str:
    """The least or largest drift for which rows of layers are suspect, in per cent."""
    drifts = layer_rows()["suspect_reason"].str.extract(r"drifted ([\d.]+)%")[0].dropna().astype(float)
    return f"{getattr(drifts, edge)():g}"


def busy(edge: str) -> str:
    """The least or largest share of the time that the GPU was busy in the run of layers, in per cent."""
    return f"{100 * getattr(layer_rows()['busy_share'], edge)():.{1 if edge == 'max' else 0}f}"


def comparisons() -> pd.DataFrame:
    """The comparisons of kernels with quantised weights, all of which must be within their bounds."""
    rows = stored(QUANTISED + "accuracy.parquet").query("status == 'ok'")
    assert (rows["of_bound"].dropna() <= 1).all() and (rows["kernel_error"].dropna() <= rows["tolerance"]).all()
    return rows


def gate_error() -> str:
    """The largest error of our gates and torch's."""
    rows = stored("measurements.parquet").query("bench == 'gate' and implementation in ('torch', 'triton', 'cute')")
    return f"{rows['rel_l2_error'].max():.1e}".replace("e-0", "e-")


def undoubted() -> str:
    """How many rows of the routing grid have a time; none may be doubtful."""
    rows = stored("measurements.parquet").query("status == 'ok'")
    assert rows["anomaly"].isna().all()
    return str(len(rows))


def floats_over(ours: str, other: str, layout: str, edge: str) -> str:
    """The least or largest time of a peer over ours, over the cells of 8-bit floats with a layout that both ran."""
    rows = stored(QUANTISED_FLOATS + "measurements.parquet").query(
        "bench == 'experts' and status == 'ok' and layout == @layout"
    )
    times = rows.pivot(index="cell", columns="implementation", values="median_us")
    return f"{getattr((times[other] / times[ours]).dropna(), edge)():.2f}"


def of_seed(name: str, tokens: int, edge: str) -> str:
    """Layers of seed 003 by their fastest implementation of ours, the least or largest: µs with 8 or 4 bits, µs with 16, and how many times as long these take."""
    rows = stored("../nvidia-h200.seed-003-layers/measurements.parquet").query("bench == 'layer' and status == 'ok'")
    rows = rows[rows["implementation"].isin(origins.ours("layer")) & (rows["tokens"] == tokens)]
    quantised = rows["weights"] != rows["dtype"]
    few = rows[quantised].groupby(["model", "dtype", "weights"])["median_us"].min()
    plain = rows[~quantised].groupby(["model", "dtype"])["median_us"].min()
    ratios = pd.Series([plain.loc[key[:2]] / us for key, us in few.items()])
    found = {"quantised": few, "plain": plain, "ratio": ratios}[name]
    return f"{getattr(found, edge)():.{2 if name == 'ratio' else 0}f}"


def dequantising(where: str, edge: str) -> str:
    """The fastest way that dequantises first over our kernel, the least or largest over cells of seed 003; `where` is of `per`, the rows per expert."""
    rows = stored("../nvidia-h200.seed-003/measurements.parquet").query(
        "bench == 'experts' and status == 'ok' and weights != dtype"
    )
    rows = rows.assign(per=rows["tokens"] * rows["top_k"] / rows["experts"]).query(where)
    times = rows.pivot(index="cell", columns="implementation", values="median_us")
    first = times[[name for name in times if name.startswith("dequant")]].min(axis=1)
    return f"{getattr((first / times['cute_quantised']).dropna(), edge)():.1f}"


COMPUTED: Mapping[str, Callable[[], str]] = {
    "lead-far-least": partial(ratio, _OURS_BY_FAR, "min"),
    "lead-far-most": partial(ratio, _OURS_BY_FAR, "max"),
    "lead-gpt-oss-least": partial(ratio, _GPT_OSS, "min"),
    "lead-gpt-oss-most": partial(ratio, _GPT_OSS, "max"),
    "lead-servers-least": partial(servers, "prefill", "min"),
    "lead-servers-most": partial(servers, "prefill", "max"),
    **{f"lead-decode-{tokens}": partial(served, tokens) for tokens in (1, 8, 64)},
    "lead-level": away,
    "lead-skewed-least": partial(ratio, "skew > 0", "min"),
    "lead-skewed-most": partial(ratio, "skew > 0", "max"),
    "lead-mean": mean_besides_torch,
    "lead-sonicmoe": over_sonicmoe,
    "layers-drift-least": partial(drift, "min"),
    "layers-drift-most": partial(drift, "max"),
    "layers-suspect": lambda: str(layer_rows().query("suspect == True")["cell"].nunique()),
    "layers-cells": lambda: str(layer_rows()["cell"].nunique()),
    "layers-rows": lambda: str(len(layer_rows())),
    "layers-wide": lambda: str(int((layer_rows()["converged"] == False).sum())),  # noqa: E712
    "layers-busy-least": partial(busy, "min"),
    "layers-busy-most": partial(busy, "max"),
    "formats": lambda: str(len(set(comparisons()["weights"]) - set(FORMATS))),
    "format-comparisons": lambda: str(len(comparisons())),
    "gate-error": gate_error,
    "routing-rows": undoubted,
    "floats-humming-least": partial(floats_over, "cute_quantised", "humming", "compact", "min"),
    "floats-humming-most": partial(floats_over, "cute_quantised", "humming", "compact", "max"),
    "fp8-deepgemm-least": partial(floats_over, "cute_fp8", "deepgemm_fp8", "block128", "min"),
    "fp8-deepgemm-most": partial(floats_over, "cute_fp8", "deepgemm_fp8", "block128", "max"),
    "dequant-few-least": partial(dequantising, "per <= 64", "min"),
    "dequant-few-most": partial(dequantising, "per <= 64", "max"),
    "dequant-least": partial(dequantising, "per > 0", "min"),
    **{
        f"seed-{name}-{tokens}-{word}": partial(of_seed, name, tokens, edge)
        for name in ("quantised", "plain", "ratio")
        for tokens in (1, 128)
        for word, edge in (("least", "min"), ("most", "max"))
    },
}
