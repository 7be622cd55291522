"""Published figures, as config/claims.yaml has them: the source, the hardware, and which of our rows would show it.

Whole tables of rows that other projects published are in config/published/: a YAML file about the source next to a CSV file of its rows. The CSV has the columns of a foreign benchmark (`figures.foreign`), so `moe-routing-bench report --rows` draws it, and those of `COLUMNS`.
"""

import functools
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

from moe_routing_bench.benches.registry import BENCHES
from moe_routing_bench.config import schema
from moe_routing_bench.config.axes import AXES
from moe_routing_bench.config.load import read_mapping
from moe_routing_bench.fields import Choice, file_name
from moe_routing_bench.grid.cell import Amount
from moe_routing_kernels.errors import bad, pick

UNITS = {"us": 1.0, "ms": 1e-3, "GB/s": 1.0, "TFLOP/s": 1.0, "x": 1.0, "%": 100.0}  # of what a row holds
OWN = "this project"  # the source of our own figures
OVER = ("gmean", "min", "max", "median")


class Check(schema.Strict):
    """Which rows show it: those of a bench and implementation with these axes, and of them a column.

    `against` is another implementation, whose value over this one's is meant. `over` joins the values of several cells.
    """

    bench: Annotated[str, Choice(tuple(BENCHES))]
    implementation: str
    column: str
    against: str | None = None
    axes: dict[str, Any] = {}  # noqa: RUF012
    over: Annotated[str, Choice(OVER)] | None = None


class Claim(schema.Strict):
    """A published figure. One that no row of ours can show says why (`not_runnable`) in place of its `check`; `lacks` names packages that no
    implementation has.

    `within` is the relative difference that still counts as reproduced; with `at_least`, so does what is better.
    """

    id: str
    who: str
    source: str
    date: str | None = None
    hardware: str | None = None
    statement: str
    boundary: str
    figure: float | int
    unit: Annotated[str, Choice(tuple(UNITS))]
    check: Check | None = None
    within: Amount
    at_least: bool = False
    not_runnable: str = ""
    lacks: list[str] = []  # noqa: RUF012

    @property
    def reason(self) -> str:
        """Why no row of ours can show it, with the packages that it lacks."""
        return self.not_runnable + (f" Without an implementation here: {', '.join(self.lacks)}." if self.lacks else "")

    @property
    def own(self) -> bool:
        """Whether it is a figure of our own: rows of ours that show it hold it, and reproduce nothing."""
        return self.who == OWN


def _plain(name: str) -> str:
    return re.sub(r"[\W_]", "", name).lower()


@functools.cache
def _packages() -> frozenset[str]:
    """The modules and distributions that implementations come from, and how their names begin or are said."""
    peers = [
        implementation.peer
        for bench in BENCHES.values()
        for implementation in bench.implementations
        if implementation.peer
    ]
    names = [name for peer in peers for name in (peer.module, peer.distribution, peer.distribution.partition("-")[0])]
    known = [
        implementation.name
        for bench in BENCHES.values()
        for implementation in bench.implementations
        if implementation.peer
    ]
    return frozenset(map(_plain, (*names, *known)))


class Claims(schema.Strict):
    """The file."""

    claims: list[Claim]


def load(path: str | Path) -> list[Claim]:
    """The claims of a file, in its order.

    Raises `UserError` for one that has neither a check nor a reason, or both, for an id that is there twice, for a bench, implementation or
    axis that does not exist, and for a package that is said to be lacking and is not.
    """
    claims = schema.validated(Claims, read_mapping(Path(path)), "claims").claims
    seen: set[str] = set()
    for claim in claims:
        where = f"claim {claim.id} in {path}"
        file_name(f"id of a claim in {path}", claim.id)
        if claim.id in seen:
            raise bad(where, "the same id twice", "an id of its own")
        seen.add(claim.id)
        if (claim.check is None) == (not claim.not_runnable):
            raise bad(where, "check and not_runnable" if claim.check else "neither", "one of check and not_runnable")
        if known := [name for name in claim.lacks if _plain(name) in _packages()]:
            raise bad(
                f"{where}: lacks",
                known[0],
                "packages that no implementation has",
                "this one is a peer: say what else is missing",
            )
        if claim.check:
            names = [implementation.name for implementation in BENCHES[claim.check.bench].implementations]
            for name in (claim.check.implementation, claim.check.against or claim.check.implementation):
                pick(f"{where}: implementation", name, names)
            for axis in claim.check.axes:
                pick(f"{where}: axis", axis, AXES)
    return claims


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


def load_published(folder: Path) -> Mapping[Path, Source]:
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
