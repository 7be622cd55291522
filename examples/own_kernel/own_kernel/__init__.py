"""A combine of a package of its own, and a layer that has it. Declarations are read, not run: they are made of literals."""

from moe_routing_bench.benches.plugins import Plugin

COMBINE = Plugin(bench="combine", name="own_bmm", module=".bmm_combine")
LAYER = Plugin(
    bench="layer", name="own_layer", layout="compact", parts={"experts": "torch_grouped_mm", "combine": "own_bmm"}
)
