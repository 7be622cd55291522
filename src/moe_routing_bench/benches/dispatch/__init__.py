"""dispatch: each rank's token rows to the ranks that have their experts."""

from moe_routing_bench.benches.bench import Bench, Implementation

BENCH = Bench(
    name="dispatch",
    summary="token rows of each rank -> rows of each expert, on the expert's rank",
    axes=("tokens", "hidden", "experts", "top_k", "ranks", "skew", "sampler", "trace", "dtype"),
    baseline="torch_all_to_all",
    implementations=(
        Implementation("torch_all_to_all", "..messages:dispatch"),
        Implementation("torch_deduplicated", "..messages:dispatch", options={"deduplicated": True}),
    ),
    reads=("x", "topk_ids"),
    writes=("received", "counts"),
)
