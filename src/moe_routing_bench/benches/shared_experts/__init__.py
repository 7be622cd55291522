"""shared_experts: the experts that every token has. A stage of `layer`, not measured by itself: it is two dense products."""

from moe_routing_bench.benches.bench import Bench, ours

BENCH = Bench(
    name="shared_experts",
    summary="token rows -> feed-forward network of the shared experts",
    axes=("tokens", "hidden", "shared_intermediate", "shared_gate", "activation", "dtype", "weights"),
    baseline="torch",
    implementations=ours("shared_experts"),
    reads=("x", "shared_w13", "shared_w2", "shared_gate"),
    writes=("residual",),
    shared=("shared_w13", "shared_w2", "shared_gate"),
)
