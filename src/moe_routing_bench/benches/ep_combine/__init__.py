"""ep_combine: rows of experts back to the ranks of their tokens, and the weighted sum of each token's."""

from moe_routing_bench.benches.bench import Bench, Implementation

BENCH = Bench(
    name="ep_combine",
    summary="rows of each expert, on its rank -> weighted sum for every token, on the token's rank",
    axes=("tokens", "hidden", "experts", "top_k", "ranks", "skew", "sampler", "trace", "dtype"),
    baseline="torch_all_to_all",
    implementations=(
        Implementation("torch_all_to_all", "..messages:combine"),
        Implementation("torch_deduplicated", "..messages:combine_deduplicated"),
    ),
    reads=("y", "row_tokens", "row_weights", "topk_ids"),
    writes=("combined",),
)
