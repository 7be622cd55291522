"""The cases of test_fused_peers, run as a program: TRITON_INTERPRET must precede the import of triton.

Arguments: the package, vllm or sglang, and case names. The package's own files run, with the kernels under Triton's interpreter and
what their CUDA libraries do in plain torch.
"""

import sys
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from moe_routing_bench.benches.registry import BENCHES
from moe_routing_bench.config.expand import cell_of
from moe_routing_bench.peers.loading import Library
from moe_routing_kernels.implementations import load

# In fp16: Triton 3.7's interpreter multiplies the bits of bf16 numbers
SIZES = {"tokens": 5, "hidden": 128, "intermediate": 128, "experts": 8, "top_k": 2}
MANY = {"tokens": 40}  # for few tokens per expert vLLM has a CUDA kernel for integers of 4 bits
FP8 = {"packed": "fp8_block128", "weights": "e4m3_block128"}
CASES = {
    "swiglu": {},
    "geglu": {"activation": "geglu"},
    "relu2": {"activation": "relu2"},
    "gpt_oss": {"activation": "swiglu_oai", "top_k": 4},
    "without_biases": {"activation": "swiglu_oai_unbiased"},
    "blocks_of_tokens": {"experts": 40, "tokens": 3},  # nothing is sorted
    "int4_g32": {"weights": "int4_g32"} | MANY,
    "int4z_g128": {"weights": "int4z_g128"} | MANY,
    "int8_g64": {"weights": "int8_g64"},
    "int8z_g64": {"weights": "int8z_g64"},
    "int8_row": {"weights": "int8_row"},
    "fp8_block128": FP8,
    "fp8_row": {"packed": "fp8_row", "weights": "e4m3_row"},
    "many_tokens": MANY,
}


def _align(ids, experts, block, order, blocks, total, expert_map=None, scatter=None) -> None:
    """Assignments in blocks of one expert, T k in padding."""
    order.fill_(ids.numel())
    row = 0
    for expert in range(experts):
        rows = (ids.flatten() == expert).nonzero().flatten().int()
        order[row : row + len(rows)] = rows
        blocks[row // block : -(-(row + len(rows)) // block)] = expert
        row += -(-len(rows) // block) * block
    total.fill_(row)


def _gated(out: Tensor, x: Tensor, act) -> None:
    gate, up = x.float().chunk(2, -1)
    out.copy_(act(gate) * up)


def _oai(out: Tensor, x: Tensor, alpha: float = 1.702, limit: float = 7.0) -> None:
    gate, up = x[..., ::2].float().clamp(max=limit), x[..., 1::2].float().clamp(-limit, limit)
    out.copy_(gate * (alpha * gate).sigmoid() * (up + 1))


def _quantise(x: Tensor, out: Tensor, scales: Tensor, group: int) -> None:
    groups = x.float().unflatten(-1, (-1, group))
    wanted = groups.abs().amax(-1).clamp_min(1e-10) / 448
    scales.copy_(wanted)
    out.copy_((groups / wanted[..., None]).clamp(-448, 448).flatten(-2))


OPERATORS = {
    "_moe_C": {
        "moe_align_block_size(Tensor ids, int experts, int block, Tensor(a!) order, Tensor(b!) blocks, Tensor(c!) total, "
        "Tensor? expert_map, Tensor? scatter) -> ()": _align,
        "moe_sum(Tensor y, Tensor(a!) out, Tensor? ids, Tensor? expert_map) -> ()": lambda y, out, ids, known: (
            out.copy_(y.float().sum(1))
        ),
        "moe_wna16_gemm(Tensor x) -> ()": None,
    },
    "_C": {
        "silu_and_mul(Tensor(a!) out, Tensor x) -> ()": lambda out, x: _gated(out, x, F.silu),
        "gelu_tanh_and_mul(Tensor(a!) out, Tensor x) -> ()": lambda out, x: _gated(
            out, x, lambda gate: F.gelu(gate, approximate="tanh")
        ),
        "swigluoai_and_mul(Tensor(a!) out, Tensor x, float alpha=1.702, float limit=7.0) -> ()": _oai,
        "dynamic_per_token_scaled_fp8_quant(Tensor(a!) out, Tensor x, Tensor(b!) scales, Tensor? bound) -> ()": (
            lambda out, x, scales, bound: _quantise(x, out, scales, x.shape[-1])
        ),
        "per_token_group_fp8_quant(Tensor x, Tensor(a!) out, Tensor(b!) scales, int group, float eps, float low, float high, "
        "bool powers, bool columns, bool aligned) -> ()": lambda x, out, scales, group, *rest: _quantise(
            x, out, scales, group
        ),
    },
}
OPERATORS["sgl_kernel"] = {
    "moe_align_block_size(Tensor ids, int experts, int block, Tensor(a!) order, Tensor(b!) blocks, Tensor(c!) total, "
    "Tensor(d!) sums, bool pad) -> ()": lambda ids, experts, block, order, blocks, total, sums, pad: _align(
        ids, experts - 1, block, order, blocks, total
    ),
    "moe_sum_reduce(Tensor y, Tensor(a!) out, float factor) -> ()": lambda y, out, factor: out.copy_(
        y.float().sum(1) * factor
    ),
    "gelu_and_mul(Tensor(a!) out, Tensor x) -> ()": None,
    "sgl_per_token_quant_fp8(Tensor x, Tensor(a!) out, Tensor(b!) scales) -> ()": lambda x, out, scales: _quantise(
        x, out, scales, x.shape[-1]
    ),
    "sgl_per_token_group_quant_8bit(Tensor x, Tensor(a!) out, Tensor(b!) scales, int group, float eps, float low, "
    "float high, bool powers) -> ()": lambda x, out, scales, group, *rest: _quantise(x, out, scales, group),
} | {schema: does for schema, does in OPERATORS["_C"].items() if schema[:4] in ("silu", "gelu")}
KEPT = []  # torch forgets operators with their library


def register() -> None:
    """The operators of the packages' CUDA libraries, in plain torch."""
    for namespace, known in OPERATORS.items():
        KEPT.append(library := torch.library.Library(namespace, "FRAGMENT"))
        for schema, does in known.items():
            library.define(schema)
            if does:
                library.impl(schema.partition("(")[0], lambda *given, does=does: [does(*given), None][1], "CPU")


def error_of(package: str, axes: dict) -> str | None:
    """What is wrong with the answer of a package's layer."""
    fp8 = axes.get("packed", "").startswith("fp8")
    way, bench = f"{package}_triton{'_fp8' if fp8 else ''}", BENCHES["layer"]
    values = {"dtype": "fp16", "packed": "fp16", "weights": "fp16"} | SIZES | axes
    base = cell_of("layer", **{name: values[name] for name in SIZES})
    others: dict[str, Any] = {name: value for name, value in values.items() if name not in SIZES}
    cell = base.but(**others)
    definition, implementation = bench.definition(), bench[way]
    if reason := bench.supports(way, cell):
        return reason
    inputs = definition.build(cell, 3, "cpu") | definition.shared(cell, 3, "cpu")
    outputs = definition.empty_outputs(cell, inputs)
    expected = definition.reference(cell, inputs)
    (part,) = (name for name in implementation.parts if "+" in name)
    module = load(implementation.fused(part))
    given = {name: inputs[name] for name in ("x", *bench.shared) if name in inputs}
    ids, weights = expected["topk_ids"].to(torch.int32), expected["topk_weights"].float()
    call = module.bind(
        definition.problem(cell), topk_ids=ids, topk_weights=weights, **given, **outputs, **implementation.options
    )
    check = bench.check(way, cell, inputs, outputs | call(), expected)
    print(call.configuration(), f"{check.rel_l2_error:.1e} of {check.tolerance:.1e}")
    return check.error


def main(package: str, *names: str) -> None:
    """Run the cases of those names, or all; ends with an error where an answer is wrong."""
    torch.cuda.get_device_name = lambda device=0: "NVIDIA H200"
    torch.cuda.get_device_capability = lambda device=0: (
        (9, 0) if package == "vllm" else (8, 0)
    )  # dependent launches are not of the interpreter
    Library.missing = lambda self: None
    Library.operators = lambda self: getattr(torch.ops, self.namespace)
    register()
    failed = {name: error for name in names or CASES if (error := error_of(package, CASES[name]))}
    assert not failed, failed


if __name__ == "__main__":
    main(*sys.argv[1:])
