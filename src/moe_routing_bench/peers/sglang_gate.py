"""SGLang's fused gates as an optional peer (sglang-kernel 0.4.3, `sm90/common_ops`), for the rules that its kernels compute.

| rule | kernel |
|---|---|
| `softmax_topk_renorm`, `softmax_topk` | `topk_softmax`: the softmax over all experts in registers, then k times the largest of a row's threads |
| `llama4`, `sigmoid_renorm` | `topk_sigmoid`, likewise |
| `sigmoid_renorm` with 384 experts | `kimi_k2_moe_fused_gate`: a warp or a block per token; it allocates its results |
| `deepseek_v3` | `moe_fused_gate`: a thread per group, k times the largest of them; it allocates its results |

Where there is no kernel for a number of experts, softmax and sigmoid go through a workspace and k passes of a block per token.

Compulsory bytes: T * E * itemsize + 8 * T * k; floor: reading the logits.
"""

from collections.abc import Callable

from torch import Tensor

from moe_routing_bench.peers.libraries import SGLANG
from moe_routing_kernels.gate import Gate
from moe_routing_kernels.routers import ROUTERS

_KIMI_EXPERTS = 384
_GROUP = 32  # most experts of a group: those of one thread


def unsupported(problem: Gate) -> str | None:
    """Why SGLang's kernels cannot run a problem, or None."""
    module, options = ROUTERS[problem.router].module, ROUTERS[problem.router].options
    if module == "softmax_topk" and "groups" in options:
        return "SGLang has no fused kernel for groups that are judged by their best expert"
    if module not in ("softmax_topk", "topk_sigmoid", "sigmoid_topk"):
        return f"SGLang's library has no kernel for {problem.router}"
    if "groups" not in options and ROUTERS[problem.router].scale != 1:
        return "the adapter of SGLang's gates without groups passes no scale of the weights"
    if "groups" in options:
        experts, size = problem.experts, problem.experts // options["groups"]
        if experts & (experts - 1) or size > _GROUP:
            return f"SGLang's moe_fused_gate takes a power of two of experts, up to {_GROUP} per group, not {experts}"
        if problem.dtype != "fp32":
            return f"SGLang's moe_fused_gate rounds scores to the format of the logits, {problem.dtype}"
    return SGLANG.missing()


def bind(
    problem: Gate, *, logits: Tensor, topk_ids: Tensor, topk_weights: Tensor, bias: Tensor | None = None
) -> Callable[[], dict[str, Tensor] | None]:
    """Bind logits (T, E) and bias (E,) float32 or None -> topk_ids (T, k) int32, topk_weights (T, k) float32.

    Two of the kernels allocate both, which the call then returns.
    """
    router, operators, top_k = ROUTERS[problem.router], SGLANG.operators(), problem.top_k
    if "groups" in router.options:
        groups, keep, scale = (router.options[name] for name in ("groups", "keep_groups", "scale"))
        return _returned(lambda: operators.moe_fused_gate(logits, bias, groups, keep, top_k, 0, scale, True))
    if router.module == "sigmoid_topk" and problem.experts == _KIMI_EXPERTS and problem.dtype == "fp32":
        return _returned(lambda: operators.kimi_k2_moe_fused_gate(logits, bias, top_k, True, 1.0, False))
    if router.module == "softmax_topk":
        return lambda: operators.topk_softmax(topk_weights, topk_ids, logits, router.options["renormalize"], 0.0, None)
    renormalize = router.module == "sigmoid_topk"
    return lambda: operators.topk_sigmoid(topk_weights, topk_ids, logits, renormalize, bias)


def _returned(gate: Callable[[], tuple[Tensor, Tensor]]) -> Callable[[], dict[str, Tensor]]:
    def run() -> dict[str, Tensor]:
        weights, ids = gate()
        return {"topk_ids": ids, "topk_weights": weights}

    return run
