"""ep_layer: a whole MoE layer over ranks, each with its own tokens and its own experts."""

from moe_routing_bench.benches.bench import Bench, Implementation

AXES = (
    *("tokens", "hidden", "intermediate", "experts", "top_k", "ranks", "skew", "sampler", "trace"),
    *("router", "activation", "dtype"),
)
WAYS = (
    Implementation("torch_all_to_all", ".step", options={"way": "torch_all_to_all"}),
    Implementation("ops_ep", ".step", options={"way": "ops_ep"}),
    Implementation("ops_ep_static", ".step", options={"way": "ops_ep_static"}),
    Implementation("ops_ep_graph", ".step", requires=("gpu",), options={"way": "ops_ep_graph"}),
    Implementation("ops_ep_push", ".step", requires=("nvidia", "cutlass"), options={"way": "ops_ep_push"}),
    Implementation("ops_ep_push_graph", ".step", requires=("nvidia", "cutlass"), options={"way": "ops_ep_push_graph"}),
)

BENCH = Bench(
    name="ep_layer",
    summary="a layer over ranks: gate, dispatch, the rank's experts, and back",
    axes=AXES,
    baseline="torch_all_to_all",
    implementations=(*WAYS, Implementation("ops_ep_placed", ".step", options={"way": "ops_ep_placed"})),
    reads=("logits", "bias", "x", "w13", "w2"),
    writes=("combined",),
    shared=("w13", "w2"),
)
