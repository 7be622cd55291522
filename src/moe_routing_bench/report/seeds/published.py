"""The published figures of the seed documents and their sources, as config/seeds/published has them."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pandas as pd

from moe_routing_bench.config.load import read_mapping
from moe_routing_bench.store import paths
from moe_routing_bench.store.shipped import shipped


def folder() -> Path:
    """Where the files lie: in the checkout, or in what comes with a wheel."""
    return shipped(paths.PUBLISHED)


def sources() -> dict[str, Any]:
    """Of every file who published it, where, on which hardware, and what is inside its times."""
    return read_mapping(folder() / "sources.yaml")


def figures(name: str) -> pd.DataFrame:
    """The rows of one file, in its order."""
    return pd.read_csv(folder() / f"{name}.csv")


def divisor(published: Mapping[str, int], measured: Mapping[str, int]) -> int | None:
    """What sizes were divided by, the same whole number for each, to measure them at a reduced size; None where there is none."""
    found = {published[name] / size for name, size in measured.items()}
    return int(found.pop()) if len(found) == 1 and all(one >= 1 and one == int(one) for one in found) else None
