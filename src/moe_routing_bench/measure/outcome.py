"""What the samples of a cell say: the fields of every implementation's row."""

from statistics import median
from typing import Any

import torch

from moe_routing_bench.grid.job import Job
from moe_routing_bench.measure import statistics
from moe_routing_bench.measure.candidate import Candidate
from moe_routing_bench.measure.inputs import InputSet
from moe_routing_bench.measure.sampling import kept
from moe_routing_bench.workload.rows import row_layout


def row(one: Candidate, seed: int) -> dict[str, object]:
    """Row fields of one implementation; samples of blocks that do not count are kept apart, with the reason."""
    counts = kept(one)
    good = [b for b, keep in zip(one.blocks, counts, strict=True) if keep]
    aside = [s for b, keep in zip(one.blocks, counts, strict=True) if not keep for s in b]
    reason = "clock below 90 % of the median, or a hardware slowdown bit" if aside else None
    checked = {n: getattr(one.check, n) for n in ("rel_l2_error", "max_abs_error", "tolerance", "mismatches", "ties")}
    return (
        {"status": "ok", "set_aside": len(aside), "set_aside_samples_us": aside, "set_aside_reason": reason}
        | checked | one.fields | statistics.summarize(good, seed)
    )  # fmt: skip


def speedups(alive: list[Candidate], rows: dict[str, dict], baseline: str, seed: int) -> None:
    """Ratios to the baseline, paired within the rounds in which both blocks count."""
    base = next((one for one in alive if one.name == baseline), None)
    if base is None:
        return
    for one in alive:
        rounds = list(zip(base.blocks, one.blocks, kept(base), kept(one), strict=True))
        pairs = [(median(b), median(o)) for b, o, *both in rounds if all(both)]
        pairs = pairs or [(median(b), median(o)) for b, o, *_ in rounds]
        ratio = statistics.paired_ratio([b for b, _ in pairs], [o for _, o in pairs], seed)
        rows[one.name] |= dict(zip(("speedup", "speedup_ci_low", "speedup_ci_high"), ratio, strict=True)) | {
            "baseline": baseline
        }


def routing(job: Job, definition: Any, first: InputSet) -> dict[str, object]:
    """Realised loads, drops and gate entropy of the first set."""
    known, layout = definition.assignment(job.cell, first.inputs, first.expected), row_layout(job.cell)
    loads = torch.bincount(known.ids.reshape(-1).long(), minlength=layout.experts).tolist()
    found = statistics.load_statistics(loads)
    held = sum(min(load, layout.limit) for load in loads)
    found |= {"drop_rate": 1 - held / sum(loads), "capacity": layout.capacity}
    if known.inverse is not None:
        found["token_drop_rate"] = float((known.inverse < 0).all(1).float().mean())
    if known.weights is not None:
        share = known.weights.double() / known.weights.double().sum(1, keepdim=True)
        found["gate_entropy"] = float(-(share * share.clamp_min(1e-30).log()).sum(1).mean())
    return found | ({"rows": layout.used(loads)} if "layout" in job.cell else {})
