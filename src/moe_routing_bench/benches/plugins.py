"""Implementations of other packages: declared there (`declarations`), measured here beside our own."""

import functools
import hashlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from moe_routing_bench.benches.bench import Bench, Implementation, Peer, find
from moe_routing_bench.grid.cell import Job
from moe_routing_bench.packages import PACKAGES
from moe_routing_kernels import declarations
from moe_routing_kernels.implementations import module_of
from moe_routing_kernels.routers import ROUTERS


@dataclass(frozen=True, kw_only=True)
class Plugin(Implementation):
    """An implementation of `bench` in another package.

    `module` offers what a kernel module does: it is absolute, relative to the package of the declaration (``.kernel``), or, where it is
    not given, the module that the declaration is in. So are the modules of fused `parts`. `reference` is where it was read.
    """

    bench: str
    reference: str = ""

    def place(self, bench: str) -> str:
        """The absolute name of its module."""
        return declarations.absolute(self.module, self.reference)

    def fused(self, part: str) -> str:
        """The absolute name of the module that does a part of several stages."""
        return declarations.absolute(self.parts[part], self.reference)

    def modules(self, bench: str) -> Iterator[str]:
        """No module of this package."""
        return iter(())

    def own_modules(self) -> list[str]:
        """Its modules, that of the declaration first."""
        fused = [self.fused(part) for part in self.parts if "+" in part]
        return [module_of(one) for one in (self.reference, *([] if self.parts else [self.place(self.bench)]), *fused)]

    def version(self) -> str | None:
        """The version of its package; None where that is not installed."""
        return declarations.version(self.reference)

    def files(self) -> list[Path]:
        """The files of its code. Raises `UserError` for sources that cannot be parsed."""
        return declarations.files(self.reference, self.own_modules(), *PACKAGES)

    def code(self) -> str:
        """The hashes of its code, and the version of its package."""
        return declarations.code(self.reference, self.own_modules(), *PACKAGES)


@functools.cache
def read(reference: str) -> tuple[Plugin, ...]:
    """The plugins of a reference; without a name all that the module declares.

    Raises `UserError` where there is none, or one whose modules are not there.
    """
    declared = declarations.read(reference, Plugin, Peer)
    found = tuple(replace(one, reference=name) for name, one in declared.items())
    for one in found:
        one.own_modules()
    return found


def by_bench(references: Iterable[str]) -> dict[str, tuple[Plugin, ...]]:
    """The plugins of references, each once, by bench."""
    found: dict[str, tuple[Plugin, ...]] = {}
    for one in {one.reference: one for reference in references for one in read(reference)}.values():
        found[one.bench] = (*found.get(one.bench, ()), one)
    return found


def bench_of(job: Job) -> Bench:
    """The bench of a job, with the plugins that it names."""
    return find(job.cell.bench, by_bench(job.plugins))


def used(bench: Bench, names: Iterable[str]) -> tuple[str, ...]:
    """The references of the plugins among implementations of a bench, and among the parts that these are made of."""
    found: set[str] = set()
    for one in map(bench.__getitem__, names):
        parts = [bench.operation(stage)[one.parts[stage.name]] for stage in bench.stages if stage.name in one.parts]
        found |= {each.reference for each in (one, *parts) if isinstance(each, Plugin)}
    return tuple(sorted(found))


def isolated(job: Job, names: Iterable[str]) -> tuple[str, ...]:
    """Those of the implementations that run in processes of their own: all where the job says so or the cell has ranks, else those that have
    code of other packages."""
    every = job.isolate == "all" or "ranks" in job.cell
    if every or not job.plugins:
        return tuple(names) if every else ()
    bench = bench_of(job)
    return tuple(name for name in names if used(bench, [name]))


def references(job: Job) -> tuple[str, ...]:
    """The references of all that a job has from other packages: plugins, and its routing rule."""
    rule = job.cell.get("router") or ""
    return (*job.plugins, *([rule] if ":" in rule else []))


def codes(job: Job) -> dict[str, str]:
    """The hashes of their code, and the versions of their packages, by reference. Raises `UserError`."""
    found = {reference: "".join(one.code() for one in read(reference)) for reference in job.plugins}
    return found | {reference: ROUTERS[reference].code() for reference in references(job) if reference not in found}


def fingerprint(job: Job) -> str | None:
    """The first 16 hex digits of the hash of that code; None where a job has nothing from other packages."""
    text = "".join(codes(job).values())
    return hashlib.sha256(text.encode()).hexdigest()[:16] if text else None
