"""What the section on method says of the rows of a report, or of all that a site has. Pure functions; no torch."""

import pandas as pd

from moe_routing_bench.comparison import devices
from moe_routing_bench.figures import provenance
from moe_routing_bench.quantities import count
from moe_routing_bench.report.sections import Method

SHORT, LONG = "short", "long"
_SAID = {
    SHORT: "in blocks in random order",
    LONG: "each in long turns of its own, because a power limit sets the clock",
}


ANY = Method(f"{_SAID[SHORT]}, or {_SAID[LONG]}")


def of_rows(rows: pd.DataFrame) -> Method:
    """What the rows with a time say; of rows without any, what would be said of others."""
    ok = rows[rows["status"] == "ok"]
    counts = ok["turns"].value_counts()
    known = [kind for kind in _SAID if counts.get(kind)]
    if len(known) == 1:
        turns = _SAID[known[0]]
    elif known:
        turns = f"{_SAID[SHORT]} ({count(counts[SHORT], 'row')}), or {_SAID[LONG]} ({count(counts[LONG], 'row')})"
    else:
        turns = ANY.turns
    gpu = not ok.empty and devices.column(ok) == devices.GPU
    return Method(turns, f" ({provenance.caches(ok)})" if gpu else "")
