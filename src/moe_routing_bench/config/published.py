"""Tables of rows that other projects published, as config/published/ has them: a YAML file about the source next to a CSV file of its rows.

The CSV has the columns of a foreign benchmark (`figures.foreign`), so `moe-routing-bench report --rows` draws it, and those of `COLUMNS`.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

from moe_routing_bench.benches.registry import BENCHES
from moe_routing_bench.config import schema
from moe_routing_bench.config.load import read_mapping
from moe_routing_bench.fields import Choice
from moe_routing_bench.grid.cell import Amount
from moe_routing_kernels.errors import bad

# the version of a package, its name for the kernel, and how the layer was spread: ranks, and `balanced` or another law of loads
COLUMNS = ("package", "version", "kernel", "tensor_parallel", "expert_parallel", "loads")


class Kernel(schema.Strict):
    """The implementation of the bench that runs a published kernel, and what differs; or what is lacking here, so that there can be none."""

    implementation: str = ""
    differs: str = ""
    lacks: str = ""


class Source(schema.Strict):
    """Where rows come from, what is inside of their times, and which implementations run the same kernels."""

    title: str
    source: str
    version: str
    licence: str
    author: str
    hardware: str
    bench: Annotated[str, Choice(tuple(BENCHES))]
    boundary: str
    mode: str
    mode_note: str
    within: Amount
    kernels: dict[str, Kernel]

    def kernel(self, name: str, weights: str) -> Kernel:
        """What is known of a kernel with weights of a format. Raises `UserError` for a kernel that the file lacks."""
        found = self.kernels.get(f"{name}/{weights}") or self.kernels.get(name)
        if found is None:
            raise bad("kernels", "no entry", f"{name} or {name}/{weights}", f"rows of {self.title} have it")
        return found


def load(folder: Path) -> Mapping[Path, Source]:
    """The sources of a folder by the file of their rows, in the order of names.

    Raises `UserError` for a source without rows, and for a kernel that names neither an implementation nor what is lacking, or both.
    """
    found = {}
    for path in sorted(folder.glob("*.yaml")):
        source = schema.validated(Source, read_mapping(path), str(path))
        rows = path.with_suffix(".csv")
        if not rows.is_file():
            raise bad("rows", f"no {rows.name}", "a CSV file next to the source", str(path))
        for name, kernel in source.kernels.items():
            if bool(kernel.implementation) == bool(kernel.lacks):
                raise bad(f"kernel {name} in {path}", "both" if kernel.lacks else "neither", "implementation or lacks")
        found[rows] = source
    return found
