"""combine: weighted sum of expert rows back to tokens."""

from moe_routing_bench.benches.bench import Bench, Implementation, ours
from moe_routing_bench.benches.peers import SGLANG, VLLM

BENCH = Bench(
    name="combine",
    summary="per-expert rows -> weighted sum for every token",
    axes=("tokens", "hidden", "experts", "top_k", "capacity_factor", "skew", "sampler", "trace", "dtype", "layout"),
    baseline="torch",
    implementations=(
        *ours("combine"),
        Implementation("vllm", "vllm:combine", requires=("nvidia",), peer=VLLM),
        Implementation("sglang", "sglang:combine", requires=("nvidia",), peer=SGLANG, declares=("rounded_weights",)),
    ),
    reads=("y", "inverse", "topk_weights", "residual"),
    writes=("combined",),
    streams=True,
    row_passes=1,
)
