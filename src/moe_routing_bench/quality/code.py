"""Which source files training runs and adaptations depend on: the closure of what trains them. Without torch."""

from pathlib import Path

from moe_routing_bench.packages import closure
from moe_routing_kernels.routers.zoo import ZOO

_TRAINING = ("train", "timing")  # a timing is made again after the run that it is of


def training_files() -> list[Path]:
    """Every source file whose edit makes training runs stale, sorted."""
    return _files(*_TRAINING)


def adaptation_files() -> list[Path]:
    """The same for adaptations of trained runs."""
    return _files(*_TRAINING, "adapt")


def _files(*modules: str) -> list[Path]:
    """The files of modules of `quality`, of what they import, and of the rules, which are loaded by name."""
    rules = [rule.module for rule in ZOO.values()]
    return closure([*(f"moe_routing_bench.quality.{module}" for module in modules), *rules])
