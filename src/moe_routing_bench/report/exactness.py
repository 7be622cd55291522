"""The bar of accuracy: of which formats of weights and activations the results of our kernels are right. Pure functions; no torch.

A result is right within a limit that follows from the roundings of its cell, against the same products of dequantised weights.
"""

from collections.abc import Mapping

import pandas as pd

from moe_routing_bench.formats.weights import WEIGHTS
from moe_routing_bench.report.bars import PLATFORM, Line
from moe_routing_bench.report.reached import ABSENT, MISSED, OPEN, REACHED
from moe_routing_bench.report.seeds.published import figures
from moe_routing_bench.report.seeds.quantised import FORMATS

_OURS = ("cute", "cute_quantised", "cute_fp8")
_WHAT = "experts: results beside those of dequantised weights"
Case = tuple[str, str]  # formats of weights and activations


def lines(tables: Mapping[str, pd.DataFrame], absent: bool = False) -> list[Line]:
    """A line per run with quantised experts; `tables` are rows by the name of their run. With `absent` one where there is none."""
    cases = {(FORMATS.get(one["format"], one["format"]), one["activations"]) for one in figures("003_accuracy").to_dict("records")}  # fmt: skip
    found = [line for run, rows in tables.items() if (line := _line(run, _judged(rows), cases))]
    return found or ([_said(cases, "–", 0, ABSENT, "")] if absent else [])


def _judged(rows: pd.DataFrame) -> pd.DataFrame:
    """Our rows of experts whose results were held against the reference."""
    own = rows[(rows["bench"] == "experts") & (rows["platform"] == PLATFORM)]
    return own[own["implementation"].isin(_OURS) & own["status"].isin(("ok", "incorrect"))]


def _line(run: str, judged: pd.DataFrame, cases: set[Case]) -> Line | None:
    if not judged["weights"].isin(WEIGHTS).any():
        return None
    right = {
        (str(w), str(a)): bool((rows["status"] == "ok").all()) for (w, a), rows in judged.groupby(["weights", "dtype"])
    }  # type: ignore
    mine, others = ([well for case, well in right.items() if (case in cases) == named] for named in (True, False))
    share = (judged["rel_l2_error"] / judged["tolerance"]).max()
    seen = f"right: {sum(mine)} of its {len(cases)} cases, {sum(others)} of {len(others)} others; largest error {share:.0%} of its limit"
    whole = len(mine) == len(cases) and set(WEIGHTS) <= {weights for weights, _ in right}
    verdict = MISSED if not all(right.values()) else REACHED if whole else OPEN
    return _said(cases, seen, len(mine), verdict, run)


def _said(cases: set[Case], seen: str, judged: int, verdict: str, run: str) -> Line:
    bar = f"{len(cases)} of {len(cases)} cases of seed 003, and all other formats"
    return Line(_WHAT, bar, "–", seen, f"{judged} of {len(cases)}", "–", verdict, run)
