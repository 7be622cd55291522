"""The cases of test_triton_interpret, run as a program: TRITON_INTERPRET must precede the import of triton.

Pack and combine are checked against a plain loop-free torch reference, gate and permute by their definitions; outputs are
poisoned beforehand.
"""

from types import SimpleNamespace

import torch
from triton.runtime import interpreter

from moe_routing_bench.benches import BENCHES
from moe_routing_bench.benches.combine import triton_combine
from moe_routing_bench.benches.pack import triton_pack, triton_pack_fp8
from moe_routing_bench.grid import FP8, Cell

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
# name: tokens, hidden, top_k, dtype, share of assignments dropped, padding rows
CASES = {
    "plain": (5, 64, 2, "fp32", 0.0, 0),
    "one_token": (1, 16, 3, "bf16", 0.0, 0),
    "one_expert": (7, 8, 1, "fp16", 0.0, 0),
    "odd_hidden": (6, 13, 2, "bf16", 0.0, 0),
    "two_tiles": (3, 4100, 2, "fp32", 0.0, 0),
    "odd_tiles": (2, 2049, 5, "bf16", 0.0, 0),
    "every_expert": (4, 24, 8, "bf16", 0.0, 0),
    "wide_k": (3, 40, 32, "fp32", 0.3, 5),
    "padding": (9, 32, 2, "fp32", 0.0, 11),
    "dropped_and_padding": (33, 20, 4, "bf16", 0.5, 37),
    "more_padding_than_slab": (2, 8, 2, "fp32", 0.0, 200),
    "all_dropped": (4, 16, 2, "fp32", 1.0, 3),
}
# router: experts, top_k, dtype of the scores
GATES = {
    "softmax_topk_renorm": (128, 8, "fp32"),
    "softmax_topk": (60, 4, "bf16"),
    "deepseek_v2": (160, 6, "fp32"),
    "deepseek_v3": (64, 8, "fp16"),
    "sigmoid_renorm": (33, 3, "fp32"),
    "sqrtsoftplus_renorm": (24, 6, "bf16"),
    "llama4": (1, 1, "fp32"),
}
# name: tokens, experts, top_k, capacity factor, skew, layout
PERMUTES = {
    "one_program": (65, 8, 2, None, 0.5, "compact"),
    "one_token": (1, 7, 7, None, 0.0, "block64"),
    "two_programs": (600, 60, 4, 0.7, 1.0, "padded"),
    "everything_on_one_expert": (1100, 16, 1, None, 3.8, "block128"),
}
# name: tokens, hidden, experts, top_k, skew, router. In fp16: Triton 3.7's interpreter multiplies the bits of bf16 numbers
ROUTERS = {
    "parts": (5, 300, 128, 8, 0.0, "softmax_topk_renorm"),
    "tiles_and_parts": (19, 512, 48, 6, 0.5, "deepseek_v3"),
    "one_token_odd": (1, 61, 60, 4, 0.0, "softmax_topk"),
    "every_expert": (3, 32, 5, 5, 0.0, "llama4"),
    "one_element": (3, 1, 1, 1, 0.0, "sqrtsoftplus_renorm"),
    "whole_rows": (1070, 40, 8, 2, 0.7, "softmax_topk_renorm"),
}
# name: dtype, tokens, hidden, experts, top_k, capacity factor, layout
FP8_PACKS = {
    "row": ("fp8_row", 9, 96, 8, 2, None, "compact"),
    "row_of_odd_length": ("fp8_row", 33, 77, 3, 2, 0.6, "block64"),
    "one_element": ("fp8_row", 1, 1, 1, 1, None, "compact"),
    "blocks": ("fp8_block128", 9, 384, 8, 2, None, "compact"),
    "shorter_last_block": ("fp8_block128", 33, 300, 8, 8, 0.5, "padded"),
    "less_than_a_block": ("fp8_block128", 5, 13, 2, 2, None, "block128"),
}


def routing(tokens: int, top_k: int, drop: float, padding: int) -> tuple[torch.Tensor, torch.Tensor]:
    """A random (order, inverse) pair: kept assignments and padding rows in a random order."""
    kept = torch.nonzero(torch.rand(tokens * top_k) >= drop).flatten()
    order = torch.full((len(kept) + padding,), -1, dtype=torch.int32)
    rows = torch.randperm(len(order))[: len(kept)]
    order[rows] = kept.int()
    inverse = torch.full((tokens * top_k,), -1, dtype=torch.int32)
    inverse[kept] = rows.int()
    return order, inverse.view(tokens, top_k)


def check(name: str) -> None:
    """Run both operations on one case; AssertionError where they differ from the reference."""
    tokens, hidden, top_k, dtype, drop, padding = CASES[name]
    order, inverse = routing(tokens, top_k, drop, padding)
    factor = None if drop == 0 and padding == 0 else 1.0
    cell = SimpleNamespace(hidden=hidden, top_k=top_k, dtype=dtype, capacity_factor=factor, layout="compact")
    x = torch.randn(tokens, hidden).to(DTYPES[dtype])
    packed = torch.full((len(order), hidden), torch.nan, dtype=x.dtype)
    triton_pack.prepare(cell, {"x": x, "order": order, "inverse": inverse}, {"packed": packed})()
    expected = torch.where(order[:, None] >= 0, x[order.clamp(min=0).long() // top_k], 0)
    assert torch.equal(packed, expected), f"{name}: pack differs"

    y = torch.randn(len(order), hidden).to(x.dtype)
    weights = torch.rand(tokens, top_k).masked_fill(inverse < 0, torch.nan)
    combined = torch.full_like(x, torch.nan)
    triton_combine.prepare(cell, {"y": y, "inverse": inverse, "weights": weights}, {"combined": combined})()
    terms = y[inverse.clamp(min=0).long()].double() * weights.double()[..., None]
    exact = torch.where(inverse[..., None] >= 0, terms, 0).sum(1)
    torch.testing.assert_close(combined, exact.to(x.dtype))


def check_by_definition(cell: Cell, calls: int = 1) -> None:
    """Run the Triton implementation of a cell's bench; AssertionError where its definition finds fault in the last call."""
    definition, module = BENCHES[cell.bench].definition(), BENCHES[cell.bench].load("triton")
    inputs = definition.build(cell, cell.seed, "cpu")
    outputs = definition.empty_outputs(cell, inputs)
    if cell.dtype in FP8 and cell.tokens:
        inputs["x"][cell.tokens // 2] = 0
    call = module.prepare(cell, inputs, outputs)
    for _ in range(calls):
        for output in outputs.values():
            output.fill_(torch.nan if output.is_floating_point() else 0x7F7F7F7F)
        call()
    found = definition.check(cell, inputs, outputs, definition.reference(cell, inputs))
    assert not found.error and not found.mismatches, f"{cell}: {found}"


def convert_to_fp8_with_torch() -> None:
    """Triton 3.7's interpreter loses the carry where it rounds up to a power of two, and bits of subnormal numbers."""
    plain = interpreter._convert_float

    def convert(value, source, target, rounding):
        if (str(source), str(target)) != ("fp32", "fp8e4nv"):
            return plain(value, source, target, rounding)
        return torch.from_numpy(value.copy()).to(torch.float8_e4m3fn).view(torch.uint8).numpy()

    interpreter._convert_float = convert


if __name__ == "__main__":
    torch.manual_seed(17)
    convert_to_fp8_with_torch()
    triton_pack_fp8.ENOUGH_PROGRAMS = 3  # so that programs have several items, and few run one after the other
    for case, (dtype, tokens, hidden, experts, top_k, factor, layout) in FP8_PACKS.items():
        shape = {
            "tokens": tokens,
            "hidden": hidden,
            "experts": experts,
            "top_k": top_k,
            "dtype": dtype,
            "layout": layout,
        }
        check_by_definition(Cell("pack", 17, capacity_factor=factor, skew=0.0, sampler="exact", **shape))
        print("ok fp8 pack", case, flush=True)
    for router, (experts, top_k, dtype) in GATES.items():
        check_by_definition(Cell("gate", 17, tokens=5, experts=experts, top_k=top_k, router=router, dtype=dtype))
        print("ok gate", router, flush=True)
    for case, (tokens, hidden, experts, top_k, skew, router) in ROUTERS.items():
        shape = {"tokens": tokens, "hidden": hidden, "experts": experts, "top_k": top_k, "router": router}
        check_by_definition(
            Cell("router", 17, skew=skew, sampler="exact", dtype="fp16", **shape), calls=2
        )  # the second finds the counters of the first
        print("ok router", case, flush=True)
    for case, (tokens, experts, top_k, factor, skew, layout) in PERMUTES.items():
        shape = {"tokens": tokens, "experts": experts, "top_k": top_k, "layout": layout}
        check_by_definition(Cell("permute", 17, capacity_factor=factor, skew=skew, sampler="exact", **shape))
        print("ok permute", case, flush=True)
    for case in CASES:
        check(case)
        print("ok", case, flush=True)
