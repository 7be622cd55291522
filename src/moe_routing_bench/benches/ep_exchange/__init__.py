"""ep_exchange: the exchange of a layer over ranks alone: a row per token and rank goes out, and one comes back and is summed."""

from moe_routing_bench.benches.bench import Bench, Implementation
from moe_routing_bench.benches.peers import DEEP_EP

_BY_PLACE = ("by_place",)

BENCH = Bench(
    name="ep_exchange",
    summary="token rows to the ranks of their experts, then a row per token and rank back and summed; no permute, pack or combine",
    axes=("tokens", "hidden", "experts", "top_k", "ranks", "skew", "sampler", "trace", "dtype"),
    baseline="torch_all_to_all",
    implementations=(
        Implementation("torch_all_to_all", ".all_to_all"),
        Implementation("torch_static", ".all_to_all:static", declares=_BY_PLACE),
        Implementation(
            "torch_static_graph", ".all_to_all:static", requires=("gpu",), options={"graph": True}, declares=_BY_PLACE
        ),
        Implementation("torch_symm_mem", ".all_to_all:symmetric", requires=("nvidia",)),
        Implementation("torch_symm_mem_graph", ".all_to_all:symmetric", requires=("nvidia",), options={"graph": True}),
        Implementation("cute_push", "..mailboxes:exchange", requires=("nvidia", "cutlass"), declares=_BY_PLACE),
        Implementation(
            "cute_push_graph",
            "..mailboxes:exchange",
            requires=("nvidia", "cutlass"),
            options={"graph": True},
            declares=_BY_PLACE,
        ),
        Implementation("deep_ep", ".deep_ep", requires=("nvidia",), peer=DEEP_EP),
        Implementation("deep_ep_graph", ".deep_ep", requires=("nvidia",), options={"graph": True}, peer=DEEP_EP),
    ),
    reads=("x", "topk_ids", "topk_weights", "y"),
    writes=("received", "received_ids", "received_weights", "combined"),
    kept=("received", "received_ids", "received_weights", "combined"),
)
