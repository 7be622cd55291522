"""experts: feed-forward networks of all experts over packed rows, with real weights."""

from moe_routing_bench.benches.bench import Bench, Implementation, Peer, ours
from moe_routing_bench.benches.peers import DEEPGEMM, GROUPED_MM_BF16, HUMMING, MSLK, TRITON_KERNELS, VLLM
from moe_routing_kernels.formats.weights import named

# Of all experts: what products multiply with, of quantised formats with the parts beside their elements, and biases.
WEIGHTS = ("w13", "w2", "b13", "b2", *named("w13").values(), *named("w2").values())
QUACK = Peer("quack", "quack-kernels", "pip install -e '.[peers]'")

BENCH = Bench(
    name="experts",
    summary="packed rows -> feed-forward network of every row's expert",
    axes=(
        *("tokens", "hidden", "intermediate", "experts", "top_k", "capacity_factor", "skew", "sampler", "trace"),
        *("activation", "dtype", "packed", "weights", "layout", "model", "tp", "ep"),
    ),
    baseline="torch_grouped_mm",
    implementations=(
        *ours("experts"),
        Implementation(
            "quack", "quack_kernels:experts", requires=("nvidia", "cutlass"), options={"tuned": True}, peer=QUACK
        ),
        Implementation("quack_heuristic", "quack_kernels:experts", requires=("nvidia", "cutlass"), peer=QUACK),
        Implementation("deepgemm", "deepgemm:bf16", requires=("nvidia",), peer=DEEPGEMM),
        Implementation(
            "deepgemm_fp8",
            "deepgemm:fp8",
            requires=("nvidia", "triton"),
            peer=DEEPGEMM,
            declares=("rounded_inner",),
        ),
        Implementation("mslk", "mslk:bf16", requires=("nvidia",), peer=MSLK),
        Implementation("mslk_int4", "mslk:int4", requires=("nvidia",), peer=MSLK),
        Implementation("mslk_fp8", "mslk:fp8", requires=("nvidia", "triton"), peer=MSLK, declares=("rounded_inner",)),
        Implementation("triton_kernels", "triton_kernels", requires=("nvidia", "triton"), peer=TRITON_KERNELS),
        Implementation("humming", "humming", requires=("nvidia",), peer=HUMMING),
        Implementation("marlin", "marlin", requires=("nvidia",), peer=VLLM),
        Implementation("grouped_mm_bf16", "grouped_mm_bf16", requires=("nvidia", "triton"), peer=GROUPED_MM_BF16),
    ),
    reads=("packed", "scales", "offsets", *WEIGHTS),
    writes=("y",),
    shared=WEIGHTS,
)
