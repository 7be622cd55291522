"""permute: expert ids to counts, offsets, order and its inverse: all that sorting tokens by expert needs."""

from moe_routing_bench.benches.bench import Bench, Implementation, ours
from moe_routing_bench.benches.peers import SGLANG, VLLM

BENCH = Bench(
    name="permute",
    summary="expert ids -> counts, offsets, order and inverse, with capacity and padding",
    axes=("tokens", "experts", "top_k", "capacity_factor", "skew", "sampler", "trace", "layout"),
    baseline="torch",
    implementations=(
        *ours("permute"),
        Implementation("vllm", "vllm:permute", requires=("nvidia",), peer=VLLM),
        Implementation("sglang", "sglang:permute", requires=("nvidia",), peer=SGLANG, declares=("token_rows",)),
        *(
            Implementation(
                f"{name}_align",
                "vllm_and_sglang:align",
                requires=("nvidia",),
                options={"library": library},
                peer=peer,
                declares=("order_only",),
            )
            for name, library, peer in (("vllm", "vLLM", VLLM), ("sglang", "SGLang", SGLANG))
        ),
    ),
    reads=("topk_ids",),
    writes=("counts", "offsets", "order", "inverse"),
)
