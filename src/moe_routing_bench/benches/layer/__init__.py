"""layer: routing around a SwiGLU expert FFN with real weights for every expert."""

from moe_routing_bench.benches import Bench, Implementation

_STAGES = ("gate", "permute", "pack", "combine")
_COMPILED, _TRITON, _CUTE = (dict.fromkeys(_STAGES, name) for name in ("torch_compile", "triton", "cute"))

BENCH = Bench(
    name="layer",
    summary="routing + SwiGLU experts, device time per stage and in total",
    axes=(
        "tokens", "hidden", "intermediate", "experts", "top_k", "capacity_factor", "skew", "sampler", "trace", "router",
        "dtype", "model",
    ),
    baseline="torch_loop",
    implementations=(
        Implementation("torch_loop", ".composed", layout="compact", options={"experts": "loop"}),
        Implementation("torch_bmm", ".composed", layout="padded", options={"experts": "bmm"}),
        Implementation("torch_grouped_mm", ".composed", layout="compact", options={"experts": "grouped_mm"}),
        Implementation(
            "torch_compile", ".composed", requires=("compiler",), layout="compact", options={"experts": "grouped_mm", **_COMPILED}
        ),
        Implementation(
            "triton", ".composed", requires=("cuda", "triton"), layout="compact",
            options={"experts": "grouped_mm", **_TRITON},
        ),
        Implementation(
            "cute", ".composed", requires=("cuda", "cutlass"), layout="compact",
            options={"experts": "grouped_mm", **_CUTE},
        ),
    ),
)  # fmt: skip
