"""What experts and layers with quantised weights set out to reach on one H200, and of which formats results are right. Pure functions; no torch.

A result is right within a limit that follows from the roundings of its cell, against the same products of dequantised weights. Measured
cells say so, and the accuracy matrix, in which a format that no kernel of ours takes is judged by the others, and weights by themselves
by what their format promises.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from types import MappingProxyType

import pandas as pd

from moe_routing_bench.benches.registry import BENCHES
from moe_routing_bench.comparison import ratios
from moe_routing_bench.report import layer_bars, reached
from moe_routing_bench.report.bars import (
    PERCENT,
    PLATFORM,
    Bar,
    Figure,
    Level,
    Row,
    Values,
    against,
    fastest,
    own_figure,
)
from moe_routing_bench.report.layer_bars import OURS, QWEN, labelled
from moe_routing_bench.report.parts import BarLine
from moe_routing_bench.report.reached import ABSENT, MISSED, OPEN, REACHED, without_too_few
from moe_routing_bench.report.seeds import figures
from moe_routing_bench.report.seeds.kernels import DEQUANTISED, FORMATS
from moe_routing_kernels.formats.weights import WEIGHTS

QUANTISED, FP8 = "cute_quantised", "cute_fp8"
_FEW = 64  # rows per expert
_PEERS = {one.name for one in BENCHES["experts"].implementations if one.peer}
DECODE = {name: {**cell, "weights": "int4_g128"} for name, cell in layer_bars.DECODE.items()}
_KERNELS = ("cute", "cute_quantised", "cute_fp8")
_EXACT = "experts: results compared with those of dequantised weights"
_COLUMNS = ["weights", "activations", "right", "share"]
Case = tuple[str, str]  # formats of weights and activations
Tables = Mapping[str, pd.DataFrame]


def replayed(most: float = math.inf) -> dict[str, Values]:
    """The cells of seed 003 with quantised weights and at most so many rows per expert, by shape, formats and activations.

    Its shapes are the first product of an expert: hidden is its K, intermediate N / 2.
    """
    rows = figures("003")
    rows = rows[rows["format"].isin(FORMATS) & (rows["tokens"] <= most * rows["experts"])]
    return {
        f"{one['shape']} E{one['experts']} N{one['n']} K{one['k']} {FORMATS[one['format']]} {one['activations']}": {
            "tokens": one["tokens"],
            "hidden": one["k"],
            "intermediate": one["n"] // 2,
            "experts": one["experts"],
            "top_k": 1,
            "skew": None,
            "dtype": one["activations"],
            "weights": FORMATS[one["format"]],
        }
        for one in rows.to_dict("records")
    }


def lines(tables: Tables, matrices: Tables = MappingProxyType({}), absent: bool = False) -> list[BarLine]:
    """`reached.lines` of all bars, and what is right.

    `tables` are rows by the name of their run, `matrices` those of the accuracy matrix (`store.companions`) of the runs that have them.
    """
    return [*reached.lines(bars(tables), tables, absent), *exact(tables, matrices, absent)]


def bars(tables: Tables) -> list[Bar]:
    """All bars; those against peers are of the formats that our kernels have rows of."""
    own = {
        name
        for rows in tables.values()
        for name in rows.loc[(rows["bench"] == "experts") & rows["implementation"].isin((QUANTISED, FP8)), "weights"]
    }
    formats = [name for name in WEIGHTS if name in own]
    return [
        Bar(
            f"experts, seed 003, at most {_FEW} rows per expert: speed over dequantising first",
            "experts",
            _over_dequantised,
            Level(each=1.0),
            cells=replayed(_FEW),
        ),
        Bar(
            "experts, seed 003: speed over dequantising into a kept workspace and multiplying",
            "experts",
            _over_dequantised,
            Level(2.0),
            Level(4.0),
            replayed(),
        ),
        Bar(
            "experts, decode, int4_g128: weight bytes over time, of copy",
            "experts",
            partial(own_figure, "share_of_copy", ratios.share, (QUANTISED,)),
            Level(each=(0.50, 0.50, 0.65, 0.65, 0.70, 0.70)),
            Level(each=0.75),
            DECODE,
            unit=PERCENT,
        ),
        *(_peers(name) for name in formats),
        _prefill("int4_g128", "bf16", QUANTISED, Level(0.85), Level(1.0)),
        _prefill("e4m3_block128", "fp8_block128", FP8, Level(1.5), Level(1.8)),
    ]


def _over_dequantised(rows: Sequence[Row]) -> Figure | None:
    """The time of dequantising first over that of our kernel; nothing unless the form that is hard to beat (`dequant_cute`) ran."""
    if not any(row["implementation"] == "dequant_cute" for row in rows):
        return None
    return against((QUANTISED,), DEQUANTISED.__contains__, rows)


def _peers(weights: str) -> Bar:
    """Against the fastest other package that takes the same weights, in every cell that one ran in."""
    return Bar(
        f"experts, {weights}: speed over the fastest peer",
        "experts",
        partial(against, (QUANTISED, FP8), _PEERS.__contains__),
        Level(1.0),
        Level(1.15),
        among=lambda rows: rows[rows["weights"] == weights],
    )


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


def exact(tables: Tables, matrices: Tables = MappingProxyType({}), absent: bool = False) -> list[BarLine]:
    """A line per run in which results of quantised experts were judged; none of runs with too few cases where another decides.

    `tables` are rows by the name of their run, `matrices` those of the accuracy matrix (`store.companions`). With `absent` a line where there is no such run.
    """
    cases = {
        (FORMATS.get(one["format"], one["format"]), one["activations"])
        for one in figures("003_accuracy").to_dict("records")
    }
    judged = {run: pd.concat([_measured(rows), *_compared(matrices.get(run))]) for run, rows in tables.items()}
    found = [_exact_line(run, rows, cases) for run, rows in judged.items() if rows["weights"].isin(WEIGHTS).any()]
    return without_too_few(found) or ([_exact_said(cases, "–", 0, ABSENT, "")] if absent else [])


def _measured(rows: pd.DataFrame) -> pd.DataFrame:
    """Our measured rows of experts whose results were held against the reference: the formats, whether right, and the share of the limit."""
    own = rows[(rows["bench"] == "experts") & (rows["platform"] == PLATFORM)]
    own = own[own["implementation"].isin(_KERNELS) & own["status"].isin(("ok", "incorrect"))]
    right, share = own["status"] == "ok", own["rel_l2_error"] / own["tolerance"]
    return own.assign(activations=own["packed"], right=right, share=share)[_COLUMNS]


def _compared(matrix: pd.DataFrame | None) -> Iterator[pd.DataFrame]:
    """The same of the accuracy matrix: of each case our kernels, or all others where none of ours takes it."""
    if matrix is None:
        return
    tried = matrix[(matrix["platform"] == PLATFORM) & matrix["status"].notna()]
    ours = tried["implementation"].isin(_KERNELS)
    taken = ours.groupby([tried["weights"], tried["activations"]]).transform("any")
    tried = tried[ours | ~taken]
    right = (tried["status"] == "ok") & ~(tried["of_bound"] > 1)
    yield tried.assign(right=right, share=tried["kernel_error"] / tried["tolerance"])[_COLUMNS]


def _exact_line(run: str, judged: pd.DataFrame, cases: set[Case]) -> BarLine:
    right = {(str(w), str(a)): bool(rows["right"].all()) for (w, a), rows in judged.groupby(_COLUMNS[:2])}  # type: ignore
    mine, others = ([well for case, well in right.items() if (case in cases) == named] for named in (True, False))
    share = judged["share"].max()  # none where all crashed
    largest = f"{share:.0%}" if pd.notna(share) else "–"
    seen = f"right: {sum(mine)} of its {len(cases)} cases, {sum(others)} of {len(others)} others; largest error {largest} of its limit"
    whole = len(mine) == len(cases) and set(WEIGHTS) <= {weights for weights, _ in right}
    verdict = MISSED if not all(right.values()) else REACHED if whole else OPEN
    return _exact_said(cases, seen, len(mine), verdict, run)


def _exact_said(cases: set[Case], seen: str, judged: int, verdict: str, run: str) -> BarLine:
    bar = f"{len(cases)} of {len(cases)} cases of seed 003, and all other formats"
    return BarLine(_EXACT, bar, "–", seen, f"{judged} of {len(cases)}", "–", verdict, run)
