"""What the blocks of an entry say: which of them count, and the summary that is published and that decides when to stop."""

from moe_routing_bench import intervals, statistics
from moe_routing_bench.measure.candidate import Candidate


def kept(entry: Candidate) -> list[bool]:
    """Which blocks count: not those with a slowdown bit, unless that would leave none.

    A low clock alone is no reason: under the power limit it is the state that such work is in.
    """
    good = [not slow for slow in entry.slow]
    return good if any(good) else [True] * len(good)


def summary(entry: Candidate) -> dict[str, object]:
    """Row fields of the blocks that count: times in microseconds, with the interval of the median."""
    counts = kept(entry)
    good = [block for block, keep in zip(entry.blocks, counts, strict=True) if keep]
    turns = [turn for turn, keep in zip(entry.turns, counts, strict=True) if keep] if entry.turns else None
    return statistics.summarize(good, turns)


def half_width(entry: Candidate) -> float:
    """Half the width of the published interval over the published median; infinite where there is no interval."""
    found = summary(entry)
    return intervals.half_width((found["ci_low_us"], found["ci_high_us"]), found["median_us"])  # type: ignore[arg-type]
