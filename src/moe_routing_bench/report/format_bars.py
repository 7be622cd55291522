"""What experts and layers with quantised weights set out to reach on one H200. Pure functions; no torch."""

import math
from collections.abc import Sequence
from functools import partial
from types import MappingProxyType

from moe_routing_bench.benches.registry import BENCHES
from moe_routing_bench.comparison import ratios
from moe_routing_bench.report import exactness, layer_bars, reached
from moe_routing_bench.report.bar_figures import Figure, Row, against, fastest, own_figure
from moe_routing_bench.report.bars import PERCENT, Bar, Level, Values
from moe_routing_bench.report.exactness import Tables
from moe_routing_bench.report.layer_bars import OURS, QWEN, labelled
from moe_routing_bench.report.sections import BarLine
from moe_routing_bench.report.seeds.kernels import DEQUANTISED
from moe_routing_bench.report.seeds.published import figures
from moe_routing_bench.report.seeds.quantised import FORMATS
from moe_routing_kernels.formats.weights import WEIGHTS

QUANTISED, FP8 = "cute_quantised", "cute_fp8"
_FEW = 64  # rows per expert
_PEERS = {one.name for one in BENCHES["experts"].implementations if one.peer}
DECODE = {name: {**cell, "weights": "int4_g128"} for name, cell in layer_bars.DECODE.items()}


def replayed(most: float = math.inf) -> dict[str, Values]:
    """The cells of seed 003 with quantised weights and at most so many rows per expert, by shape, formats and activations.

    Its shapes are the first product of an expert: hidden is its K, intermediate N / 2.
    """
    rows = figures("003")
    rows = rows[rows["format"].isin(FORMATS) & (rows["tokens"] <= most * rows["experts"])]
    return {
        f"{one['shape']} E{one['experts']} N{one['n']} K{one['k']} {FORMATS[one['format']]} {one['activations']}": {
            "tokens": one["tokens"], "hidden": one["k"], "intermediate": one["n"] // 2, "experts": one["experts"], "top_k": 1, "skew": None,
            "dtype": one["activations"], "weights": FORMATS[one["format"]],
        }
        for one in rows.to_dict("records")
    }  # fmt: skip


def lines(tables: Tables, matrices: Tables = MappingProxyType({}), absent: bool = False) -> list[BarLine]:
    """`reached.lines` of all bars, and what is right.

    `tables` are rows by the name of their run, `matrices` those of `store.accuracy` of the runs that have them.
    """
    return [*reached.lines(bars(tables), tables, absent), *exactness.lines(tables, matrices, absent)]


def bars(tables: Tables) -> list[Bar]:
    """All bars; those against peers are of the formats that our kernels have rows of."""
    own = {
        name
        for rows in tables.values()
        for name in rows.loc[(rows["bench"] == "experts") & rows["implementation"].isin((QUANTISED, FP8)), "weights"]
    }
    formats = [name for name in WEIGHTS if name in own]
    return [
        Bar(f"experts, seed 003, at most {_FEW} rows per expert: speed over dequantising first", "experts", _over_dequantised, Level(each=1.0), cells=replayed(_FEW)),
        Bar("experts, seed 003: speed over dequantising into a kept workspace and multiplying", "experts", _over_dequantised, Level(2.0), Level(4.0), replayed()),
        Bar(
            "experts, decode, int4_g128: weight bytes over time, of copy", "experts", partial(own_figure, "share_of_copy", ratios.share, (QUANTISED,)),
            Level(each=(0.50, 0.50, 0.65, 0.65, 0.70, 0.70)), Level(each=0.75), DECODE, unit=PERCENT,
        ),
        *(_peers(name) for name in formats),
        _prefill("int4_g128", "bf16", QUANTISED, Level(0.85), Level(1.0)),
        _prefill("e4m3_block128", "fp8_block128", FP8, Level(1.5), Level(1.8)),
    ]  # fmt: skip


def _over_dequantised(rows: Sequence[Row]) -> Figure | None:
    """The time of dequantising first over that of our kernel; nothing unless the form that is hard to beat (`dequant_cute`) ran."""
    if not any(row["implementation"] == "dequant_cute" for row in rows):
        return None
    return against((QUANTISED,), DEQUANTISED.__contains__, rows)


def _peers(weights: str) -> Bar:
    """Against the fastest package of somebody else that takes the same weights, in every cell that one ran in."""
    return Bar(
        f"experts, {weights}: speed over the fastest peer", "experts", partial(against, (QUANTISED, FP8), _PEERS.__contains__),
        Level(1.0), Level(1.15), among=lambda rows: rows[rows["weights"] == weights],
    )  # fmt: skip


def _prefill(weights: str, packed: str, name: str, level: Level, stretch: Level) -> Bar:
    """A whole layer against the fastest of ours with unquantised weights, which is another cell of the same card."""
    both = labelled(QWEN | {"tokens": 16384, "weights": ("bf16", weights), "packed": ("bf16", packed)})

    def figure(rows: Sequence[Row]) -> Figure | None:
        plain = fastest([row for row in rows if row["weights"] == row["dtype"]], OURS.__contains__)
        own = fastest([row for row in rows if row["weights"] == weights and row["packed"] == packed], name.__eq__)
        return plain and own and Figure(ratios.speed(plain, own), (plain, own), f"{name}, {plain['implementation']}")

    return Bar(
        f"layer, prefill, {weights} x {packed}: speed over our bf16 layer", "layer", figure, level, stretch, both
    )
