"""Which configurations kernels in CuTe DSL get where measurements on an H200 told them apart (docs/notebook.md)."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("cutlass")
import numpy as np
import pandas as pd
import torch

from moe_routing_bench.config import presets
from moe_routing_bench.peers.quack_kernels import Tiles, tiles_of
from moe_routing_kernels.combine import cute_combine
from moe_routing_kernels.cute.rows import RowTiling
from moe_routing_kernels.experts import Experts, cute_experts, cute_fp8, cute_quantised
from moe_routing_kernels.gate import cute_gate, rule_of
from moe_routing_kernels.gemm.sm90.tile import GroupedGemm, Tile
from moe_routing_kernels.pack import cute_pack

ROOT = Path(__file__).parents[2]
PRESETS = {name: preset for name, preset in presets.load(ROOT / "config/models.yaml").items() if not preset.unsupported}
PINGPONG = Tile(2, 2, 176, pingpong=True, narrowest=88)
PAIRED = replace(PINGPONG, cluster=2)


def pair(tokens: int) -> Tile:
    """A tile with variants that two warpgroups share, of a cluster of two blocks."""
    return Tile(2, 2, tokens, narrowest=tokens // 2, cluster=2)


@pytest.mark.parametrize(
    ("tokens", "experts", "top_k", "threads"),
    [
        (16384, 64, 8, 2),
        (512, 128, 8, 8),
        (16384, 128, 8, 4),
        (65536, 128, 8, 2),
        (65536, 160, 10, 4),
    ],
)
def test_threads_per_token_of_the_packed_gate(tokens: int, experts: int, top_k: int, threads: int) -> None:
    config = cute_gate.choose("fp32", tokens, experts, top_k, rule_of("softmax_topk_renorm"))
    assert config.packed and config.threads_per_token == threads


@pytest.mark.parametrize(
    ("dtype", "tokens", "experts", "top_k", "router", "chosen"),
    [
        ("fp32", 16384, 512, 10, "softmax_topk_renorm", True),
        ("bf16", 16384, 256, 16, "softmax_topk", True),
        ("fp16", 16384, 1024, 1, "llama4", True),
        ("fp32", 4096, 128, 8, "softmax_topk_renorm", True),
        ("fp32", 1024, 192, 2, "softmax_topk_renorm", True),
        ("fp32", 16384, 252, 8, "softmax_topk_renorm", False),  # not yet many experts
        ("fp32", 512, 128, 1, "softmax_topk_renorm", False),  # too few tokens
        ("bf16", 4096, 128, 8, "softmax_topk_renorm", False),  # not measured
        ("fp32", 4096, 124, 8, "softmax_topk_renorm", False),  # idle lanes
        ("fp32", 16384, 258, 8, "softmax_topk_renorm", False),  # no whole vectors
        ("fp32", 16384, 512, 17, "softmax_topk_renorm", False),  # too many candidates
        ("fp32", 16384, 256, 8, "deepseek_v3", False),  # groups and a bias
        ("fp32", 16384, 512, 10, "sigmoid_renorm", False),  # scores that are rounded
    ],
)
def test_gates_of_many_experts_choose_by_a_threshold(
    dtype: str, tokens: int, experts: int, top_k: int, router: str, chosen: bool
) -> None:
    assert cute_gate.choose(dtype, tokens, experts, top_k, rule_of(router)).threshold == chosen


@pytest.mark.parametrize(
    ("dtype", "tokens", "experts", "top_k", "in_all", "together"),
    [
        ("fp32", 65536, 512, 10, 1, 1),
        ("fp32", 65536, 384, 8, 1, 1),
        ("fp32", 65536, 256, 10, 2, 2),
        ("fp32", 65536, 256, 11, 1, 1),  # 16 lanes are too few for the candidates
        ("fp32", 16384, 256, 10, 1, 1),
        ("bf16", 4096, 512, 10, 1, 1),
        ("bf16", 16384, 512, 10, 2, 1),
        ("fp16", 65536, 256, 8, 1, 1),
    ],
)
def test_tokens_of_a_warp_of_the_threshold_gate(
    dtype: str, tokens: int, experts: int, top_k: int, in_all: int, together: int
) -> None:
    config = cute_gate.choose(dtype, tokens, experts, top_k, rule_of("softmax_topk_renorm"))
    assert (config.tokens_per_thread, config.together) == (in_all, together)


@pytest.mark.parametrize(
    ("tokens", "hidden", "vectors"),
    [(4096, 2048, 1), (4096, 2880, 2), (4096, 4096, 2), (16384, 2048, 2), (16384, 4096, 2)],
)
def test_vectors_per_thread_of_combine_with_two_choices(tokens: int, hidden: int, vectors: int) -> None:
    assert cute_combine.choose_tiling(tokens, hidden, "bf16", 2).vectors == vectors


@pytest.mark.parametrize(
    ("tokens", "hidden", "top_k", "padding", "pieces", "warps"),
    [
        (16384, 2880, 2, False, 2, 1),
        (4096, 2880, 2, False, 1, 4),  # not much is written
        (16384, 2880, 2, True, 1, 4),
        (16384, 2880, 4, False, 1, 4),
        (16384, 4096, 8, False, 2, 4),
        (16384, 8 * 359, 2, False, 1, 4),  # an odd number of vectors
    ],
)
def test_pieces_of_rows_packed_by_bulk_copies(
    tokens: int, hidden: int, top_k: int, padding: bool, pieces: int, warps: int
) -> None:
    config = cute_pack.choose("sm_90a", tokens, hidden, "bf16", top_k, padding)
    assert config == cute_pack.BulkConfig(hidden, pieces, warps)


def test_rows_of_two_choices_that_a_tiling_covers_are_packed_through_registers() -> None:
    assert cute_pack.choose("sm_90a", 16384, 4096, "bf16", 2) == RowTiling(4096, 8, 1, 128, 128, streaming=True)


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
    """384 columns are two tiles of 192; 768 of an ungated gemm are as many as 384 pairs."""
    plain = Experts(32768, 2048, 192, 64, "bf16", "bf16", "bf16", activation="relu2")
    assert tiles_of(plain, gathered=False)[0] == Tiles(128, 128, True, (1, 2))
    assert tiles_of(replace(plain, activation="swiglu"), gathered=False)[0] == Tiles(128, 192, True, (1, 1))


@pytest.mark.parametrize(
    ("rows", "experts", "wide", "packed", "gathered"),
    [  # that were the fastest, or near it, with equal and with drawn loads (docs/notebook.md)
        (8, 128, 1536, Tile(1, 2, 8), None),  # Qwen3-30B-A3B, T=1
        (64, 128, 1536, Tile(1, 2, 8), None),  # T=8
        (512, 128, 1536, Tile(1, 2, 8), None),  # T=64
        (4096, 128, 2048, Tile(1, 2, 48), None),  # T=512
        (8192, 128, 1536, Tile(2, 2, 112, narrowest=40), None),  # T=1024
        (19200, 128, 1536, Tile(2, 2, 176, narrowest=88), None),  # T=2400: most experts have one tile
        (24064, 128, 1536, Tile(2, 2, 112, narrowest=40), None),  # T=3008: they have two
        (32768, 128, 1536, PINGPONG, Tile(2, 2, 144, narrowest=72)),  # T=4096
        (8, 256, 4096, Tile(1, 2, 8), None),  # DeepSeek-V3, T=1
        (2, 8, 4096, Tile(1, 1, 8), None),  # Mixtral-8x7B, down: all experts have few rows of weights
        (32768, 256, 7168, Tile(2, 2, 176, narrowest=88), None),  # T=4096
    ],
)
def test_tiles_of_products_with_tokens_on_the_short_side(
    rows: int, experts: int, wide: int, packed: Tile, gathered: Tile | None
) -> None:
    """Two warpgroups take tiles in turn where rows are many, unless they are gathered."""
    assert cute_experts.choose_tile(rows, experts, wide) == packed
    assert cute_experts.choose_tile(rows, experts, wide, gathers=True) == (gathered or packed)


@pytest.mark.parametrize(
    ("sizes", "up", "gathered", "down"),
    [  # rows, hidden, intermediate, experts; measured with several tiles (docs/notebook.md)
        ((32768, 2048, 768, 128), PINGPONG, pair(160), PINGPONG),  # Qwen3-30B-A3B, T=4096
        ((131072, 2048, 768, 128), PAIRED, pair(160), PAIRED),  # T=16384
        ((262144, 4096, 1024, 128), pair(176), pair(160), PAIRED),  # T=32768
        ((16384, 4096, 14336, 8), pair(176), pair(160), pair(176)),  # Mixtral-8x7B, T=8192
        ((65536, 7168, 2048, 256), pair(160), pair(160), pair(160)),  # DeepSeek-V3, T=8192
        ((65536, 2880, 2880, 128), pair(160), pair(160), pair(160)),  # gpt-oss-120b, T=16384
        ((163840, 2048, 512, 512), PINGPONG, pair(160), PINGPONG),  # Qwen3-Next, T=16384
        ((16384, 2880, 2880, 128), *[Tile(2, 2, 176, narrowest=88)] * 3),  # gpt-oss-120b, T=4096: few rows
        ((2048, 4096, 14336, 8), *[Tile(2, 2, 144, narrowest=72)] * 3),  # Mixtral-8x7B, T=1024: the GEMMs overlap
    ],
)
def test_tiles_of_many_rows(sizes: tuple[int, ...], up: Tile, gathered: Tile, down: Tile) -> None:
    """Two blocks load weights for both where rows are gathered or K is long: H numbers in the first gemm, I in the second."""
    problem = Experts(*sizes, "bf16", "bf16", "bf16")
    assert [gemm.tile for gemm in cute_experts.gemms(problem)] == [up, down]
    assert cute_experts.gemms(problem, top_k=8)[0].tile == gathered


def test_an_activation_makes_sums_long_later() -> None:
    """Warpgroups that take turns hide it; 2048 numbers are long without."""
    gated = Experts(131072, 2048, 768, 128, "bf16", "bf16", "bf16")
    assert cute_experts.gemms(gated)[0].tile == PAIRED
    assert cute_experts.gemms(replace(gated, activation="relu2"))[0].tile == pair(176)


def test_tiles_of_gemms_with_tokens_on_the_n_side() -> None:
    """The second gemm never gathers; with few rows the GEMMs overlap, without clusters; a tile may be given."""
    long = Experts(131072, 2048, 768, 128, "bf16", "bf16", "bf16")
    up, down = cute_experts.gemms(long, top_k=8)
    assert (up.top_k, down.top_k, up.waits + up.signals, down.waits + down.signals) == (8, 0, "", "")
    up, down = cute_experts.gemms(replace(long, rows=64), Tile(1, 2, 16))
    assert (up.tile.tokens, up.waits, up.signals) == (16, "", "early")
    assert (down.tile.tokens, down.waits, down.signals) == (8, "rows", "")
    up, down = cute_experts.gemms(long, overlap=True)
    assert (up.signals, up.tile.cluster, down.waits, down.tile.cluster) == ("early", 1, "rows", 1)


def test_products_overlap_with_their_neighbours_where_these_do() -> None:
    """The first waits before it counts rows, the second lets combine start behind its loads; with many rows neither does."""
    few = Experts(8, 2048, 768, 128, "bf16", "bf16", "bf16")
    up, down = cute_experts.gemms(few, top_k=8, waits=True, signals=True)
    assert (up.waits, up.signals, down.waits, down.signals) == ("offsets", "early", "rows", "late")
    with pytest.raises(AssertionError, match="no overlapping neighbours"):
        cute_experts.gemms(replace(few, rows=41 * 128), waits=True)


@pytest.mark.parametrize("model", PRESETS)
@pytest.mark.parametrize("top_k", [0, 1], ids=["packed", "gathered"])
def test_a_model_needs_few_kernels(model: str, top_k: int) -> None:
    """At most eight of each GEMM for 1 to 16384 tokens, so that all can be compiled before a model runs."""
    preset = PRESETS[model]
    kernels: list[set[GroupedGemm]] = [set(), set()]
    for tokens in (*range(1, 256), *range(256, 16385, 61), 16384):
        rows, sizes = tokens * preset.top_k, (preset.hidden, preset.intermediate, preset.experts)
        problem = Experts(rows, *sizes, "bf16", "bf16", "bf16", activation=preset.activation)
        for known, gemm in zip(kernels, cute_experts.gemms(problem, top_k=top_k * preset.top_k), strict=True):
            known.add(gemm)
    assert max(map(len, kernels)) <= 8, [sorted(map(str, known)) for known in kernels]


def test_shared_tiles_are_near_the_best_measured() -> None:
    """Both GEMMs in each of three tiles, three drawn loads of each mean: the chosen tile costs at most 7 % more than the best, and half a percent in the mean."""
    times = pd.read_csv(ROOT / "results/nvidia-h200.layers/spread.csv")
    losses = []
    for (model, mean), rows in times.groupby(["model", "mean"]):
        measured = rows.groupby("tokens").us.median()
        losses.append(measured[cute_experts.choose_shared(mean).tokens] / measured.min())
        assert losses[-1] < 1.07, (model, mean, measured)
    assert len(losses) == 24 and np.exp(np.log(losses).mean()) < 1.005


@pytest.mark.parametrize("experts", [2, 8, 64, 100, 128, 512])
def test_rows_that_take_a_tile_overlap_alike(experts: int) -> None:
    """Whether GEMMs overlap is compiled into the kernel: a tile with both would be two kernels. Few rows always overlap."""
    answers: dict[Tile, set[bool]] = {}
    for rows in range(1, 260 * experts, max(1, experts // 8)):
        up, _ = cute_experts.gemms(Experts(rows, 2048, 768, experts, "bf16", "bf16", "bf16"))
        answers.setdefault(up.tile, set()).add(up.signals == "early")
        assert up.signals == "early" or rows > cute_experts.OVERLAP_ROWS
    assert all(len(found) == 1 for found in answers.values()), answers


@pytest.mark.parametrize("mean", [0.1, 1, 3, 10, 33, 70, 100, 300, 1000, 5000])
def test_tiles_cover_the_rows_of_an_expert_and_fit(mean: float) -> None:
    """The least stages are 3, so that loads run ahead of MMAs; a block's shared memory suffices."""
    for columns, inner, activation in ((768, 2048, "swiglu"), (2048, 768, ""), (7168, 2048, ""), (40, 64, "relu2")):
        for experts in (8, 1024):
            tile = cute_experts.choose_tile(int(mean * experts), experts, 2 * columns, long=inner > 1000, clusters=True)
            gemm = GroupedGemm(columns, inner, experts, activation, tile)
            assert gemm.stages >= 3 and tile.tokens % gemm.epi_tokens == 0 and gemm.epi_tokens % 8 == 0
            held = gemm.stages * gemm.stage_bytes + 2 * gemm.epi_tokens * gemm.epi_pitch * tile.warpgroups
            assert held + 8 * (experts + 1) + 16 * gemm.stages <= 227 << 10
            assert gemm.m_tiles * gemm.width * tile.sharing >= columns > (gemm.m_tiles - 1) * gemm.width * tile.sharing


def test_the_most_tiles_that_rows_can_need() -> None:
    gemm = GroupedGemm(768, 2048, 128, "swiglu", Tile(2, 2, 144))
    assert gemm.most_tiles(0) == 0
    assert gemm.most_tiles(5) == 5 * 6  # each with an expert of its own; 6 tiles of 128 columns side by side
    assert gemm.most_tiles(1440) == (10 + 128) * 6
    pairs = GroupedGemm(768, 2048, 128, "swiglu", pair(144))
    assert pairs.most_tiles(1440) == (5 + 128) * 6 * 2


@pytest.mark.parametrize(
    ("module", "weights", "packed"),
    [
        (cute_experts, "bf16", "bf16"),
        (cute_quantised, "int4_g128", "bf16"),
        (cute_fp8, "e4m3_block128", "fp8_block128"),
    ],
)
@pytest.mark.parametrize(("rows", "multiprocessors"), [(8, 132), (70000, 132), (70000, 7)])
def test_a_launch_has_no_more_blocks_than_tiles_or_places(monkeypatch, module, weights, packed, rows, multiprocessors):
    """Persistent blocks: at most as many as share the multiprocessors, and none that can have no tile."""
    known = SimpleNamespace(multi_processor_count=multiprocessors)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: known)
    gemm, _ = module.gemms(Experts(rows, 256, 128, 8, "bf16", packed, weights))
    x = torch.empty(rows, 1, dtype=torch.uint8)
    operands: list[Any] = [x] * {cute_experts: 5, cute_quantised: 4, cute_fp8: 6}[module]
    call: Any = module.launch(gemm, print, *operands, torch.empty(rows, 128, device="meta"))
    resident, cluster = getattr(gemm, "resident", 1), gemm.tile.cluster
    assert call.args[-1] == min(gemm.most_tiles(rows), resident * multiprocessors) // cluster * cluster > 0
