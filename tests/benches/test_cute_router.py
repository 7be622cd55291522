"""The fused router's operands: that lanes fill registers as the tensor core instruction expects, evaluated on the CPU."""

import itertools

import pytest

pytest.importorskip("cutlass")
import cutlass
import cutlass.cute as cute

from moe_routing_kernels.gate import rule_of
from moe_routing_kernels.router import cute_gemm, cute_router


def instruction() -> dict[str, dict[tuple[int, int], tuple[int, int]]]:
    """Each operand's layout, (lane, register) -> (row, column), as CuTe describes m16n8k16."""
    places = {}
    shapes = {
        "A": (cute_gemm.ROWS, cute_gemm.DEPTH),
        "B": (cute_gemm.COLUMNS, cute_gemm.DEPTH),
        "C": (cute_gemm.ROWS, cute_gemm.COLUMNS),
    }

    @cute.jit
    def host(places: cutlass.Constexpr):
        kind = cute.nvgpu.warp.MmaF16BF16Op(
            cutlass.BFloat16, cutlass.Float32, (cute_gemm.ROWS, cute_gemm.COLUMNS, cute_gemm.DEPTH)
        )
        tiled = cute.make_tiled_mma(kind)
        for name, (rows, columns) in shapes.items():
            layout = getattr(tiled, f"tv_layout_{name}")
            registers = rows * columns // cute_gemm.WARP
            at = {(t, v): cute.crd2idx((t, v), layout) for t in range(cute_gemm.WARP) for v in range(registers)}
            places[name] = {place: (index % rows, index // rows) for place, index in at.items()}

    host(places)
    return places


def test_both_operands_hold_the_same_elements_of_h() -> None:
    """Lane l loads 8 elements from 8 * (l % 4) on of row l // 4; each of two MMAs pairs equal elements, each once."""
    known = instruction()
    for half in range(cute_gemm.LANE // 4):
        left, right = {}, {}
        for lane in range(cute_gemm.WARP):
            for i in range(4):
                h = lane % cute_gemm.QUAD * cute_gemm.LANE + half * 4 + i
                for upper in range(2):
                    row, k = known["A"][lane, cute_gemm.a_register(i, upper)]
                    assert row == upper * (cute_gemm.ROWS // 2) + lane // cute_gemm.QUAD
                    assert left.setdefault(k, h) == h
                column, k = known["B"][lane, i]
                assert column == lane // cute_gemm.QUAD
                assert right.setdefault(k, h) == h
        assert left == right and len(set(left.values())) == cute_gemm.DEPTH


def test_accumulators_are_where_they_are_stored_from() -> None:
    for (lane, register), (row, column) in instruction()["C"].items():
        assert row == register // 2 * (cute_gemm.ROWS // 2) + lane // cute_gemm.QUAD
        assert column == lane % cute_gemm.QUAD * 2 + register % 2


@pytest.mark.parametrize(
    ("experts", "name"), [(1, "llama4"), (60, "softmax_topk"), (256, "deepseek_v3"), (1024, "softmax_topk_renorm")]
)
def test_splits_cover_h_and_warps_their_tokens(experts: int, name: str) -> None:
    for tokens, hidden in itertools.product((1, 15, 16, 17, 64, 513, 4096, 100_000), (1, 13, 2048, 2880, 7168)):
        config = cute_router.choose(tokens, hidden, experts, rule_of(name))
        split = config.chunks * cute_gemm.CHUNK
        assert (config.splits - 1) * split < hidden <= config.splits * split, "no split is empty, none is missing"
        assert config.chunks % config.in_flight == 0
        at_once = cute_gemm.WARP // config.threads_per_token * config.tokens_per_thread
        assert cute_gemm.ROWS * config.row_tiles // cute_gemm.WARPS % at_once == 0, (
            "no warp reaches into the tokens of the next"
        )
        slots = cute_gemm.tiles_of(experts) + 2 * config.row_tiles
        assert slots * config.in_flight * cute_gemm.THREADS * 16 <= 160 << 10, (
            "fits in shared memory with the gate's buffers"
        )
