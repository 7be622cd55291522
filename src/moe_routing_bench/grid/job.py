"""The text of a spec, and its hash. Stored rows and file names hold the hash: another text is another measurement."""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from moe_routing_bench.grid.cell import Cell
from moe_routing_bench.grid.settings import Settings
from moe_routing_kernels.errors import bad

ISOLATE = ("plugins", "all")  # implementations that run in processes of their own


def canonical(parts: Mapping[str, Any]) -> str:
    """One JSON text for the same parts, whatever their order."""
    return json.dumps(parts, sort_keys=True, separators=(",", ":"))


def spec_hash(spec: str) -> str:
    """First 16 hex digits of the SHA-256 of a spec text."""
    return hashlib.sha256(spec.encode()).hexdigest()[:16]


@dataclass(frozen=True)
class Job:
    """`twins` are those of the `implementations` that take part twice: how far they are apart is noise (A/A). `plugins` are references
    of those that are of other packages, alone or as parts. `isolate` is one of `ISOLATE`: which have a process of their own."""

    cell: Cell
    implementations: tuple[str, ...]
    settings: Settings
    twins: tuple[str, ...] = ()
    plugins: tuple[str, ...] = ()
    isolate: str = ISOLATE[0]

    @cached_property
    def spec(self) -> str:
        """Everything the measurement depends on besides code, as one canonical JSON text; of a trace it holds the hash."""
        parts = {
            "cell": self.cell.asdict(),
            "implementations": self.implementations,
            "settings": vars(self.settings),
        }
        if self.twins:
            parts["twins"] = self.twins
        if self.plugins:
            parts["plugins"] = self.plugins
        if self.isolate != ISOLATE[0]:
            parts["isolate"] = self.isolate
        if "trace" in self.cell:
            parts["trace_sha256"] = file_sha256(Path(self.cell.trace))
        return canonical(parts)

    @cached_property
    def hash(self) -> str:
        """First 16 hex digits of the SHA-256 of the spec."""
        return spec_hash(self.spec)

    @cached_property
    def name(self) -> str:
        """File name of the job: the cell for people, then 8 digits of the hash."""
        return f"{self.cell.key}-{self.hash[:8]}"

    @staticmethod
    def from_spec(spec: str) -> "Job":
        """The inverse of `spec`."""
        parts = json.loads(spec)
        return Job(
            Cell.from_dict(parts["cell"]),
            tuple(parts["implementations"]),
            Settings(**parts["settings"]),
            tuple(parts.get("twins", ())),
            tuple(parts.get("plugins", ())),
            parts.get("isolate", ISOLATE[0]),
        )


def file_sha256(path: Path) -> str:
    """SHA-256 of a file's content; `UserError` when it is missing."""
    if not path.is_file():
        raise bad("trace", str(path), "a file of recorded routing", "no such file")
    return hashlib.sha256(path.read_bytes()).hexdigest()
