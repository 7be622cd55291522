"""The fused router's operands: that lanes fill registers as the tensor core instruction expects, evaluated on the CPU."""

import pytest

pytest.importorskip("cutlass")
import cutlass
import cutlass.cute as cute

from moe_routing_bench.benches.gate.rules import rule_of
from moe_routing_bench.benches.router import cute_router as router
from moe_routing_bench.grid import Cell


def instruction() -> dict[str, dict[tuple[int, int], tuple[int, int]]]:
    """Of each operand: (lane, register) -> (row, column), as CuTe describes m16n8k16."""
    found = {}
    shapes = {"A": (router.ROWS, router.DEPTH), "B": (router.COLUMNS, router.DEPTH), "C": (router.ROWS, router.COLUMNS)}

    @cute.jit
    def host(found: cutlass.Constexpr):
        kind = cute.nvgpu.warp.MmaF16BF16Op(
            cutlass.BFloat16, cutlass.Float32, (router.ROWS, router.COLUMNS, router.DEPTH)
        )
        tiled = cute.make_tiled_mma(kind)
        for name, (rows, columns) in shapes.items():
            layout = getattr(tiled, f"tv_layout_{name}")
            registers = rows * columns // router.WARP
            at = {(t, v): cute.crd2idx((t, v), layout) for t in range(router.WARP) for v in range(registers)}
            found[name] = {place: (index % rows, index // rows) for place, index in at.items()}

    host(found)
    return found


def test_both_operands_hold_the_same_elements_of_h() -> None:
    """Lane l loads 8 elements from 8 * (l % 4) on of row l // 4; each of two products pairs equal elements, each once."""
    known = instruction()
    for half in range(router.LANE // 4):
        left, right = {}, {}
        for lane in range(router.WARP):
            for i in range(4):
                h = lane % router.QUAD * router.LANE + half * 4 + i
                for upper in range(2):
                    row, k = known["A"][lane, router.left_register(i, upper)]
                    assert row == upper * (router.ROWS // 2) + lane // router.QUAD
                    assert left.setdefault(k, h) == h
                column, k = known["B"][lane, i]
                assert column == lane // router.QUAD
                assert right.setdefault(k, h) == h
        assert left == right and len(set(left.values())) == router.DEPTH


def test_sums_are_where_they_are_stored_from() -> None:
    for (lane, register), (row, column) in instruction()["C"].items():
        assert row == register // 2 * (router.ROWS // 2) + lane // router.QUAD
        assert column == lane % router.QUAD * 2 + register % 2


@pytest.mark.parametrize("tokens", [1, 15, 16, 17, 64, 513, 4096, 100_000])
@pytest.mark.parametrize("hidden", [1, 13, 2048, 2880, 7168])
@pytest.mark.parametrize(
    ("experts", "name"), [(1, "llama4"), (60, "softmax_topk"), (256, "deepseek_v3"), (1024, "softmax_topk_renorm")]
)
def test_parts_cover_h_and_warps_their_tokens(tokens: int, hidden: int, experts: int, name: str) -> None:
    form = router.choose(tokens, hidden, experts, rule_of(Cell("router", 0, router=name)))
    part = form.chunks * router.CHUNK
    assert (form.parts - 1) * part < hidden <= form.parts * part, "no part is empty, none is missing"
    assert form.chunks % form.flight == 0
    at_once = router.WARP // form.team * form.each
    assert router.ROWS * form.rows // router.WARPS % at_once == 0, "no warp reaches into the tokens of the next"
    slots = router.tiles_of(experts) + 2 * form.rows
    assert slots * form.flight * router.THREADS * 16 <= 160 << 10, "fits in shared memory beside what the gate needs"
