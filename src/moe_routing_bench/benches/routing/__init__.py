"""routing: gate, permute, pack and combine in a row, with identity experts."""

from moe_routing_bench.benches import Bench, Implementation

BENCH = Bench(
    name="routing",
    summary="gate + permute + pack + combine, identity experts",
    axes=("tokens", "hidden", "experts", "top_k", "capacity_factor", "skew", "sampler", "trace", "router", "dtype", "model"),
    baseline="torch",
    implementations=(
        Implementation("torch", ".composed", layout="compact"),
        Implementation(
            "torch_compile", ".composed", requires=("compiler",), layout="compact",
            options={"gate": "torch_compile", "permute": "torch_compile", "pack": "torch_compile", "combine": "torch_compile"},
        ),
        Implementation(
            "triton", ".composed", requires=("cuda", "triton"), layout="compact",
            options={"gate": "triton", "permute": "triton", "pack": "triton", "combine": "triton"},
        ),
        Implementation(
            "cute", ".composed", requires=("cuda", "cutlass"), layout="compact",
            options={"gate": "cute", "permute": "cute", "pack": "cute", "combine": "cute"},
        ),
    ),
)  # fmt: skip
