"""pack: copy token rows into per-expert rows (dispatch), quantised on the way where asked."""

from moe_routing_bench.benches.bench import Bench, Implementation, ours
from moe_routing_bench.benches.peers import SGLANG, VLLM

BENCH = Bench(
    name="pack",
    summary="token rows -> per-expert rows, by a known order",
    axes=(
        *("tokens", "hidden", "experts", "top_k", "capacity_factor", "skew", "sampler", "trace"),
        *("dtype", "packed", "layout"),
    ),
    baseline="torch",
    implementations=(
        *ours("pack"),
        Implementation("vllm", "vllm_and_sglang:shuffle", requires=("nvidia",), options={"library": "vLLM"}, peer=VLLM),
        Implementation(
            "sglang", "vllm_and_sglang:shuffle", requires=("nvidia",), options={"library": "SGLang"}, peer=SGLANG
        ),
    ),
    reads=("x", "order", "inverse"),
    writes=("packed", "scales"),
    streams=True,
    row_passes=1,
)
