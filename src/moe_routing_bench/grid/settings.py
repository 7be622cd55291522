"""How to measure: the numbers of the protocol that a config may change. docs/method.md gives the evidence for each.

The types of numbers that a user may set have their bounds in the annotation; what they mean in words is in `fields`.
"""

from dataclasses import dataclass, fields
from typing import Annotated

from annotated_types import Ge, Gt, Le, Lt

from moe_routing_kernels.errors import bad

Count = Annotated[int, Ge(1)]
Whole = Annotated[int, Ge(0)]
Seed = Annotated[int, Ge(0), Le(2**31 - 1)]
Amount = Annotated[float, Gt(0)]
Share = Annotated[float, Gt(0), Lt(1)]


@dataclass(frozen=True)
class Settings:
    """Times are seconds unless the name says otherwise; a value here is part of every cell's spec and hash."""

    check_seeds: Annotated[Count, "input sets that an implementation must get right before and after it is timed"] = 3
    warmup_ms: Annotated[Amount, "length of the warm-up"] = 100.0
    settle_blocks: Annotated[Count, "most blocks of warm-up that are timed until two in a row agree within 1 %"] = 5
    interval_us: Annotated[
        Amount, "least device time between two events, so that what begins and ends a sample, 3 us, is below 0.1 %"
    ] = 4000.0
    samples_per_block: Annotated[Count, "samples of a block"] = 3
    min_blocks: Annotated[Count, "least blocks of samples"] = 20
    max_blocks: Annotated[Count, "most blocks of samples"] = 40
    target_half_width: Annotated[Amount, "95 % half-width over the median at which sampling stops"] = 0.005
    max_seconds: Annotated[Amount, "sampling time of all implementations of a cell together"] = 3.0
    turn_seconds: Annotated[
        Amount,
        "where the power limit sets the clock, three times the untimed work before each of six turns",
    ] = 1.0
    wall_calls: Annotated[Count, "calls that are timed by the wall clock"] = 10
    cpu_threads: Annotated[
        Count, "threads that torch computes with on a CPU, whatever the machine has and OMP_NUM_THREADS says"
    ] = 1
    timeout: Annotated[Amount, "silence of the worker after which the implementation at work has hung"] = 120.0
    set_limit: Annotated[Count, "most input and output sets that are rotated to keep the L2 cache cold"] = 256
    set_bytes: Annotated[Amount, "most memory that the rotated sets may take together"] = 8e9

    def __post_init__(self) -> None:
        """Raise `UserError` for fewer blocks at most than at least. Whole numbers of seconds and bytes become floats."""
        for field in fields(self):
            if isinstance(field.default, float):
                object.__setattr__(self, field.name, float(getattr(self, field.name)))
        if self.max_blocks < self.min_blocks:
            raise bad("measure.max_blocks", self.max_blocks, f"at least min_blocks={self.min_blocks}")
