"""An implementation on its way through a cell."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from moe_routing_bench.benches.checks import Check


class Failure(Exception):
    """An implementation is out of this cell; carries its status and reason."""

    def __init__(self, status: str, reason: str) -> None:
        super().__init__(reason)
        self.status, self.reason = status, reason


@dataclass
class Candidate:
    """An implementation on its way through the cell."""

    name: str
    calls: list[Callable[[], object]]
    check: Check = field(default_factory=Check)
    timer: Any = None
    samples_per_block: int = 1
    blocks: list[list[float]] = field(default_factory=list)
    clocks: list[int | None] = field(default_factory=list)
    powers: list[float | None] = field(default_factory=list)
    slow: list[int] = field(default_factory=list)
    fields: dict[str, object] = field(default_factory=dict)
