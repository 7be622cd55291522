"""The bar of accuracy: of which formats of weights and activations the results of our kernels are right. Pure functions; no torch.

A result is right within a limit that follows from the roundings of its cell, against the same products of dequantised weights. Measured
cells say so, and the accuracy matrix, in which a format that no kernel of ours takes is judged by the others, and weights by themselves
by what their format promises.
"""

from collections.abc import Iterator, Mapping
from types import MappingProxyType

import pandas as pd

from moe_routing_bench.report.bars import PLATFORM
from moe_routing_bench.report.reached import ABSENT, MISSED, OPEN, REACHED, without_too_few
from moe_routing_bench.report.sections import BarLine
from moe_routing_bench.report.seeds.published import figures
from moe_routing_bench.report.seeds.quantised import FORMATS
from moe_routing_kernels.formats.weights import WEIGHTS

_OURS = ("cute", "cute_quantised", "cute_fp8")
_WHAT = "experts: results beside those of dequantised weights"
_COLUMNS = ["weights", "activations", "right", "share"]
Case = tuple[str, str]  # formats of weights and activations
Tables = Mapping[str, pd.DataFrame]


def lines(tables: Tables, matrices: Tables = MappingProxyType({}), absent: bool = False) -> list[BarLine]:
    """A line per run in which results of quantised experts were judged; none of runs with too few cases where another decides.

    `tables` are rows by the name of their run, `matrices` those of `store.accuracy`. With `absent` a line where there is no such run.
    """
    cases = {(FORMATS.get(one["format"], one["format"]), one["activations"]) for one in figures("003_accuracy").to_dict("records")}  # fmt: skip
    judged = {run: pd.concat([_measured(rows), *_compared(matrices.get(run))]) for run, rows in tables.items()}
    found = [_line(run, rows, cases) for run, rows in judged.items() if rows["weights"].isin(WEIGHTS).any()]
    return without_too_few(found) or ([_said(cases, "–", 0, ABSENT, "")] if absent else [])


def _measured(rows: pd.DataFrame) -> pd.DataFrame:
    """Our measured rows of experts whose results were held against the reference: the formats, whether right, and the share of the limit."""
    own = rows[(rows["bench"] == "experts") & (rows["platform"] == PLATFORM)]
    own = own[own["implementation"].isin(_OURS) & own["status"].isin(("ok", "incorrect"))]
    right, share = own["status"] == "ok", own["rel_l2_error"] / own["tolerance"]
    return own.assign(activations=own["packed"], right=right, share=share)[_COLUMNS]


def _compared(matrix: pd.DataFrame | None) -> Iterator[pd.DataFrame]:
    """The same of the accuracy matrix: of each case our kernels, or all others where none of ours takes it."""
    if matrix is None:
        return
    tried = matrix[(matrix["platform"] == PLATFORM) & matrix["status"].notna()]
    ours = tried["implementation"].isin(_OURS)
    taken = ours.groupby([tried["weights"], tried["activations"]]).transform("any")
    tried = tried[ours | ~taken]
    right = (tried["status"] == "ok") & ~(tried["of_bound"] > 1)
    yield tried.assign(right=right, share=tried["kernel_error"] / tried["tolerance"])[_COLUMNS]


def _line(run: str, judged: pd.DataFrame, cases: set[Case]) -> BarLine:
    right = {(str(w), str(a)): bool(rows["right"].all()) for (w, a), rows in judged.groupby(_COLUMNS[:2])}  # type: ignore
    mine, others = ([well for case, well in right.items() if (case in cases) == named] for named in (True, False))
    share = judged["share"].max()  # none where all crashed
    largest = f"{share:.0%}" if pd.notna(share) else "–"
    seen = f"right: {sum(mine)} of its {len(cases)} cases, {sum(others)} of {len(others)} others; largest error {largest} of its limit"
    whole = len(mine) == len(cases) and set(WEIGHTS) <= {weights for weights, _ in right}
    verdict = MISSED if not all(right.values()) else REACHED if whole else OPEN
    return _said(cases, seen, len(mine), verdict, run)


def _said(cases: set[Case], seen: str, judged: int, verdict: str, run: str) -> BarLine:
    bar = f"{len(cases)} of {len(cases)} cases of seed 003, and all other formats"
    return BarLine(_WHAT, bar, "–", seen, f"{judged} of {len(cases)}", "–", verdict, run)
