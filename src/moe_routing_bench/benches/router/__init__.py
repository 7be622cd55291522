"""router: tokens to top-k ids and weights: the projection by the router's weight, and gate."""

from moe_routing_bench.benches.bench import Bench, ours

BENCH = Bench(
    name="router",
    summary="tokens x router weight -> fp32 scores -> top-k expert ids and weights",
    axes=("tokens", "hidden", "experts", "top_k", "skew", "sampler", "trace", "router", "dtype", "model"),
    baseline="torch",
    implementations=ours("router"),
    reads=("x", "router_weight", "bias"),
    writes=("topk_ids", "topk_weights"),
)
