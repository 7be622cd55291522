"""layer: routing around experts with real weights for every expert."""

from moe_routing_bench.benches.bench import Implementation, Peer, Stage, ours
from moe_routing_bench.benches.experts import QUACK, WEIGHTS
from moe_routing_bench.benches.layer.auto import AUTO, Choosing
from moe_routing_bench.benches.peers import (
    DEEPGEMM,
    GROUPED_MM_BF16,
    HUMMING,
    MSLK,
    SGLANG_FILES,
    TRITON_KERNELS,
    VLLM,
    pinned,
)
from moe_routing_kernels.layer import ROUTING, WHOLE

STAGES = (
    Stage("router", "gate", values={"dtype": "fp32"}),
    Stage("permute", "permute"),
    Stage("pack", "pack"),
    Stage("experts", "experts"),
    Stage("combine", "combine"),
)
_CUTE = dict.fromkeys(ROUTING, "cute")
_QUACK_GATHER = {name: "cute" for name in ROUTING if name != "pack"} | {"pack+experts": "quack_kernels:gather"}
_AROUND = [  # our routing around their products
    Implementation(
        f"cute_{name}",
        requires=("nvidia", "cutlass"),
        layout=layout,
        parts=_CUTE | {"experts": name},
        peer=peer,
        declares=tuple(declares),
    )
    for name, layout, peer, *declares in (
        ("deepgemm", "block128", DEEPGEMM),
        ("deepgemm_fp8", "block128", DEEPGEMM, "rounded_inner"),
        ("mslk", "compact", MSLK),
        ("mslk_int4", "compact", MSLK),
        ("mslk_fp8", "compact", MSLK, "rounded_inner"),
        ("triton_kernels", "compact", TRITON_KERNELS),
        ("grouped_mm_bf16", "compact", GROUPED_MM_BF16),
        ("humming", "compact", HUMMING),
        ("marlin", "compact", VLLM),
    )
]
_THEIRS = {WHOLE: "transformers"}
_TRANSFORMERS = [
    Implementation(
        f"transformers_{form}",
        layout="compact",
        parts=_THEIRS,
        options={"form": form},
        peer=Peer("transformers", "transformers", "pip install -e '.[peers]'"),
        declares=("rounded_sums",) if form == "eager" else (),
    )
    for form in ("eager", "batched_mm", "grouped_mm")
]
_BEHIND_OUR_ROUTER = [
    Implementation(
        name,
        requires=("nvidia", "triton", "cutlass"),
        layout="compact",
        parts={"router": "cute", WHOLE: name},
        peer=pinned(module, distribution, version),
    )
    for name, module, distribution, version in (
        ("sonicmoe", "sonicmoe", "sonic-moe", "0.1.2.post1"),
        ("liger", "liger_kernel", "liger-kernel", "0.8.5"),
        ("moe_ops", "moe_ops", "moe-ops", "0.1.0"),
        ("flag_gems", "flag_gems", "flag-gems", "5.0.2"),
    )
]
_FLASHINFER = [
    Implementation(
        name,
        requires=("nvidia", "cutlass"),
        layout="compact",
        parts={"router": "cute", WHOLE: f"flashinfer:{entry}"},
        peer=Peer("flashinfer", "flashinfer-python", "pip install flashinfer-python==0.7.2.post1"),
        declares=("rounded_sums",),
    )
    for name, entry in (("flashinfer", "cute"), ("trtllm_cutlass", "cutlass"))
]

_FUSED = [  # what serving runs, by its Triton kernels and tables of tiles
    Implementation(
        f"{name}_triton{suffix}",
        requires=("nvidia", "triton", "cutlass"),
        layout="compact",
        parts={"router": "cute", WHOLE: f"{name}_triton"},
        options={"fp8": True} if suffix else {},
        peer=peer,
        declares=("rounded_inner",) if suffix else (),
    )
    for name, peer in (("vllm", VLLM), ("sglang", SGLANG_FILES))
    for suffix in ("", "_fp8")
]

_WEIGHTS = (*WEIGHTS, "shared_w13", "shared_w2", "shared_gate")

BENCH = Choosing(
    name="layer",
    summary="routing + experts, device time per stage and in total",
    axes=(
        *("tokens", "hidden", "intermediate", "experts", "top_k", "capacity_factor", "skew", "sampler", "trace"),
        *("router", "activation", "dtype", "packed", "weights", "model"),
        *("shared_intermediate", "shared_gate", "tp", "ep"),
    ),
    baseline="torch_grouped_mm",
    implementations=(
        *ours("layer"),
        Implementation(
            "cute_quack",
            requires=("nvidia", "cutlass"),
            layout="compact",
            parts=_CUTE | {"experts": "quack_heuristic"},
            peer=QUACK,
        ),
        Implementation(
            "cute_quack_gather", requires=("nvidia", "cutlass"), layout="compact", parts=_QUACK_GATHER, peer=QUACK
        ),
        *_AROUND,
        *_FUSED,
        *_BEHIND_OUR_ROUTER,
        *_FLASHINFER,
        *_TRANSFORMERS,
        Implementation(AUTO, layout="compact"),  # its parts are those of what it chooses
    ),
    reads=("logits", "bias", "x", *_WEIGHTS),
    writes=("combined",),
    shared=_WEIGHTS,
    stages=STAGES,
    row_passes=2,
)
