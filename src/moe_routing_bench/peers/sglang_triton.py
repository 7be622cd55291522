"""permute, pack, experts and combine by SGLang's Triton kernels (sglang 0.5.23, `fused_experts`), with the tiles of its tuned tables.

Strategy: that of `vllm_triton`, of which it is a descendant. Kernels start before the one ahead of them is over (programmatic dependent
launch); small batches are sorted by one Triton kernel; a table may have tiles of its own for the second product, with TMA.
Tables are by version of triton; where this version's has none the newest other one is taken, and where no version has one a rule picks
tiles: the row's configuration says which. gpt-oss's activation is torch's, compiled, as in SGLang.
"""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor

from moe_routing_bench.peers import sglang_files
from moe_routing_bench.peers.fused_weights import Fused, formats_unsupported, fused_weights
from moe_routing_bench.peers.whole_layers import returned
from moe_routing_kernels.activations import activation_of
from moe_routing_kernels.layer import Layer

_ACTIVATIONS = {
    "swiglu": "silu",
    "geglu": "gelu_tanh",
    "relu2": "relu2",
    "swiglu_oai": "silu",  # with alpha and limit
    "swiglu_oai_unbiased": "silu",
}


def unsupported(problem: Layer, fp8: bool = False) -> str | None:
    """Why it cannot run, or None."""
    return formats_unsupported(problem, "SGLang's Triton kernel", _ACTIVATIONS, fp8) or sglang_files.missing()


def bind(
    problem: Layer,
    *,
    x: Tensor,
    topk_ids: Tensor,
    topk_weights: Tensor,
    w13: Tensor,
    w2: Tensor,
    combined: Tensor,
    b13: Tensor | None = None,
    b2: Tensor | None = None,
    residual: Tensor | None = None,
    fp8: bool = False,
    **scales: Tensor,
) -> Callable[[], dict[str, Tensor]]:
    """Bind x (T, H), topk_ids (T, k) int32, topk_weights (T, k) float32, w13 (E, N, H), w2 (E, H, I), biases b13 (E, N) and b2 (E, H) of
    activations that have them, and the parts `scales` of quantised weights by name; returns combined (T, H).

    SGLang allocates its result, so a bound `combined` is not written. A `residual` (T, H) is added by torch.
    """
    fused, tables = sglang_files.fused_moe()
    given, known = fused_weights(problem, w13, w2, b13, b2, scales), activation_of(problem.activation)
    options = given.options() | {
        "b1": given.up.bias,
        "b2": given.down.bias,
        "activation": _ACTIVATIONS[problem.activation],
        "is_gated": known.gated,
        "gemm1_alpha": known.alpha if known.shift else None,
        "gemm1_limit": known.limit,
        "filter_expert": False,  # all experts are here
    }
    weights = (given.up.weights, given.down.weights)

    def run() -> dict[str, Tensor]:
        total = fused.fused_experts_impl(x, *weights, topk_weights, topk_ids, **options)
        return returned(total, residual)

    run.configuration = lambda: _tiles(tables, given, topk_ids)
    return run


def _tiles(tables: Any, given: Fused, topk_ids: Tensor) -> str:
    """The tiles of both products, and the tables that they are from."""
    weights, (tokens, top_k) = given.down.weights, topk_ids.shape
    per_channel = given.options()["per_channel_quant"]
    up, (down, _) = tables.try_get_optimal_moe_config(
        given.up.weights.shape,
        weights.shape,
        top_k,
        given.form,
        tokens,
        block_shape=given.block,
        per_channel_quant=per_channel,
        return_down_config=True,
    )
    named = partial(tables.get_config_file_name, len(weights), weights.shape[2], given.form, given.block, per_channel)
    first, second = (_table(tables, named(down_moe=second)) for second in (False, True))
    tiles = f"{up}; {first or f'default tiles: no table {named()}'}"
    return f"{tiles}; second product {down}; {second}" if second else tiles


def _table(tables: Any, name: str) -> str | None:
    """Where SGLang finds a table: in the folder of this version of triton, else in the newest that has it; None where it has none."""
    import triton

    folder = Path(tables.__file__).parent / "configs"
    this = "triton_" + triton.__version__.replace(".", "_")
    versions = [path.parent.name for path in folder.glob("triton_*/*.json") if path.name == name]
    versions.sort(key=lambda version: (version == this, [int(part) for part in version.split("_")[1:]]))
    return f"table {versions[-1]}/{name}" if versions else None
