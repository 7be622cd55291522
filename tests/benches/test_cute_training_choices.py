"""Which tiles the products of training get, and that they cover what they must and fit."""

import itertools

import pytest

pytest.importorskip("cutlass")
from moe_routing_kernels.experts import Experts, cute_training
from moe_routing_kernels.experts.cute_weight_tiles import reduction

SIZES = ((768, 2048), (14336, 4096), (24, 72), (264, 7168))  # intermediate, hidden


def problem(rows: int, intermediate: int, hidden: int, experts: int, activation: str = "swiglu") -> Experts:
    return Experts(rows, hidden, intermediate, experts, "bf16", "bf16", "bf16", activation=activation)


@pytest.mark.parametrize("mean", [0.1, 1, 10, 70, 100, 300, 5000])
@pytest.mark.parametrize("weighted", [False, True])
def test_tiles_cover_and_fit(mean: float, weighted: bool) -> None:
    """The least stages are 3, so that loads run ahead of products; a block's shared memory suffices, buffers included."""
    for (inner, hidden), experts in itertools.product(SIZES, (8, 1024)):
        parts = cute_training.parts(problem(max(1, int(mean * experts)), inner, hidden, experts), weighted)
        for name in ("up", "d_sums", "d_rows"):
            product = parts[name]
            buffers = product.chunk * product.pitch * product.tile.warpgroups * product.parts_stored
            held = product.stages * product.stage_bytes + 2 * buffers + 8 * (experts + 1) + 16 * product.stages
            assert product.stages >= 3 and held <= 227 << 10, (name, product)
            assert product.tile.tokens % product.chunk == 0 and product.dots * product.width >= product.columns
        assert parts["d_sums"].chunk == parts["d_sums"].tile.tokens <= cute_training.MOST_TOKENS
        for name in ("d_w13", "d_w2"):
            product = parts[name]
            held = product.stages * product.stage_bytes + 2 * product.rows * 64 * 2 + 4 * (experts + 1)
            assert product.stages >= 3 and held + 16 * product.stages <= 227 << 10, (name, product)
            assert product.down * product.rows >= product.height > (product.down - 1) * product.rows
            assert product.across * product.columns >= product.width > (product.across - 1) * product.columns


def test_tiles_of_weight_gradients() -> None:
    """Wide ones, unless that leaves much of them idle."""
    assert (reduction(2048, 768, 128).slabs, reduction(2048, 768, 128).columns) == (2, 192)
    assert (reduction(1536, 2048, 128).slabs, reduction(1536, 2048, 128).columns) == (2, 192)
    assert (reduction(2048, 1024, 64).slabs, reduction(2048, 1024, 64).columns) == (3, 128)
    assert (reduction(192, 128, 8).slabs, reduction(192, 128, 8).columns) == (3, 128)
    assert (reduction(128, 128, 8).slabs, reduction(128, 128, 8).columns) == (2, 128)


@pytest.mark.parametrize(
    ("activation", "intermediate", "why"),
    [
        ("swiglu", 768, None),
        ("geglu", 768, None),
        ("swiglu_limit10", 768, None),
        ("swiglu_oai_unbiased", 768, None),
        ("relu2", 768, "has slopes of gated activations, not of relu2"),
        ("swiglu_oai", 768, "has no gradients of biases, which swiglu_oai has"),
        ("swiglu", 20, "the kernel needs hidden and intermediate that are multiples of 8 (16 bytes)"),
    ],
)
def test_what_the_products_cannot_do(activation: str, intermediate: int, why: str | None) -> None:
    assert cute_training.unsupported(problem(64, intermediate, 2048, 8, activation)) == why
