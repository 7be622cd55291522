"""The operator permute: the row map of every layout, ids of no expert, row limits, and bad input."""

import pytest
import torch
from torch.library import opcheck

from moe_routing_bench.config.expand import cell_of
from moe_routing_bench.workload.draw import draw_ids, generator
from moe_routing_bench.workload.row_map import row_layout, row_map
from moe_routing_kernels import ops
from moe_routing_kernels.errors import UserError
from moe_routing_kernels.permute import LAYOUTS

torch.set_num_threads(1)
# tokens, experts, top_k, capacity factor
SHAPES = {
    "one_token": (1, 6, 3, 1.0),
    "dropped": (9, 8, 4, 0.5),
    "roomy": (40, 5, 2, 1.25),
    "wide_k": (3, 40, 32, 0.5),
    "all": (7, 4, 4, None),
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", SHAPES)
def test_it_is_the_row_map(name: str, layout: str) -> None:
    """Every element of every output, in a buffer of as many rows as a cell of the benchmark has."""
    tokens, experts, top_k, factor = SHAPES[name]
    factor = 1.5 if factor is None and layout == "padded" else factor
    cell = cell_of("permute", tokens=tokens, experts=experts, top_k=top_k, capacity_factor=factor, layout=layout)
    cell = cell.but(skew=0.8, sampler="plackett_luce")  # less than a config would allow of so few tokens
    ids = draw_ids(cell, generator(17, "cpu")).contiguous()
    capacity = None if factor is None else ops.capacity_of(factor, tokens, top_k, experts)
    rows = ops.RowLayout(tokens, top_k, experts, capacity, layout)
    assert rows == row_layout(cell)
    want = row_map(rows, ids.numpy(), rows.rows)
    for given in (ids, ids.long()):  # which torch.topk gives
        got = ops.permute(given, experts, capacity, layout)
        for name, one in zip(("counts", "offsets", "order", "inverse"), got, strict=True):
            assert one.dtype == torch.int32 and torch.equal(one, torch.from_numpy(getattr(want, name))), name


@pytest.mark.parametrize("layout", LAYOUTS)
def test_ids_of_no_expert_take_no_row(layout: str) -> None:
    """As without these tokens, but for their place: they are counted nowhere, and drop nobody."""
    torch.manual_seed(17)
    ids = torch.stack([torch.randperm(5)[:2] for _ in range(12)]).int()
    none = torch.zeros(12, dtype=torch.bool)
    none[[0, 5, 11]] = True
    spoilt = ids.clone()
    spoilt[none] = torch.tensor([-1, 5], dtype=torch.int32)
    counts, offsets, order, inverse = ops.permute(spoilt, 5, 3, layout)
    only = ops.permute(ids[~none], 5, 3, layout)
    assert torch.equal(counts, only[0]) and torch.equal(offsets, only[1])
    assert (inverse[none] == -1).all() and torch.equal(inverse[~none], only[3])
    taken = order[order >= 0]
    assert torch.equal(inverse.view(-1)[taken.long()], torch.nonzero(order >= 0).view(-1).int())
    assert len(taken) == int(counts.sum()) and not none[taken.long() // 2].any()


@pytest.mark.parametrize("tokens", [1, 2, 3, 64, 65, 66, 67, 130, 200])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_row_limit_is_what_the_worst_routing_needs(layout: str, tokens: int) -> None:
    """Over all loads of three experts with k = 1; a capacity that drops may leave the limit a little high, never low."""
    capacity = tokens
    limit = ops.RowLayout(tokens, 1, 3, capacity, layout).rows
    loads = [(a, b, tokens - a - b) for a in range(tokens + 1) for b in range(tokens + 1 - a)]
    align = {"block64": 64, "block128": 128}.get(layout, 1)
    needed = {one: sum(-(-load // align) * align for load in one) for one in loads}
    worst = max(needed, key=needed.__getitem__)
    assert limit == (3 * tokens if layout == "padded" else needed[worst])
    ids = torch.repeat_interleave(torch.arange(3), torch.tensor(worst)).int().view(-1, 1)
    assert int(ops.permute(ids, 3, capacity, layout)[1][-1]) == limit
    for few in range(1, tokens, 13):
        rows = int(ops.permute(ids, 3, few, layout)[1][-1])
        assert rows <= ops.RowLayout(tokens, 1, 3, few, layout).rows


def test_it_keeps_the_rules_of_torch_library() -> None:
    ids = torch.tensor([[0, 2], [1, 2], [2, 0]], dtype=torch.int32)
    for capacity, layout in ((None, "compact"), (2, "compact"), (2, "padded"), (None, "block64"), (1, "block128")):
        opcheck(torch.ops.moe_routing_kernels.permute.default, (ids, 3, capacity, layout))
    opcheck(torch.ops.moe_routing_kernels.permute.default, (ids.long(), 3, 2, "compact"))


def test_no_tokens() -> None:
    ids = torch.empty(0, 2, dtype=torch.int32)
    counts, offsets, order, inverse = ops.permute(ids, 3)
    assert counts.tolist() == [0, 0, 0] and offsets.tolist() == [0, 0, 0, 0]
    assert order.shape == (0,) and inverse.shape == (0, 2)
    assert ops.permute(ids, 3, 4, "padded")[1].tolist() == [0, 4, 8, 12]


def test_bad_input_is_explained() -> None:
    ids = torch.zeros(5, 2, dtype=torch.int32)
    huge = torch.zeros(1, 1, dtype=torch.int32).expand(2**26, 1)
    for call, what in (
        (
            lambda: ops.permute(ids.short(), 4),
            r"topk_ids: got '\(5, 2\) of torch.int16'; allowed: '?\(T, k\) of torch.int32 or torch.int64",
        ),
        (lambda: ops.permute(ids[0], 4), "topk_ids: got"),
        (lambda: ops.permute(ids, 0), "experts: got 0; allowed: a whole number, at least 1"),
        (lambda: ops.permute(ids, 4, 0), "capacity: got 0"),
        (lambda: ops.permute(ids, 4, layout="padded"), "capacity: got None; .* hint: capacity_of"),
        (lambda: ops.permute(ids, 4, layout="block32"), "layout: got 'block32'; allowed: compact"),
        (lambda: ops.permute(huge, 64, 2**26, "padded"), "rows: got 4294967296; allowed: at most 2130706432"),
    ):
        with pytest.raises(UserError, match=what):
            call()
