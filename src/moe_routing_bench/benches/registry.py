"""All benches, in the order of the report."""

from collections.abc import Mapping
from types import MappingProxyType

from moe_routing_bench.benches.bench import Bench, find

OPERATIONS = (
    "gate",
    "router",
    "permute",
    "pack",
    "experts",
    "combine",
    "routing",
    "layer",
    "training",
    "model",
)
BENCHES: Mapping[str, Bench] = MappingProxyType({name: find(name) for name in OPERATIONS})
