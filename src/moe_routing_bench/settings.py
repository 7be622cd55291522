"""How to measure: the numbers of the protocol that a config may change. docs/method.md gives the evidence for each."""

import math
from dataclasses import dataclass, fields

from moe_routing_bench.errors import bad


@dataclass(frozen=True)
class Settings:
    """Times are seconds unless the name says otherwise; a value here is part of every cell's spec and hash."""

    check_seeds: int = 3  # input sets that an implementation must get right before and after it is timed
    warmup_ms: float = 100.0
    settle_blocks: int = 5  # most blocks of warm-up that are timed until two in a row agree within 1 %
    interval_us: float = 200.0  # least device time between two events: they resolve 0.5 us
    samples_per_block: int = 5
    min_blocks: int = 10
    max_blocks: int = 40
    target_half_width: float = 0.005  # 95 % confidence half-width over the median at which sampling stops
    max_seconds: float = 3.0  # sampling time of all implementations of a cell together
    wall_calls: int = 10
    timeout: float = 120.0  # without a word from the worker for this long, the implementation at work has hung
    set_limit: int = 256  # most input and output sets that are rotated to keep the L2 cache cold
    set_bytes: float = 8e9  # most memory that the rotated sets may take together

    def __post_init__(self) -> None:
        """Raise `UserError` for a value of another type or out of range."""
        for field in fields(self):
            value = getattr(self, field.name)
            if isinstance(value, bool) or not isinstance(value, int if field.type is int else (int, float)):
                raise bad(f"measure.{field.name}", value, "an integer" if field.type is int else "a number")
            if not 0 < value < math.inf:
                raise bad(f"measure.{field.name}", value, "above 0 and finite")
            if field.type is float:
                object.__setattr__(self, field.name, float(value))
        if self.max_blocks < self.min_blocks:
            raise bad("measure.max_blocks", self.max_blocks, f"at least min_blocks={self.min_blocks}")
