"""Which tiles the GEMMs of training get, and that they cover what they must and fit."""

import itertools

import pytest

pytest.importorskip("cutlass")
from moe_routing_kernels.experts import Experts, cute_training
from moe_routing_kernels.gemm.sm90.wgrad_tile import wgrad_gemm

SIZES = ((768, 2048), (14336, 4096), (24, 72), (264, 7168))  # intermediate, hidden


def problem(rows: int, intermediate: int, hidden: int, experts: int, activation: str = "swiglu") -> Experts:
    return Experts(rows, hidden, intermediate, experts, "bf16", "bf16", "bf16", activation=activation)


@pytest.mark.parametrize("mean", [0.1, 1, 10, 70, 100, 300, 5000])
@pytest.mark.parametrize("weighted", [False, True])
def test_tiles_cover_and_fit(mean: float, weighted: bool) -> None:
    """The least stages are 3, so that loads run ahead of MMAs; a block's shared memory suffices, buffers included."""
    for (inner, hidden), experts in itertools.product(SIZES, (8, 1024)):
        parts = cute_training.gemms(problem(max(1, int(mean * experts)), inner, hidden, experts), weighted)
        for name in ("up", "d_preact", "d_rows"):
            gemm = parts[name]
            buffers = gemm.epi_tokens * gemm.epi_pitch * gemm.tile.warpgroups * gemm.epi_buffers
            held = gemm.stages * gemm.stage_bytes + 2 * buffers + 8 * (experts + 1) + 16 * gemm.stages
            assert gemm.stages >= 3 and held <= 227 << 10, (name, gemm)
            assert gemm.tile.tokens % gemm.epi_tokens == 0 and gemm.dots * gemm.width >= gemm.columns
        assert parts["d_preact"].epi_tokens == parts["d_preact"].tile.tokens <= cute_training.MOST_TOKENS
        for name in ("d_w13", "d_w2"):
            gemm = parts[name]
            held = gemm.stages * gemm.stage_bytes + 2 * gemm.rows * 64 * 2 + 4 * (experts + 1)
            assert gemm.stages >= 3 and held + 16 * gemm.stages <= 227 << 10, (name, gemm)
            assert gemm.down * gemm.rows >= gemm.height > (gemm.down - 1) * gemm.rows
            assert gemm.across * gemm.columns >= gemm.width > (gemm.across - 1) * gemm.columns


def test_tiles_of_weight_gradients() -> None:
    """Wide ones, unless that leaves much of them idle."""
    assert (wgrad_gemm(2048, 768, 128).m_atoms, wgrad_gemm(2048, 768, 128).columns) == (2, 192)
    assert (wgrad_gemm(1536, 2048, 128).m_atoms, wgrad_gemm(1536, 2048, 128).columns) == (2, 192)
    assert (wgrad_gemm(2048, 1024, 64).m_atoms, wgrad_gemm(2048, 1024, 64).columns) == (3, 128)
    assert (wgrad_gemm(192, 128, 8).m_atoms, wgrad_gemm(192, 128, 8).columns) == (3, 128)
    assert (wgrad_gemm(128, 128, 8).m_atoms, wgrad_gemm(128, 128, 8).columns) == (2, 128)


@pytest.mark.parametrize(
    ("activation", "intermediate", "why"),
    [
        ("swiglu", 768, None),
        ("geglu", 768, None),
        ("swiglu_limit10", 768, None),
        ("swiglu_oai_unbiased", 768, None),
        ("relu2", 768, "has derivatives of gated activations, not of relu2"),
        ("swiglu_oai", 768, "has no gradients of biases, which swiglu_oai has"),
        ("swiglu", 20, "the kernel needs hidden and intermediate that are multiples of 8 (16 bytes)"),
    ],
)
def test_what_the_products_cannot_do(activation: str, intermediate: int, why: str | None) -> None:
    assert cute_training.unsupported(problem(64, intermediate, 2048, 8, activation)) == why
