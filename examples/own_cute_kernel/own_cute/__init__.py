"""A pack in CuTe DSL of a package of its own. Declarations are read, not run: they are made of literals."""

from moe_routing_bench.benches.plugins import Plugin

PACK = Plugin(bench="pack", name="own_rows", module=".row_pack", requires=("nvidia", "cutlass"))
