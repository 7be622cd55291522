"""gate: router scores to top-k ids and weights, for one routing rule."""

from moe_routing_bench.benches.bench import Bench, Implementation, Peer, ours
from moe_routing_bench.benches.peers import SGLANG, VLLM

BENCH = Bench(
    name="gate",
    summary="router scores -> top-k expert ids and weights",
    axes=("tokens", "experts", "top_k", "router", "dtype"),
    baseline="torch",
    implementations=(
        *ours("gate"),
        Implementation(
            "quack",
            "quack_kernels:gate",
            requires=("nvidia",),
            declares=("index_in_score", "rounded_weights"),
            peer=Peer("quack", "quack-kernels", "pip install -e '.[peers]'"),
        ),
        Implementation("vllm", "vllm:gate", requires=("nvidia",), peer=VLLM),
        Implementation("sglang", "sglang:gate", requires=("nvidia",), peer=SGLANG),
    ),
    reads=("logits", "bias"),
    writes=("topk_ids", "topk_weights"),
)
