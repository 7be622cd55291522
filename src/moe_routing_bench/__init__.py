"""Benchmark of Mixture-of-Experts routing: gate, permute, pack, experts, combine."""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from moe_routing_bench.answers.ask import ask

__all__ = ["ask"]


def __getattr__(name: str) -> Any:
    """`ask` of `answers.ask`, imported when it is first used: what measures needs neither Arrow nor presets."""
    if name != "ask":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return importlib.import_module("moe_routing_bench.answers.ask").ask
