"""Which configurations kernels in CuTe DSL get where measurements on an H200 told them apart (docs/notebook.md)."""

from dataclasses import replace

import pytest

pytest.importorskip("cutlass")
from moe_routing_bench.kernels.combine import cute_combine
from moe_routing_bench.kernels.experts import Experts
from moe_routing_bench.kernels.experts.quack_experts import Tiles, tiles_of
from moe_routing_bench.kernels.gate import cute_gate
from moe_routing_bench.kernels.gate.rules import rule_of


@pytest.mark.parametrize(
    ("tokens", "experts", "top_k", "threads"),
    [
        (16384, 64, 8, 2),
        (4096, 128, 8, 4),
        (16384, 128, 8, 4),
        (65536, 128, 8, 2),
        (65536, 256, 10, 4),
        (16384, 384, 10, 4),
        (65536, 384, 10, 4),
        (16384, 512, 10, 8),
    ],
)
def test_threads_per_token_of_the_packed_gate(tokens: int, experts: int, top_k: int, threads: int) -> None:
    config = cute_gate.choose("fp32", tokens, experts, top_k, rule_of("softmax_topk_renorm"))
    assert config.packed and config.threads_per_token == threads


@pytest.mark.parametrize(
    ("tokens", "hidden", "vectors"),
    [(4096, 2048, 1), (4096, 2880, 2), (4096, 4096, 2), (16384, 2048, 2), (16384, 4096, 2)],
)
def test_vectors_per_thread_of_combine_with_two_choices(tokens: int, hidden: int, vectors: int) -> None:
    assert cute_combine.choose_tiling(tokens, hidden, "bf16", 2).vectors == vectors


@pytest.mark.parametrize(
    ("sizes", "up", "down"),
    [  # rows, H, I, E
        ((131072, 2048, 768, 128), Tiles(128, 192, True, (1, 1)), Tiles(128, 192, True, (1, 1))),  # Qwen3-30B-A3B
        ((131072, 4096, 1536, 64), Tiles(128, 192, True, (1, 2)), Tiles(128, 208, True, (1, 2))),
        ((262144, 4096, 1024, 128), Tiles(128, 128, True, (1, 2)), Tiles(128, 208, True, (1, 2))),
        ((32768, 2048, 1024, 64), Tiles(128, 128, True, (1, 2)), Tiles(128, 192, True, (1, 1))),  # 512 rows an expert
        ((32768, 7168, 2048, 256), Tiles(128, 256, False, (1, 2)), Tiles(128, 208, True, (1, 2))),  # DeepSeek-V3
        ((32768, 4096, 14336, 8), Tiles(128, 128, True, (1, 2)), Tiles(256, 192, False, (1, 2))),  # Mixtral-8x7B
        ((32768, 4095, 8191, 8), Tiles(128, 128, True, (1, 2)), Tiles(128, 192, True, (1, 1))),
        ((32768, 4096, 8192, 8), Tiles(128, 128, True, (1, 2)), Tiles(256, 192, False, (1, 2))),
    ],
)
def test_configurations_of_grouped_products(sizes, up, down):
    problem = Experts(*sizes, "bf16", "bf16", "bf16")
    assert tiles_of(problem, gathered=False) == (up, down)
    assert tiles_of(problem, gathered=True) == (Tiles(128, 256, False, (1, 1)), down)


def test_the_columns_of_a_product_without_a_gate_are_half():
    """384 columns are two tiles of 192; 768 of an ungated product are as many as 384 pairs."""
    plain = Experts(32768, 2048, 192, 64, "bf16", "bf16", "bf16", activation="relu2")
    assert tiles_of(plain, gathered=False)[0] == Tiles(128, 128, True, (1, 2))
    assert tiles_of(replace(plain, activation="swiglu"), gathered=False)[0] == Tiles(128, 192, True, (1, 1))
