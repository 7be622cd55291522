"""The tables of docs/seeds.md: what the stored runs of the seed documents are of, and what they say as ratios of times. Each ratio is of one card."""

from collections.abc import Callable, Mapping, Sequence

import pandas as pd
from scipy import stats
from stored_tables import RESULTS, digits, ranged, stored, stored_cells, table

from moe_routing_bench.benches.registry import BENCHES
from moe_routing_bench.config.axes import AXES
from moe_routing_bench.report import format_bars
from moe_routing_bench.report.seeds import models

LIBRARY, DEQUANTISED = (
    tuple(one.name for one in BENCHES["model"].implementations if one.name.startswith(begin))
    for begin in (models.LIBRARY, "dequant")
)
GROUPS = {LIBRARY: "`transformers_*`", DEQUANTISED: "`dequant*`"}
OURS, QUANTISED = ("cute", "cute_gather"), (format_bars.QUANTISED,)
# seeds, which of their rows in words and as a query, and what takes how many times as long as what: of several, the fastest
RATIOS: Sequence[tuple[tuple[str, ...], str, str, Sequence[str], Sequence[str]]] = (
    (("000",), "float32", "dtype == 'fp32'", ("torch_gather_loop",), ("torch_loop",)),
    (("000",), "bf16, E=256", "dtype == 'bf16' and experts == 256", ("torch_loop",), OURS),
    (("000",), "bf16, E=256", "dtype == 'bf16' and experts == 256", ("triton_gather",), OURS),
    (("000",), "bf16, E=8", "dtype == 'bf16' and experts == 8", ("torch_loop",), OURS),
    (("000",), "bf16, E=8", "dtype == 'bf16' and experts == 8", ("triton_gather",), OURS),
    (("001", "002"), "gate", "bench == 'gate'", ("torch",), ("cute",)),
    (("001", "002"), "routing", "bench == 'routing'", ("torch",), ("cute",)),
    (("001", "002"), "routing", "bench == 'routing'", ("triton",), ("cute",)),
    (("003-models",), "one token", "tokens == 1", LIBRARY, QUANTISED),
    (("003-models",), "one token", "tokens == 1", ("ops",), QUANTISED),
    (("003-models",), "one token", "tokens == 1", DEQUANTISED, LIBRARY),
    (("003-models",), "128 tokens, bf16", "tokens == 128 and dtype == 'bf16'", LIBRARY, QUANTISED),
    (("003-models",), "128 tokens, fp16", "tokens == 128 and dtype == 'fp16'", LIBRARY, QUANTISED),
    (("003-models",), "128 tokens", "tokens == 128", ("ops",), QUANTISED),
    (("004",), "bf16", "dtype == 'bf16'", ("torch_loop",), ("cute_gather",)),
    (("004",), "bf16", "dtype == 'bf16'", ("triton_gather",), ("cute_gather",)),
)


def ratios(seed: str, where: str, slower: Sequence[str], faster: Sequence[str]) -> list[float]:
    """The least time of `slower` over that of `faster`, for each point of the grid but for its weights, and each of these: full precision
    is compared with each of the formats. Rows of several cards are an `AssertionError`."""
    rows = stored(f"../nvidia-h200.seed-{seed}/measurements.parquet").query(f"status == 'ok' and {where}")
    rows = rows.assign(weights=rows["weights"].fillna(rows["dtype"]))
    found = []
    axes = [name for name in ("bench", *AXES) if name in rows and name != "weights"]
    for _, point in rows.groupby(axes, dropna=False, sort=False):
        plain = point["dtype"].iloc[0]
        for weights in sorted(set(point["weights"]) - {plain}) or [plain]:
            near = point[point["weights"].isin((plain, weights))]
            over, under = (near[near["implementation"].isin(ways)] for ways in (slower, faster))
            if len(over) and len(under):
                assert pd.concat([over, under])["gpu_uuid"].nunique() == 1, "a ratio across cards"
                found.append(over["median_us"].min() / under["median_us"].min())
    return found


def seed_ratios() -> str:
    """A line per comparison: how many there are, their geometric mean, the least and the most."""
    lines = []
    for seeds, which, where, slower, faster in RATIOS:
        found = [ratio for seed in seeds for ratio in ratios(seed, where, slower, faster)]
        time, unit = (GROUPS.get(tuple(ways)) or ", ".join(f"`{name}`" for name in ways) for ways in (slower, faster))
        lines.append(
            {
                "seed": ", ".join(seeds),
                "rows": which,
                "time of": time,
                "over that of": unit,
                "comparisons": str(len(found)),
                "geometric mean (least to most)": ranged(stats.gmean(found), pd.Series(found))
                if len(found) > 1
                else digits(found[0]),
            }
        )
    return table(lines)


def seed_runs() -> str:
    """A line per stored run: the card, commit, day and cells of its rows."""
    folders = sorted(RESULTS.parent.glob("nvidia-h200.seed-*"))
    return table(
        [
            {
                "seed": folder.name.partition("seed-")[2],
                "rows of": stored_cells(f"../{folder.name}/measurements.parquet").strip().removesuffix("."),
            }
            for folder in folders
        ]
    )


BLOCKS: Mapping[str, Callable[[], str]] = {"seed-runs": seed_runs, "seed-ratios": seed_ratios}
