"""What the samples of a cell say: the fields of every implementation's row."""

from statistics import mean, median
from typing import Any

import torch

from moe_routing_bench import intervals, statistics
from moe_routing_bench.grid.cell import Job
from moe_routing_bench.measure.candidate import Candidate, kept, summary
from moe_routing_bench.measure.inputs import Sets
from moe_routing_bench.workload.row_map import row_layout


def row(candidate: Candidate) -> dict[str, object]:
    """Row fields of one implementation; samples of blocks that do not count are kept apart, with the reason."""
    counts = kept(candidate)
    aside = [s for b, keep in zip(candidate.blocks, counts, strict=True) if not keep for s in b]
    reason = "a hardware slowdown bit" if aside else None
    checked = {
        n: getattr(candidate.check, n) for n in ("rel_l2_error", "max_abs_error", "tolerance", "mismatches", "ties")
    }
    checked |= {"block_clocks_mhz": candidate.clocks, "block_powers_w": candidate.powers}
    if candidate.energies:
        checked["energy_mj"] = mean(candidate.energies)
    if candidate.timer.name != "wall":
        checked["launch_hidden"] = candidate.timer.hidden / candidate.timer.samples
        checked["busy_share"] = sum(map(sum, candidate.blocks)) * candidate.timer.calls / sum(candidate.spans)
    if doubts := [doubt for entry in candidate.entries for doubt in entry.doubts]:
        checked |= {"suspect": True, "suspect_reason": "; ".join(doubts)}
    return (
        {"status": "ok", "set_aside": len(aside), "set_aside_samples_us": aside, "set_aside_reason": reason}
        | checked
        | candidate.fields
        | summary(candidate)
    )


def speedups(alive: list[Candidate], rows: dict[str, dict], baseline: str) -> None:
    """Ratios to the baseline, and to the fastest other implementation, whose name is `best_other`.

    If `auto` resolves to an implementation that is also in the cell, it is excluded from comparisons.
    """
    by_name = {candidate.name: candidate for candidate in alive}
    themselves = [
        candidate for candidate in alive if candidate.identity == candidate.name or candidate.identity not in by_name
    ]
    for candidate in alive:
        if baseline in by_name:
            rows[candidate.name] |= _ratio("speedup", by_name[baseline], candidate) | {"baseline": baseline}
        others = [other.name for other in themselves if other.identity != candidate.identity]
        if others:
            best = min(others, key=lambda name: rows[name]["median_us"])
            rows[candidate.name] |= _ratio("best_speedup", by_name[best], candidate) | {"best_other": best}


def twins(alive: list[Candidate], rows: dict[str, dict]) -> None:
    """Of an implementation that was entered twice, the time of the first entry over that of the second: noise, but for chance 1."""
    for candidate in alive:
        if candidate.twin:
            good = [block for block, keep in zip(candidate.twin.blocks, kept(candidate.twin), strict=True) if keep]
            rows[candidate.name] |= _ratio("twin_speedup", candidate, candidate.twin)
            rows[candidate.name]["twin_median_us"] = median([sample for block in good for sample in block])


def _ratio(column: str, base: Candidate, candidate: Candidate) -> dict[str, float | None]:
    """Time of `base` over that of `candidate`, its interval and p, paired within the rounds in which both blocks count."""
    both = [all(pair) for pair in zip(kept(base), kept(candidate), strict=True)]
    counts = both if any(both) else [True] * len(both)
    medians = [
        [median(block) for block, keep in zip(entry.blocks, counts, strict=True) if keep] for entry in (base, candidate)
    ]
    turns = [turn for turn, keep in zip(base.turns, counts, strict=True) if keep] if base.turns else None
    ratio = intervals.paired_ratio(medians[0], medians[1], turns)
    return dict(zip((column, f"{column}_ci_low", f"{column}_ci_high", f"{column}_p"), ratio, strict=True))


def routing(job: Job, definition: Any, sets: Sets) -> dict[str, object]:
    """Realised loads, drops and gate entropy of the first draw; and the mean of active experts over the timed sets, whose weights the mean
    of `read_bytes` is of."""
    layout = row_layout(job.cell)
    assignments = [definition.assignment(job.cell, drawn.inputs, drawn.expected) for drawn in sets.base]
    here = [assignment.ids[assignment.ids < layout.experts] for assignment in assignments]
    known, active = assignments[0], [len(ids.unique()) for ids in here]
    loads = torch.bincount(here[0].long(), minlength=layout.experts).tolist()
    balance = statistics.load_statistics(loads)
    balance["mean_active_experts"] = mean(active[i % len(active)] for i in range(len(sets)))
    kept = sum(min(load, layout.limit) for load in loads)
    balance |= {"drop_rate": 1 - kept / max(1, sum(loads)), "capacity": layout.capacity}
    if known.inverse is not None:
        dropped = (known.inverse < 0).all(1)[(known.ids < layout.experts).any(1)]
        balance["token_drop_rate"] = float(dropped.float().sum() / max(1, len(dropped)))
    if known.weights is not None:
        share = known.weights.double() / known.weights.double().sum(1, keepdim=True)
        balance["gate_entropy"] = float(-(share * share.clamp_min(1e-30).log()).sum(1).mean())
    return balance | ({"rows": layout.used(loads)} if "layout" in job.cell else {})


def traffic(job: Job, definition: Any, sets: Sets) -> dict[str, object]:
    """What ranks have, send and receive, of the first draw, where a bench has ranks."""
    drawn = sets.base[0]
    return definition.traffic(job.cell, drawn.inputs, drawn.expected) if hasattr(definition, "traffic") else {}
