"""Small routings for the tests of the operators; as a program, what runs on CUDA, in Triton's interpreter, against float64.

A program of its own because TRITON_INTERPRET must precede the import of triton (see test_backends).
"""

import itertools

import gate_limits
import torch
from torch import Tensor

from moe_routing_bench.config.expand import cell_of
from moe_routing_bench.workload.draw import draw_ids, generator
from moe_routing_bench.workload.row_map import row_layout, row_map
from moe_routing_kernels.choices import chooser
from moe_routing_kernels.gate import FUSED
from moe_routing_kernels.ops import backends, cuda, reference
from moe_routing_kernels.permute import LAYOUTS
from moe_routing_kernels.routers import ROUTERS
from moe_routing_kernels.target import Target

# name: tokens, hidden, experts, top_k, layout, capacity factor
CASES = {
    "one_token": (1, 16, 6, 3, "compact", None),
    "odd_hidden": (6, 13, 5, 2, "compact", None),
    "every_expert": (4, 24, 8, 8, "compact", None),
    "odd_k": (3, 40, 9, 7, "padded", 1.0),
    "wide_k": (3, 20, 40, 32, "padded", 0.5),
    "dropped": (9, 20, 8, 4, "compact", 0.5),
    "blocks_and_drops": (7, 5, 4, 4, "block64", 0.5),
    "one_token_in_blocks": (1, 8, 64, 4, "block128", None),
    "two_column_tiles": (2, 4100, 4, 2, "compact", None),
}
DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def routing(tokens: int, experts: int, top_k: int, layout: str = "compact", factor: float | None = None, device="cpu"):
    """(order (R,), inverse (T, k)) of skewed routing."""
    cell = cell_of("permute", tokens=tokens, experts=experts, top_k=top_k, layout=layout, capacity_factor=factor)
    cell = cell.but(skew=0.5, sampler="plackett_luce")  # less than a config would allow of so few tokens
    known = row_map(row_layout(cell), draw_ids(cell, generator(17, "cpu")).contiguous().numpy())
    return torch.from_numpy(known.order).to(device), torch.from_numpy(known.inverse).to(device)


def data(rows: int, hidden: int, inverse: Tensor, dtype: torch.dtype, spoil: bool = False) -> tuple[Tensor, ...]:
    """x or residual (T, H), y (R, H), weights (T, k), on inverse's device; `spoil` makes NaN of what may not be used."""
    x = torch.randn(len(inverse), hidden, dtype=dtype, device=inverse.device)
    y = torch.randn(rows, hidden, dtype=dtype, device=inverse.device)
    weights = torch.rand(inverse.shape, dtype=reference.wide(dtype), device=inverse.device)
    if spoil:
        used = inverse[inverse >= 0].long()
        spare = torch.ones(rows, dtype=torch.bool, device=y.device).index_fill_(0, used, False)
        y[spare] = torch.nan
        weights[inverse < 0] = torch.nan
    return x, y, weights


def close(got: Tensor, want: Tensor, terms: Tensor, roundoff: float) -> None:
    """One rounding of the float64 result, and float32 sums of numbers whose sizes add up to `terms`."""
    bound = roundoff * want.abs() + 2.0**-22 * terms + 1e-7
    wrong = ~((got.double() - want).abs() <= bound)
    assert not wrong.any(), f"{int(wrong.sum())} of {wrong.numel()} differ"


def check(name: str, dtype: torch.dtype, order: Tensor, inverse: Tensor, hidden: int) -> None:
    """The kernels on one routing; AssertionError where they differ from the reference in float64."""
    rows = len(order)
    x, y, weights = data(rows, hidden, inverse, dtype, spoil=True)
    grad, residual = torch.randn_like(x), torch.randn_like(x)
    # Triton's interpreter truncates to bfloat16; a GPU rounds to nearest.
    exact = torch.finfo(dtype).eps / (1 if dtype == torch.bfloat16 and inverse.device.type == "cpu" else 2)
    assert torch.equal(cuda.pack(x, order, inverse), reference.pack(x, order, inverse)), f"{name}: pack"

    wide = [t.double() for t in (y, weights, residual)]
    size = [t.abs() for t in wide]
    got = cuda.combine(y, inverse, weights, residual)
    close(got, reference.combine(wide[0], inverse, *wide[1:]), reference.combine(size[0], inverse, *size[1:]), exact)
    narrow = weights.to(dtype)  # as a router in 16 bits has them: read as they are, and the sums no less exact for it
    got = cuda.combine(y, inverse, narrow, residual)
    assert torch.equal(got, cuda.combine(y, inverse, narrow.float(), residual)), f"{name}: weights of {dtype}"

    want = reference.combine_backward(grad.double(), wide[0], inverse, wide[1], rows)
    terms = reference.combine_backward(grad.double().abs(), size[0], inverse, size[1], rows)
    d_y, d_weights = cuda.combine_backward(grad, y, inverse, weights, rows)
    close(d_y, want[0], terms[0], exact)
    close(d_weights, want[1], terms[1], 2.0**-24)
    assert not d_weights[inverse < 0].any() and not d_y[order < 0].any(), f"{name}: dropped or padding"
    only_y, nothing = cuda.combine_backward(grad, None, inverse, weights, rows)
    assert torch.equal(only_y, d_y) and nothing.shape == (0,), f"{name}: d_y alone"
    nothing, only_weights = cuda.combine_backward(grad, y, inverse, weights, None)
    assert torch.equal(only_weights, d_weights) and nothing.shape == (0,), f"{name}: d_weights alone"


def check_gate(rule: str, logits: Tensor, top_k: int) -> None:
    """The kernels of gate on logits (T, E), whose last token gets a NaN, against the rule in float64."""
    logits[-1, 3] = torch.nan
    bias = 0.1 * torch.randn(logits.shape[1], device=logits.device) if ROUTERS[rule].bias else None
    for selection in (bias, None):
        ids, weights = cuda.gate(logits, selection, top_k, rule, None)
        wide = None if selection is None else selection.double()
        want_ids, want = reference.gate(logits.double(), wide, top_k, rule, None)
        assert torch.equal(ids, want_ids), f"{rule}: ids"
        torch.testing.assert_close(weights.double(), want, rtol=1e-5, atol=2e-6, equal_nan=True)
        assert (ids[-1] == -1).all() and weights[-1].isnan().all(), f"{rule}: NaN"
    check_gate_limits(rule, logits.shape[1], top_k, logits.dtype, logits.device.type)


def check_gate_limits(rule: str, experts: int, top_k: int, dtype: torch.dtype, device: str) -> None:
    """The kernels of gate where scores and sums vanish or are infinite."""
    logits = gate_limits.rows(experts, dtype, device)
    biases = gate_limits.biases(experts, dtype, device).values() if ROUTERS[rule].bias else ()
    for bias in (None, *biases):
        gate_limits.check_choice(logits, *cuda.gate(logits, bias, top_k, rule, None), rule, bias)


def check_permute(topk_ids: Tensor, experts: int, capacity: int | None, layout: str) -> None:
    """The kernels of permute, bit for bit, also where ids are of no expert."""
    got, want = (one.permute(topk_ids, experts, capacity, layout) for one in (cuda, reference))
    for name, one, other in zip(("counts", "offsets", "order", "inverse"), got, want, strict=True):
        assert torch.equal(one, other), f"{layout}: {name}"
    # Of no expert in int64, though their low halves are those of the last.
    spoilt = torch.where(topk_ids < 0, topk_ids.long() + 2**32 + experts, topk_ids.long())
    got = cuda.permute(spoilt, experts, capacity, layout)
    for name, one, other in zip(("counts", "offsets", "order", "inverse"), got, want, strict=True):
        assert one.dtype == torch.int32 and torch.equal(one, other), f"{layout}: {name} of ids in int64"


def check_feed(name: str, activation: str, capacity: int | None, device: str = "cpu") -> None:
    """pack and experts in one operator, in the way of that name, against float64; the last expert has no rows."""
    tokens, hidden, inner, count = 9, 32, 16, 4
    ranked = chooser.ranked
    torch.manual_seed(17)
    ids = torch.stack([torch.randperm(count - 1)[:2] for _ in range(tokens)]).int().to(device)
    _, offsets, order, inverse = reference.permute(ids, count, capacity, "compact")
    wide = inner * (1 if activation == "relu2" else 2)
    shapes = [(tokens, hidden), (count, wide, hidden), (count, hidden, inner)]
    shapes += [(count, wide), (count, hidden)] if activation == "swiglu_oai" else []
    x, *rest = (torch.randn(shape, device=device).div(4).half() for shape in shapes)
    w13, w2, b13, b2 = rest + [None] * (4 - len(rest))
    chooser.ranked = lambda operation: [one for one in ranked(operation) if operation != "layer" or one.name == name]
    chooser.way.cache_clear()
    got = cuda.feed(x, order, inverse, offsets, w13, w2, activation, b13, b2, capacity, None)
    exact = [one if one is None else one.double() for one in (w13, w2, b13, b2)]
    rows = reference.pack(x.double(), order, inverse)
    want = reference.experts(rows, offsets, *exact[:2], activation, *exact[2:])
    used = int(offsets[-1])
    error = float((got[:used].double() - want[:used]).norm() / want[:used].norm())
    assert error < 0.01, f"{name}: {error}"
    found = chooser.way.cache_info()
    assert found.misses == 1, found
    chooser.ranked = ranked
    chooser.way.cache_clear()


def main() -> None:
    """Every operator in Triton's interpreter."""
    torch.manual_seed(17)
    torch.set_num_threads(1)
    chooser.installed = lambda package: package == "triton"
    backends.target = lambda device: Target.of("sm_90a")
    kernel, chosen = chooser.kernel, set()

    def noted(*arguments):
        found = kernel(*arguments)
        chosen.add(found and found.__name__.rpartition(".")[2])
        return found

    chooser.kernel = noted
    some = list(CASES.items())[::3]  # the kernels themselves have tests of their own in the interpreter
    for (name, (tokens, hidden, *rest)), dtype in zip(some, itertools.cycle(DTYPES), strict=False):
        check(name, dtype, *routing(tokens, *rest), hidden)
        print("ok", name, flush=True)
    order, inverse = routing(4, 4, 2)
    check("all_dropped", torch.float32, torch.full_like(order, -1), torch.full_like(inverse, -1), 16)
    check("no_rows", torch.float32, order[:0], torch.full_like(inverse, -1), 16)
    check("no_tokens", torch.float32, torch.full_like(order, -1), inverse[:0], 16)
    shifted = torch.randn(101)[1:].view(20, 5).T  # neither contiguous nor aligned
    order, inverse = routing(5, 4, 2)
    assert torch.equal(cuda.pack(shifted, order, inverse), reference.pack(shifted, order, inverse))
    for rule in FUSED:
        check_gate(rule, torch.randn(3, 16), 3)
    for layout in LAYOUTS:
        ids = torch.stack([torch.randperm(5)[:2] for _ in range(7)]).int()
        ids[2:4] = -1
        check_permute(ids, 5, 2 if layout == "padded" else None, layout)
        check_permute(ids[:0], 5, 2, layout)
    for name in ("triton", "triton_gather"):
        check_feed(name, "swiglu", None)
        check_feed(name, "swiglu_oai", 3)
    assert chosen == {"triton_gate", "triton_permute", "triton_pack", "triton_combine"}, chosen


if __name__ == "__main__":
    main()
