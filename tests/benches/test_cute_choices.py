"""Which configurations the CuTe gate and combine choose where measurements on an H200 told them apart (docs/notebook.md)."""

import pytest

pytest.importorskip("cutlass")
from moe_routing_bench.kernels.combine import cute_combine
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
