"""Benchmark of Mixture-of-Experts routing: gate, permute, pack, experts, combine."""

import importlib
import importlib.util
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from moe_routing_bench.answers.ask import ask

__all__ = ["ask"]

# A wheel has the sources of the kernels: their tables name implementations, rules and formats, and the distribution of the kernels needs torch.
# An installed one goes first.
_TABLES = Path(__file__).with_name("project") / "kernels"
if _TABLES.is_dir() and importlib.util.find_spec("moe_routing_kernels") is None:
    sys.path.append(str(_TABLES))


def __getattr__(name: str) -> Any:
    """`ask` of `answers.ask`, imported when it is first used: what measures needs neither Arrow nor presets."""
    if name != "ask":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return importlib.import_module("moe_routing_bench.answers.ask").ask
