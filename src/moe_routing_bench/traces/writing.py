"""Expert ids to a Parquet file that the sampler `trace` replays."""

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from moe_routing_bench.store.parquet import write_table
from moe_routing_bench.traces.checks import checked
from moe_routing_kernels.errors import writing

COLUMN = "expert_ids"


def write(path: Path, ids: Any, experts: int | None = None) -> None:
    """Write expert ids (T, k), of anything that numpy takes for an array of whole numbers, as a trace, or nothing at all.

    `experts` is their number, for a check of the ids. Raises `UserError` for ids that are no routing, and where the file
    cannot be written.
    """
    found = checked(np.asarray(ids), experts, "the array")
    starts = np.arange(0, found.size + 1, found.shape[1], dtype=np.int32)
    with writing(path):
        write_table(path, pa.table({COLUMN: pa.ListArray.from_arrays(pa.array(starts), pa.array(found.ravel()))}))
