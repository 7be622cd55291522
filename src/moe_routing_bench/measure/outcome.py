"""What the samples of a cell say: the fields of every implementation's row."""

from statistics import mean, median
from typing import Any

import torch

from moe_routing_bench import statistics
from moe_routing_bench.grid.job import Job
from moe_routing_bench.measure.candidate import Candidate
from moe_routing_bench.measure.inputs import Sets
from moe_routing_bench.measure.sampling import kept
from moe_routing_bench.workload.rows import row_layout


def row(one: Candidate) -> dict[str, object]:
    """Row fields of one implementation; samples of blocks that do not count are kept apart, with the reason."""
    counts = kept(one)
    good = [b for b, keep in zip(one.blocks, counts, strict=True) if keep]
    aside = [s for b, keep in zip(one.blocks, counts, strict=True) if not keep for s in b]
    reason = "a hardware slowdown bit" if aside else None
    checked = {n: getattr(one.check, n) for n in ("rel_l2_error", "max_abs_error", "tolerance", "mismatches", "ties")}
    checked |= {"block_clocks_mhz": one.clocks, "block_powers_w": one.powers}
    if one.energies:
        checked["energy_mj"] = mean(one.energies)
    if one.timer.name != "wall":
        checked["launch_hidden"] = one.timer.hidden / one.timer.samples
        checked["busy_share"] = sum(map(sum, one.blocks)) * one.timer.calls / sum(one.spans)
    return (
        {"status": "ok", "set_aside": len(aside), "set_aside_samples_us": aside, "set_aside_reason": reason}
        | checked
        | one.fields
        | statistics.summarize(good)
    )


def speedups(alive: list[Candidate], rows: dict[str, dict], baseline: str) -> None:
    """Ratios to the baseline, and to the fastest other implementation, whose name is `best_other`.

    What has chosen to be another one of the cell is not compared with it, nor is it anybody's `best_other`.
    """
    by_name = {one.name: one for one in alive}
    themselves = [one for one in alive if one.identity == one.name or one.identity not in by_name]
    for one in alive:
        if baseline in by_name:
            rows[one.name] |= _ratio("speedup", by_name[baseline], one) | {"baseline": baseline}
        others = [other.name for other in themselves if other.identity != one.identity]
        if others:
            best = min(others, key=lambda name: rows[name]["median_us"])
            rows[one.name] |= _ratio("best_speedup", by_name[best], one) | {"best_other": best}


def twins(alive: list[Candidate], rows: dict[str, dict]) -> None:
    """Of an implementation that was entered twice, the time of the first entry over that of the second: noise, but for chance 1."""
    for one in alive:
        if one.twin:
            good = [block for block, keep in zip(one.twin.blocks, kept(one.twin), strict=True) if keep]
            rows[one.name] |= _ratio("twin_speedup", one, one.twin)
            rows[one.name]["twin_median_us"] = median([sample for block in good for sample in block])


def _ratio(column: str, base: Candidate, one: Candidate) -> dict[str, float | None]:
    """Time of `base` over that of `one`, its interval and p, paired within the rounds in which both blocks count."""
    rounds = list(zip(base.blocks, one.blocks, kept(base), kept(one), strict=True))
    pairs = [(median(b), median(o)) for b, o, *both in rounds if all(both)]
    pairs = pairs or [(median(b), median(o)) for b, o, *_ in rounds]
    ratio = statistics.paired_ratio([b for b, _ in pairs], [o for _, o in pairs])
    return dict(zip((column, f"{column}_ci_low", f"{column}_ci_high", f"{column}_p"), ratio, strict=True))


def routing(job: Job, definition: Any, sets: Sets) -> dict[str, object]:
    """Realised loads, drops and gate entropy of the first draw."""
    first, layout = sets.base[0], row_layout(job.cell)
    known = definition.assignment(job.cell, first.inputs, first.expected)
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
