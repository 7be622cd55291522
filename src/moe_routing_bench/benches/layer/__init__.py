"""layer: routing around experts with real weights for every expert."""

from moe_routing_bench.benches.bench import Implementation, Peer, Stage
from moe_routing_bench.benches.experts import QUACK, WEIGHTS
from moe_routing_bench.benches.layer.auto import AUTO, Choosing
from moe_routing_bench.benches.peers import DEEPGEMM, GROUPED_MM_BF16, HUMMING, MSLK, TRITON_KERNELS, VLLM, pinned

STAGES = (
    Stage("router", "gate", values={"dtype": "fp32"}),
    Stage("permute", "permute"),
    Stage("pack", "pack"),
    Stage("experts", "experts"),
    Stage("combine", "combine"),
)
_LOOP, _BMM, _GROUPED = ({"experts": f"torch_{way}"} for way in ("loop", "bmm", "grouped_mm"))
_ROUTING = [stage.name for stage in STAGES if stage.name != "experts"]
_COMPILED, _CUTE_GROUPED = (_GROUPED | dict.fromkeys(_ROUTING, name) for name in ("torch_compile", "cute"))
_TRITON, _CUTE = (dict.fromkeys((*_ROUTING, "experts"), name) for name in ("triton", "cute"))
_GATHER, _CUTE_GATHER, _QUACK_GATHER = (
    dict.fromkeys(("router", "permute", "combine"), name) | {"pack+experts": f"experts.{kernel}_gather"}
    for name, kernel in (("triton", "triton"), ("cute", "cute"), ("cute", "quack"))
)
_CUTE_QUANTISED, _CUTE_FP8 = (_CUTE | {"experts": name} for name in ("cute_quantised", "cute_fp8"))
_CUTE_QUACK = _CUTE | {"experts": "quack_heuristic"}
_QUANTISED = [
    *(
        Implementation(name, layout="compact", parts={"experts": name})
        for name in ("dequant", "dequant_uncached", "dequant_loop")
    ),
    Implementation(
        "scaled_grouped_mm",
        requires=("cuda",),
        layout="compact",
        parts={"experts": "scaled_grouped_mm"},
        declares=("rounded_inner",),
    ),
]
_AROUND = [  # our routing around their products
    Implementation(
        f"cute_{name}",
        requires=("cuda", "cutlass"),
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
_ALL = "permute+pack+experts+combine"
_THEIRS = {_ALL: "layer.transformers_experts"}
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
        requires=("cuda", "triton", "cutlass"),
        layout="compact",
        parts={"router": "cute", _ALL: f"layer.{name}_experts"},
        peer=pinned(module, distribution, version),
    )
    for name, module, distribution, version in (
        ("sonicmoe", "sonicmoe", "sonic-moe", "0.1.2.post1"),
        ("liger", "liger_kernel", "liger-kernel", "0.8.5"),
        ("moe_ops", "moe_ops", "moe-ops", "0.1.0"),
        ("flag_gems", "flag_gems", "flag-gems", "5.0.2"),
    )
]

_WEIGHTS = (*WEIGHTS, "shared_w13", "shared_w2", "shared_gate")

BENCH = Choosing(
    name="layer",
    summary="routing + experts, device time per stage and in total",
    axes=(
        *("tokens", "hidden", "intermediate", "experts", "top_k", "capacity_factor", "skew", "sampler", "trace"),
        *("router", "activation", "dtype", "packed", "weights", "model", "shared_intermediate", "shared_gate"),
    ),
    baseline="torch_grouped_mm",
    implementations=(
        Implementation("torch_loop", layout="compact", parts=_LOOP),
        Implementation("torch_bmm", layout="padded", parts=_BMM),
        Implementation("torch_grouped_mm", layout="compact", parts=_GROUPED),
        Implementation("torch_gather_loop", layout="compact", parts={"pack+experts": "experts.torch_gather_loop"}),
        *_QUANTISED,
        Implementation("torch_compile", requires=("compiler",), layout="compact", parts=_COMPILED),
        Implementation("triton", requires=("cuda", "triton"), layout="compact", parts=_TRITON),
        Implementation("triton_gather", requires=("cuda", "triton"), layout="compact", parts=_GATHER),
        Implementation("cute", requires=("cuda", "cutlass"), layout="compact", parts=_CUTE),
        Implementation("cute_gather", requires=("cuda", "cutlass"), layout="compact", parts=_CUTE_GATHER),
        Implementation(
            "cute_dependent",
            requires=("cuda", "cutlass"),
            layout="compact",
            parts={"router": "cute", _ALL: "layer.cute_dependent"},
        ),
        Implementation("cute_quantised", requires=("cuda", "cutlass"), layout="compact", parts=_CUTE_QUANTISED),
        Implementation(
            "cute_fp8", requires=("cuda", "cutlass"), layout="compact", parts=_CUTE_FP8, declares=("rounded_inner",)
        ),
        Implementation(
            "cute_dequant",
            requires=("cuda", "triton", "cutlass"),
            layout="compact",
            parts=_CUTE | {"experts": "dequant_cute"},
        ),
        Implementation("cute_grouped_mm", requires=("cuda", "cutlass"), layout="compact", parts=_CUTE_GROUPED),
        Implementation("cute_quack", requires=("cuda", "cutlass"), layout="compact", parts=_CUTE_QUACK, peer=QUACK),
        Implementation(
            "cute_quack_gather", requires=("cuda", "cutlass"), layout="compact", parts=_QUACK_GATHER, peer=QUACK
        ),
        *_AROUND,
        *_BEHIND_OUR_ROUTER,
        *_TRANSFORMERS,
        Implementation(AUTO, layout="compact"),  # its parts are those of what it chooses
    ),
    reads=("logits", "bias", "x", *_WEIGHTS),
    writes=("combined",),
    shared=_WEIGHTS,
    stages=STAGES,
    row_passes=2,
)
