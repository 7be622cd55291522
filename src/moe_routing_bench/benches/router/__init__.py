"""router: tokens to top-k ids and weights: the projection by the router's weight, and gate."""

from moe_routing_bench.benches.bench import Bench, Implementation

BENCH = Bench(
    name="router",
    summary="tokens x router weight -> fp32 scores -> top-k expert ids and weights",
    axes=("tokens", "hidden", "experts", "top_k", "skew", "sampler", "trace", "router", "dtype", "model"),
    baseline="torch",
    implementations=(
        Implementation("torch", "torch_router"),
        Implementation("torch_compile", "torch_router", requires=("compiler",), options={"compiled": True}),
        Implementation("matmul_torch", "matmul_router", requires=("cuda",), options={"gate": "torch"}),
        Implementation("matmul_cute", "matmul_router", requires=("cuda", "cutlass"), options={"gate": "cute"}),
        Implementation("triton", "triton_router", requires=("cuda", "triton")),
        Implementation("cute", "cute_router", requires=("cuda", "cutlass")),
    ),
    reads=("x", "router_weight", "bias"),
    writes=("topk_ids", "topk_weights"),
)
