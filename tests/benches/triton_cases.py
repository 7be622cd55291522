"""The cases of test_triton_interpret, run as a program: TRITON_INTERPRET must precede the import of triton.

Pack and combine are checked against a plain loop-free torch reference, gate and permute by their definitions; outputs are
poisoned beforehand.
"""

from types import MappingProxyType, SimpleNamespace

import torch
import triton
import triton.language as tl
from triton.runtime import interpreter

from moe_routing_bench.benches.registry import BENCHES
from moe_routing_bench.config.expand import cell_of
from moe_routing_bench.grid.cell import Cell
from moe_routing_kernels import formats
from moe_routing_kernels.activations import ACTIVATIONS, activation_of
from moe_routing_kernels.combine import Combine, triton_combine
from moe_routing_kernels.experts import triton_dequantise, triton_experts
from moe_routing_kernels.experts.common import activate
from moe_routing_kernels.formats.quantisation import dequantise, quantise
from moe_routing_kernels.formats.weights import WEIGHTS
from moe_routing_kernels.pack import Pack, triton_pack, triton_pack_fp8
from moe_routing_kernels.permute import triton_permute
from moe_routing_kernels.router import triton_router
from moe_routing_kernels.target import MEASURED

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
    "dropped_and_padding": (9, 20, 4, "bf16", 0.5, 11),
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
    "one_program": (31, 8, 2, None, 0.5, "compact"),
    "one_token": (1, 7, 7, None, 0.0, "block64"),
    "two_programs": (17, 24, 4, 0.7, 1.0, "padded"),
    "everything_on_one_expert": (150, 8, 1, None, 3.8, "block128"),
}
# name: tokens, hidden, experts, top_k, skew, router. In fp16: Triton 3.7's interpreter multiplies the bits of bf16 numbers
ROUTERS = {
    "parts": (5, 300, 128, 8, 0.0, "softmax_topk_renorm"),
    "tiles_and_parts": (19, 512, 48, 6, 0.5, "deepseek_v3"),
    "one_token_odd": (1, 61, 60, 4, 0.0, "softmax_topk"),
    "every_expert": (3, 32, 5, 5, 0.0, "llama4"),
    "one_element": (3, 1, 1, 1, 0.0, "sqrtsoftplus_renorm"),
    "whole_rows": (70, 40, 8, 2, 0.7, "softmax_topk_renorm"),
}
# name: dtype, tokens, hidden, experts, top_k, capacity factor, layout
FP8_PACKS = {
    "row": ("fp8_row", 9, 96, 8, 2, None, "compact"),
    "row_of_odd_length": ("fp8_row", 33, 77, 3, 2, 0.6, "block64"),
    "one_element": ("fp8_row", 1, 1, 1, 1, None, "compact"),
    "blocks": ("fp8_block128", 9, 384, 8, 2, None, "compact"),
    "shorter_last_block": ("fp8_block128", 33, 300, 8, 8, 0.5, "padded"),
    "less_than_a_block": ("fp8_block128", 5, 13, 2, 2, None, "block128"),
    "blocks_of_64": ("fp8_block64", 9, 300, 8, 2, 0.7, "padded"),
    "blocks_of_no_power_of_two": ("fp8_block48", 9, 300, 8, 3, None, "compact"),
}
# name: tokens, hidden, intermediate, experts, top_k, capacity factor, skew, layout. In fp16, like the routers
EXPERTS = {
    "low_tiles": (9, 40, 24, 5, 2, None, 0.5, "compact"),
    "one_token": (1, 16, 16, 7, 3, None, 0.0, "compact"),
    "every_expert": (4, 130, 70, 4, 4, None, 0.0, "block64"),
    "whole_tiles": (96, 128, 256, 3, 2, None, 0.3, "compact"),
    "groups_of_tiles": (400, 16, 130, 2, 1, None, 0.7, "compact"),
    "odd_and_dropped": (300, 33, 65, 3, 1, 0.7, 1.0, "padded"),
    "everything_on_one_expert": (150, 64, 48, 4, 1, None, 1.7, "block128"),
}
# Formats that the table does not have: a line of it is all that a new group size takes.
MORE_FORMATS = (
    formats.Format("fp8_block64", "float8_e4m3fn", 8, 2.0**-4, 448.0, 2.0**-6, group=64, scale="float32"),
    formats.Format("fp8_block48", "float8_e4m3fn", 8, 2.0**-4, 448.0, 2.0**-6, group=48, scale="float32"),
)


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
    x = torch.randn(tokens, hidden).to(DTYPES[dtype])
    packed = torch.full((len(order), hidden), torch.nan, dtype=x.dtype)
    pack = Pack(tokens, hidden, top_k, len(order), dtype, dtype, padding=drop > 0 or padding > 0)
    triton_pack.bind(pack, x=x, order=order, inverse=inverse, packed=packed)()
    expected = torch.where(order[:, None] >= 0, x[order.clamp(min=0).long() // top_k], 0)
    assert torch.equal(packed, expected), f"{name}: pack differs"

    y = torch.randn(len(order), hidden).to(x.dtype)
    weights = torch.rand(tokens, top_k).masked_fill(inverse < 0, torch.nan)
    combine = Combine(tokens, hidden, top_k, dtype, dropping=drop > 0)
    terms = y[inverse.clamp(min=0).long()].double() * weights.double()[..., None]
    exact = torch.where(inverse[..., None] >= 0, terms, 0).sum(1)
    for residual in (None, torch.randn(tokens, hidden).to(x.dtype)):
        combined = torch.full_like(x, torch.nan)
        tensors = {"y": y, "inverse": inverse, "topk_weights": weights, "combined": combined, "residual": residual}
        triton_combine.bind(combine, **tensors)()
        want = exact if residual is None else exact + residual
        torch.testing.assert_close(combined, want.to(x.dtype))


def check_by_definition(cell: Cell, calls: int = 1) -> None:
    """Run the Triton implementation of a cell's bench; AssertionError where its definition finds fault in the last call."""
    definition = BENCHES[cell.bench].definition()
    inputs = definition.build(cell, cell.seed, "cpu")
    if hasattr(definition, "shared"):
        inputs |= definition.shared(cell, cell.seed, "cpu")
    outputs = definition.empty_outputs(cell, inputs)
    if cell.bench == "pack" and cell.tokens:
        inputs["x"][cell.tokens // 2] = 0
    call = BENCHES[cell.bench].bind("triton", cell, inputs | outputs)
    for _ in range(calls):
        for output in outputs.values():
            output.fill_(torch.nan if output.is_floating_point() else 0x7F7F7F7F)
        call()
    found = definition.check(cell, inputs, outputs, definition.reference(cell, inputs))
    assert not found.error and not found.mismatches, f"{cell}: {found}"


@triton.jit
def activation_kernel(
    gate_ptr,
    up_ptr,
    out_ptr,
    COUNT: tl.constexpr,
    VALUE: tl.constexpr,
    LIMIT: tl.constexpr,
    ALPHA: tl.constexpr,
    SHIFT: tl.constexpr,
):
    """`triton_experts.activate` of COUNT pairs."""
    at = tl.arange(0, COUNT)
    gate, up = tl.load(gate_ptr + at), tl.load(up_ptr + at)
    tl.store(out_ptr + at, triton_experts.activate(gate, up, VALUE, LIMIT, ALPHA, SHIFT))


def check_activation(name: str) -> None:
    """At every pair of a limit, its neighbours, infinity and NaN; AssertionError where torch has another value."""
    known = activation_of(name)
    limit = torch.tensor(known.limit or 7.0)
    beyond = torch.nextafter(limit, torch.tensor(torch.inf))
    special = torch.tensor([limit, -limit, beyond, -beyond, 0.0, 1.5, torch.inf, torch.nan])
    gate, up = torch.cartesian_prod(special, special).T.contiguous()
    if known.value == "gelu":  # torch's value is 0 from -6 down, which times infinity is NaN
        up = up.clamp(max=100)
    want = activate(name, torch.cat([gate[:, None], up[:, None]], 1) if known.gated else gate[:, None])[:, 0]
    got = torch.empty_like(gate)
    activation_kernel[(1,)](gate, up, got, len(gate), known.value, known.limit, known.alpha, known.shift)
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5, equal_nan=True)


def check_weights(name: str, rows: int, columns: int) -> None:
    """Dequantise two experts' weights; AssertionError where a bit differs from what torch makes of them. In fp16, like the routers."""
    form = WEIGHTS[name]
    parts = quantise(torch.randn(2, rows, columns) * columns**-0.5, form, "fp16")
    want = torch.empty(2, rows, columns, dtype=torch.float16)
    dequantise(parts, form, want)
    found = torch.full_like(want, torch.nan)
    triton_dequantise.launcher(parts, form, found)()
    assert torch.equal(found, want), f"{name} ({rows}, {columns}): {int((found != want).sum())} weights differ"


def convert_to_fp8_with_torch() -> None:
    """Triton 3.7's interpreter loses the carry where it rounds up to a power of two, and bits of subnormal numbers."""
    plain = interpreter._convert_float

    def convert(value, source, target, rounding):
        if (str(source), str(target)) != ("fp32", "fp8e4nv"):
            return plain(value, source, target, rounding)
        return torch.from_numpy(value.copy()).to(torch.float8_e4m3fn).view(torch.uint8).numpy()

    interpreter._convert_float = convert


def gpu_of(multiprocessors: int) -> SimpleNamespace:
    """In place of `Target` in a module: what it asks of the GPU that is here."""
    return SimpleNamespace(here=lambda device: MEASURED._replace(multiprocessors=multiprocessors))


if __name__ == "__main__":
    torch.manual_seed(17)
    convert_to_fp8_with_torch()
    formats.FORMATS = MappingProxyType({**formats.FORMATS, **{one.name: one for one in MORE_FORMATS}})
    triton_pack_fp8.Target, triton_pack_fp8.ENOUGH_PROGRAMS = (
        gpu_of(1),
        3,
    )  # so that programs have several items, and few run one after the other
    triton_experts.GROUP = 2  # so that an expert with a few hundred rows has two groups of tiles
    triton_permute.ONE_PROGRAM = triton_permute.BLOCK = 64  # so that some dozens of assignments need two programs
    triton_permute.MAX_PROGRAMS = 2  # and more than 128 two tiles in each
    triton_router.Target = gpu_of(8)  # so that five tiles of tokens fill half of the GPU
    for case, (packed, tokens, hidden, experts, top_k, factor, layout) in FP8_PACKS.items():
        shape = {
            "tokens": tokens,
            "hidden": hidden,
            "experts": experts,
            "top_k": top_k,
            "layout": layout,
        }
        check_by_definition(cell_of("pack", capacity_factor=factor, **shape).but(packed=packed))
        print("ok fp8 pack", case, flush=True)
    for number, (case, form) in enumerate(WEIGHTS.items()):
        if form.codec in triton_dequantise.CODECS:
            # Whole groups and less than one; of a third of the forms, whose groups differ, and of blocks shorter last ones, too.
            shorter = [(130, 300)] if number % 3 == 0 or form.rows > 1 else []
            for rows, columns in [(8, 128), (3, 20), *shorter]:
                check_weights(case, rows, columns)
            print("ok weights", case, flush=True)
    for router, (experts, top_k, dtype) in GATES.items():
        check_by_definition(cell_of("gate", tokens=5, experts=experts, top_k=top_k, router=router, dtype=dtype))
        print("ok gate", router, flush=True)
    for case, (tokens, hidden, experts, top_k, skew, router) in ROUTERS.items():
        shape = {"tokens": tokens, "hidden": hidden, "experts": experts, "top_k": top_k, "router": router}
        check_by_definition(
            cell_of("router", dtype="fp16", **shape).but(skew=skew), calls=2
        )  # the second finds the counters of the first
        print("ok router", case, flush=True)
    for case, (tokens, experts, top_k, factor, skew, layout) in PERMUTES.items():
        shape = {"tokens": tokens, "experts": experts, "top_k": top_k, "layout": layout}
        check_by_definition(cell_of("permute", capacity_factor=factor, **shape).but(skew=skew))
        print("ok permute", case, flush=True)
    for activation in (*ACTIVATIONS, "swiglu_limit10"):
        check_activation(activation)
        print("ok activation", activation, flush=True)
    for activation in (*ACTIVATIONS[1:], "swiglu_limit10"):
        shape = {"tokens": 9, "hidden": 40, "intermediate": 24, "experts": 5, "top_k": 2}
        check_by_definition(cell_of("experts", dtype="fp16", activation=activation, **shape))
        print("ok experts", activation, flush=True)
    for case, (tokens, hidden, intermediate, experts, top_k, factor, skew, layout) in EXPERTS.items():
        shape = {"tokens": tokens, "hidden": hidden, "intermediate": intermediate, "experts": experts, "top_k": top_k}
        cell = cell_of("experts", dtype="fp16", layout=layout, capacity_factor=factor, **shape).but(skew=skew)
        check_by_definition(cell)
        print("ok experts", case, flush=True)
    for case in CASES:
        check(case)
        print("ok", case, flush=True)
