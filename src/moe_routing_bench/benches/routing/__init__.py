"""routing: gate, permute, pack and combine in a row, with identity experts."""

from moe_routing_bench.benches.bench import Bench, Implementation, Stage, ours
from moe_routing_bench.benches.peers import VLLM

STAGES = (
    Stage("router", "gate", values={"dtype": "fp32"}),
    Stage("permute", "permute"),
    Stage("pack", "pack"),
    Stage("combine", "combine", called={"y": "packed"}),
)
_VLLM = {"router": "vllm", "permute+pack": "vllm:routing", "combine": "vllm"}

BENCH = Bench(
    name="routing",
    summary="gate + permute + pack + combine, identity experts",
    axes=(
        *("tokens", "hidden", "experts", "top_k", "capacity_factor", "skew", "sampler", "trace"),
        *("router", "dtype", "model"),
    ),
    baseline="torch",
    implementations=(
        *ours("routing"),
        Implementation("vllm", requires=("nvidia",), layout="compact", parts=_VLLM, peer=VLLM),
    ),
    reads=("logits", "bias", "x"),
    writes=("combined",),
    stages=STAGES,
    row_passes=2,
)
