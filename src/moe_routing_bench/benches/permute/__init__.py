"""permute: expert ids to counts, offsets, order and its inverse: all that sorting tokens by expert needs."""

from moe_routing_bench.benches.bench import Bench, Implementation

BENCH = Bench(
    name="permute",
    summary="expert ids -> counts, offsets, order and inverse, with capacity and padding",
    axes=("tokens", "experts", "top_k", "capacity_factor", "skew", "sampler", "trace", "layout"),
    baseline="torch",
    implementations=(
        Implementation("torch", "torch_permute"),
        Implementation("torch_compile", "torch_permute", requires=("compiler",), options={"compiled": True}),
        Implementation("triton", "triton_permute", requires=("cuda", "triton")),
        Implementation("cute", "cute_permute", requires=("cuda", "cutlass")),
    ),
    reads=("topk_ids",),
    writes=("counts", "offsets", "order", "inverse"),
)
