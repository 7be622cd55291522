"""The bandwidth that a mix of reads and writes can reach, of the ceilings in its row. Pure functions.

A copy reads as much as it writes. Work that only reads, as a decoded token reads weights, can be faster than a copy; work that mostly
writes is slower. So a share of a copy may exceed 100 %, and says nothing of how near a limit is.
"""

import math
from collections.abc import Hashable, Mapping
from typing import Any

_Row = Mapping[Hashable, Any] | Mapping[str, Any]


def mixed_gb_per_s(row: _Row) -> float | None:
    """The bandwidth ceiling of a row's own mix, GB/s, or None: on a CPU, and where the working set may be in a cache (`cold`).

    The highest of what was measured for the mix: `stream_gb_per_s`, where there is one; the time per byte interpolated in the share of reads,
    from a copy to reads or writes alone; and, for mixes that mostly write, the copy. In stored rows of H200 and H100 streams of pack and
    combine are 0 to 15 % below the others, 0 to 5 % where they mostly read.
    """
    cold = row.get("cold")
    if cold is None or cold != cold or not cold:  # pandas has NaN for null
        return None
    moved = row["read_bytes"] + row["write_bytes"]
    alone, copy = (row["read_bytes"] - row["write_bytes"]) / moved, row["copy_gb_per_s"]
    mixed = 1 / ((1 - abs(alone)) / copy + abs(alone) / row["read_gb_per_s" if alone > 0 else "write_gb_per_s"])
    stream = row.get("stream_gb_per_s")
    known = [
        mixed,
        *([copy] if alone <= 0 else []),
        *([stream] if stream is not None and not math.isnan(stream) else []),
    ]
    return float(max(known))


def share_of_mixed(row: _Row) -> float:
    """`gb_per_s` over `mixed_gb_per_s`; NaN where there is none."""
    ceiling = mixed_gb_per_s(row)
    return math.nan if ceiling is None else float(row["gb_per_s"] / ceiling)
