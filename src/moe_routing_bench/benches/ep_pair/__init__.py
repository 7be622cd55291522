"""ep_pair: dispatch and combine over ranks in one call, the period of a layer's communication."""

from moe_routing_bench.benches.bench import Bench, Implementation

BENCH = Bench(
    name="ep_pair",
    summary="dispatch of token rows, then the experts' rows back and summed: both ways in one call",
    axes=("tokens", "hidden", "experts", "top_k", "ranks", "skew", "sampler", "trace", "dtype"),
    baseline="torch_all_to_all",
    implementations=(
        Implementation("torch_all_to_all", "..messages:pair"),
        Implementation("torch_deduplicated", "..messages:pair", options={"deduplicated": True}),
        Implementation("cute_push", "..mailboxes:pair", requires=("nvidia", "cutlass")),
        Implementation("cute_push_graph", "..mailboxes:pair", requires=("nvidia", "cutlass"), options={"graph": True}),
    ),
    reads=("x", "topk_ids", "topk_weights", "y"),
    writes=("received", "counts", "combined"),
)
