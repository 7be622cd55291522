"""Input and output sets: which draw a set holds, how many there are on a GPU, and which bytes nobody may write."""

import itertools
from types import SimpleNamespace

import pytest
import torch

from moe_routing_bench.benches.bench import find
from moe_routing_bench.benches.checks import Cost
from moe_routing_bench.config.expand import cell_of
from moe_routing_bench.grid.cell import Job, Settings
from moe_routing_bench.measure import memory, token_rows
from moe_routing_bench.measure.inputs import Sets
from moe_routing_bench.workload.draw import again

CELL = cell_of("pack", tokens=4, hidden=3, experts=2, top_k=1, seed=5)
CACHE = 1000  # bytes


class Doubled:
    """y = 2 x for x (4, 3) float32 that is the seed everywhere; ids (5,) int32 are read too, and w (3,) float16 is shared."""

    def __init__(self) -> None:
        self.seeds: list[int] = []

    def shared(self, cell, seed, device):
        assert (cell, seed) == (CELL, 5) and device in ("cpu", "cuda")
        return {"w": torch.tensor([1.0, 2.0, 3.0], dtype=torch.float16)}

    def build(self, cell, seed, device):
        assert cell == CELL and device in ("cpu", "cuda")
        self.seeds.append(seed)
        return {"x": torch.full((4, 3), float(seed)), "ids": torch.arange(5, dtype=torch.int32)}

    def reference(self, cell, inputs):
        assert cell == CELL and inputs.keys() == {"x", "ids", "w"}
        return {"y": 2 * inputs["x"]}

    def empty_outputs(self, cell, inputs):
        assert cell == CELL
        return {"y": torch.empty(4, 3), "count": torch.empty(2, dtype=torch.int32)}

    def cost(self, cell, inputs, outputs, expected):
        assert (
            cell == CELL
            and inputs.keys() == {"x", "ids", "w"}
            and outputs.keys() == {"y", "count"}
            and expected.keys() == {"y"}
        )
        return Cost(read_bytes=74, write_bytes=56)


def made(device: str = "cpu", definition: object = None, **settings) -> Sets:
    job = SimpleNamespace(cell=CELL, settings=Settings(**{"check_seeds": 2} | settings))
    return Sets(job, definition or Doubled(), device)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU's L2 cache, of 1000 bytes."""
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    known = {0: SimpleNamespace(L2_cache_size=CACHE)}
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: known[device])


def test_draws_and_sets() -> None:
    """As many sets as seeds on a CPU, 1000 apart; one draw of a seed that nobody knows."""
    definition = Doubled()
    sets = made(definition=definition, check_seeds=3)
    assert definition.seeds == [5, 1005, 2005, again(5, sets.nonce)] and 0 <= sets.nonce < 2**31
    assert len(sets) == 3 and sets.draws == 3 and made().nonce != made().nonce and len(made(check_seeds=1)) == 1
    assert [float(one["x"][3, 2]) for one in sets.inputs] == [5, 1005, 2005]
    assert all(one["ids"].tolist() == [0, 1, 2, 3, 4] and one["w"].tolist() == [1, 2, 3] for one in sets.inputs)
    assert {(one["y"].shape, one["y"].dtype, one["count"].dtype) for one in sets.outputs} == {
        ((4, 3), torch.float32, torch.int32)
    }
    assert [float(sets.draw_of(i).expected["y"][0, 0]) for i in range(5)] == [10, 2010, 4010, 10, 2010]
    assert sets.cold(1) is None, "nothing is known of a CPU's caches"


@pytest.mark.parametrize(
    ("settings", "count"),
    [
        ({}, 69),  # 74 bytes read, 6 of them weights: 5000 / 74, rounded up, and one
        ({"set_limit": 10}, 10),
        ({"set_bytes": 124 * 7 + 123}, 7),  # 48 + 8 bytes written as well
        ({"set_bytes": 1}, 2),  # no fewer than seeds
    ],
)
def test_sets_of_a_gpu(settings, count, gpu) -> None:
    """Until inputs are cold, or a limit; each holds a draw of its own, or all hold the fresh one."""
    sets = made("cuda", **{"set_limit": 999, "set_bytes": 2**30} | settings)
    assert len(sets) == len(sets.outputs) == count
    assert [float(one["x"][0, 0]) for one in sets.inputs] == [5 + 1000 * i for i in range(count)]
    sets.load(sets.fresh)
    assert {float(one["x"][0, 0]) for one in sets.inputs} == {float(sets.fresh[0].inputs["x"][0, 0])}
    assert sets.draws == 1 and sets.draw_of(1) is sets.fresh[0] and sets.damage() is None


@pytest.mark.parametrize(
    ("read", "shared", "count"),
    [
        (74, 0, 75),
        (2500, 40_000, 3),
        (400, 40_000, 14),
        (100, 40_000, 51),
        (2500, 2500, 3),
        (6000, 40_000, 2),
        (10, 40_000, 75),
    ],
)
def test_calls_read_different_weights_until_those_are_cold(read, shared, count, gpu) -> None:
    """Beside large weights 68 bytes of own inputs need no sets of their own."""

    class Weighted(Doubled):
        def shared(self, cell, seed, device):
            return {"w": torch.zeros(shared // 2, dtype=torch.float16)} if shared else {}

        def reference(self, cell, inputs):
            return {"y": 2 * inputs["x"]}

        def cost(self, cell, inputs, outputs, expected):
            return Cost(read_bytes=read, write_bytes=56)

    definition = Weighted()
    sets = made("cuda", definition, set_limit=999, set_bytes=2**30)
    assert sets.draws == len(sets) == count
    assert definition.seeds == [*(5 + 1000 * i for i in range(count)), again(5, sets.nonce)]


def test_a_call_reads_what_the_sets_read_in_the_mean(gpu) -> None:
    """Draws choose other experts, of which they read the weights."""

    class Routed(Doubled):
        def cost(self, cell, inputs, outputs, expected):
            assert float(expected["y"][0, 0]) == 2 * float(inputs["x"][0, 0])
            return Cost(read_bytes=74 if inputs["x"][0, 0] == 5 else 174, write_bytes=56)

    assert made("cuda", Routed(), set_limit=5, set_bytes=2**30).cost == Cost(read_bytes=154, write_bytes=56)


def known_sets(read: int = 0, draws: int = 1, shared: int = 0) -> Sets:
    """Sets of which only the traffic of a call, the draws and the bytes that all share are known."""
    sets = object.__new__(Sets)
    sets.cost, sets._loaded = SimpleNamespace(read_bytes=read), [None] * draws
    sets._shared = {"w": (torch.empty(shared, dtype=torch.uint8, device="meta"), 0)}
    return sets


@pytest.mark.parametrize(("count", "cold"), [(1, False), (2, False), (3, True), (9, True)])
def test_cold_is_four_times_the_cache(count, cold, gpu) -> None:
    """400 bytes of input are 1536 with their guards, and 3 times as much are more than 4000."""
    sets = known_sets()
    sets._inputs = {"x": memory.Guarded(torch.empty(100, device="meta"), 9)}
    assert sets.cold(count) is cold


@pytest.mark.parametrize(
    ("read", "draws", "shared", "count", "cold"),
    [
        (4000, 3, 3000, 3, True),
        (4000, 3, 2900, 3, False),
        (1334, 3, 9000, 3, True),
        (1333, 3, 9000, 3, False),
        (2000, 3, 9000, 1, False),
        (4000, 1, 9000, 9, True),
    ],
)
def test_weights_that_all_sets_share_are_cold_by_what_is_read_of_them(read, draws, shared, count, cold, gpu) -> None:
    """By the calls of different draws, and never more than there is: 1024 bytes of an own input and those of the weights."""
    sets = known_sets(read, draws, shared)
    sets._inputs = {"x": SimpleNamespace(whole=torch.empty((1, 1024), dtype=torch.uint8, device="meta"))}
    assert sets.cold(count) is cold


def test_cold_counts_every_input(gpu) -> None:
    """Two of 1024 bytes with their guards: 4096 are enough for two sets, and exactly 4000 are."""
    sets = known_sets()
    sets._inputs = {n: memory.Guarded(torch.empty(0, device="meta"), 4) for n in ("a", "b")}
    assert [one.whole.shape for one in sets._inputs.values()] == [(4, 1024)] * 2
    assert not sets.cold(1) and sets.cold(2)
    sets._inputs = {"a": SimpleNamespace(whole=torch.empty((5, 1000), device="meta"))}
    assert not sets.cold(3) and sets.cold(4)


def test_guards_lie_on_both_sides() -> None:
    """512 bytes before a tensor, where every alignment begins, and at least as many after it; a write to any of them is seen."""
    for like in (torch.empty(3, 5), torch.empty(512, dtype=torch.uint8), torch.empty(0)):
        one = memory.Guarded(like, 3)
        nbytes = like.numel() * like.element_size()
        places = (
            [t.data_ptr() - one.whole.data_ptr() for t in one.tensors]
            if nbytes
            else [512 + i * one.whole.shape[1] for i in range(3)]
        )
        stride = one.whole.shape[1]
        assert stride == 512 * (2 + -(-nbytes // 512)) and places == [512, 512 + stride, 512 + 2 * stride]
        assert [t.shape for t in one.tensors] == [like.shape] * 3 and one.tensors[0].dtype == like.dtype
        flat = one.whole.view(-1)
        for place in places:
            for beside in (place - 512, place - 1, place + nbytes, place + nbytes + 511):
                assert one.intact() and flat[beside] == 0xA5
                flat[beside] = 0
                assert not one.intact()
                one.mend()
        flat[places[1] : places[1] + nbytes] = 7
        assert one.intact(), "the tensor itself may be written"


def test_poison_is_no_answer() -> None:
    """NaN, or an index far out of range; the guards keep what they hold."""
    sets = made()
    sets.poison()
    assert all(one["y"].isnan().all() and (one["count"] == 0x40404040).all() for one in sets.outputs)
    assert sets.damage() is None
    buffers = {"a": torch.zeros(3, dtype=torch.bfloat16), "b": torch.zeros(2, 2, dtype=torch.int64)}
    memory.poison(buffers)
    assert buffers["a"].isnan().all() and (buffers["b"] == 0x4040404040404040).all()


def test_near_is_the_first_draw_but_for_a_few_tokens(monkeypatch) -> None:
    """An eighth of them, at least one; of numbers alone, where there are any. It has its own reference, and no set of its own."""
    monkeypatch.setattr(memory, "some", lambda count, of: list(range(of))[-count:])
    sets = made()
    ((drawn,), fresh) = sets.near, float(sets.fresh[0].inputs["x"][0, 0])
    assert drawn.inputs["x"][:, 2].tolist() == [5, 5, 5, fresh] and drawn.expected["y"][3, 0] == 2 * fresh
    assert drawn.inputs["ids"].tolist() == [0, 1, 2, 3, 4] and drawn.inputs["w"] is sets.inputs[0]["w"]
    assert float(sets.base[0].inputs["x"].max()) == 5
    rows = {"a": torch.zeros(16, 3, dtype=torch.int32), "b": torch.zeros(16, dtype=torch.int64), "c": torch.zeros(3)}
    found = token_rows.mixed(rows, {name: one + 1 for name, one in rows.items()}, 16)
    assert found.keys() == {"a", "b"} and found["b"].tolist() == [0] * 14 + [1] * 2
    assert found["a"].tolist() == [[0] * 3] * 14 + [[1] * 3] * 2 and not rows["a"].any()
    sideways = token_rows.mixed({"a": torch.zeros(3, 16).T}, {"a": torch.ones(16, 3)}, 16)["a"]
    assert sideways.is_contiguous() and sideways.sum() == 6, "in the order in which they are loaded"
    rows |= {"d": torch.zeros(32, 3), "e": torch.zeros(32, 2), "f": torch.zeros(24)}
    found = token_rows.mixed(rows, {name: one + 1 for name, one in rows.items()}, 16)
    assert found.keys() == {"d", "e"}, "rows of experts, and their scales"
    assert found["d"].sum(1).tolist() == [0] * 28 + [3] * 4 and found["e"].sum(1).tolist() == [0] * 28 + [2] * 4
    assert token_rows.mixed(rows | {"g": torch.zeros(16)}, rows | {"g": torch.ones(16)}, 16).keys() == {"g"}


def test_what_nobody_can_foresee() -> None:
    assert sorted(memory.some(9, 5)) == [0, 1, 2, 3, 4] and len(set(memory.some(4, 100))) == 4
    assert len({tuple(memory.some(4, 100)) for _ in range(5)}) > 1


def test_scars_are_a_few_whole_elements() -> None:
    """The same ones in all sets; guards and inputs are as they were."""
    sets = made()
    for one in sets.outputs:
        one["y"].zero_(), one["count"].zero_()
    sets.scar(sets.places())
    assert all(one["y"].isnan().all() and (one["count"] == 0x40404040).all() for one in sets.outputs), (
        "12 and 2 elements"
    )
    wide = torch.zeros(2, 50, dtype=torch.float64)
    rows = wide.view(torch.uint8)
    memory.scar(rows, wide[0], memory.places(rows, wide[0]))
    scars = wide.isnan()
    assert scars.sum(1).tolist() == [16, 16] and scars[0].equal(scars[1]) and not wide[~scars].any()
    empty = rows[:, :0], wide[0, :0]
    memory.scar(*empty, memory.places(*empty))  # a tensor without elements has nothing to scar
    assert sets.damage() is None


def test_what_is_written_since_is_seen_on_a_cpu() -> None:
    sets = made()
    sets.poison()
    copies = sets.copied()
    assert not sets.written_since(copies) and not sets.written_since(None)
    sets.outputs[1]["count"][1] = 7
    assert sets.written_since(copies)


def test_what_is_timed_is_put_back() -> None:
    sets = made()
    sets.load(sets.near)
    sets.restore()
    assert sets.draws == 2 and [float(one["x"][3, 2]) for one in sets.inputs] == [5, 1005]
    sets.inputs[0]["x"].zero_()
    sets.restore()
    assert float(sets.inputs[0]["x"].max()) == 0, "it was loaded already"


def changed_and_restored(one: Sets) -> None:
    one.inputs[1]["x"].add_(1).sub_(1)


@pytest.mark.parametrize(
    ("harm", "text"),
    [
        (lambda one: one.inputs[1]["x"][3, 2].fill_(0), "inputs were changed: x"),
        (lambda one: (one.inputs[0]["ids"].zero_(), one.inputs[1]["x"].zero_()), "inputs were changed: x, ids"),
        (lambda one: one.inputs[0]["w"][0].fill_(9), "inputs were changed: w"),
        (changed_and_restored, "inputs were written, if only to restore them: x"),
        (lambda one: one.inputs[0]["w"].add_(0), "inputs were written, if only to restore them: w"),
        (lambda one: one._outputs["y"].whole[1, 511].fill_(0), "bytes next to a tensor were written: y"),
        (
            lambda one: (one._inputs["x"].whole[0, 600].fill_(0), one._outputs["count"].whole[0, 0].fill_(0)),
            "bytes next to a tensor were written: x, count",
        ),
        (lambda one: (one._inputs["x"].whole[0, 600].fill_(0), one.inputs[0]["w"].zero_()), "inputs were changed: w"),
    ],
)
def test_damage_is_said_and_mended(harm, text) -> None:
    """The worst of it; afterwards everything is as it was."""
    sets = made()
    assert sets.damage() is None
    harm(sets)
    assert sets.damage() == text
    assert sets.damage() is None
    assert [float(one["x"].min()) for one in sets.inputs] == [5, 1005] and sets.inputs[0]["w"].tolist() == [1, 2, 3]
    assert sets.inputs[0]["ids"].tolist() == [0, 1, 2, 3, 4]


def test_outputs_are_free_to_write() -> None:
    sets = made()
    for one in sets.outputs:
        one["y"].fill_(1), one["count"].fill_(2)
    assert sets.damage() is None


@pytest.mark.parametrize("compared", [1, 100, 1 << 28])
def test_sets_of_one_draw_are_compared_bit_by_bit(compared, gpu, monkeypatch) -> None:
    """Seven sets of two draws: 0, 2, 4, 6 and 1, 3, 5; in parts of any size."""
    monkeypatch.setattr(memory, "_COMPARED", compared)
    sets = made("cuda", set_limit=7, set_bytes=2**30)
    sets.load(sets.base[:2])
    for i, one in enumerate(sets.outputs):
        one["y"].fill_(float("nan")), one["count"].fill_(i % 2)
    assert sets.unlike(0).tolist() == [False] * 4 and sets.unlike(1).tolist() == [False] * 3
    sets.outputs[4]["y"][3, 2] = 0.0
    sets.outputs[5]["count"][1] = 7
    assert sets.unlike(0).tolist() == [False, False, True, False] and sets.unlike(1).tolist() == [False, False, True]
    assert sets.unlike(4).tolist() == [True, True, False, True], "of set 4, not of the first of its draw"


def test_tensors_of_no_bytes_are_alike() -> None:
    one = memory.Guarded(torch.empty(0, 4), 3)
    assert one.unlike(one.rows(0, 3)[0], 0, 1).tolist() == [False] * 3


ROWS = 1_000_003  # what a row of a checksum counts more than a column


@pytest.mark.parametrize(
    ("tensor", "total"),
    [
        (
            torch.tensor([255, 254], dtype=torch.uint8),
            255 + 2 * 254 + 509 * 2 * ROWS,
        ),  # no whole word: a row of its own
        (torch.tensor([1, 0, 0, 0, 7], dtype=torch.uint8), 1 + ROWS + 7 + 7 * 2 * ROWS),
        (torch.tensor([1.0, 1.0], dtype=torch.float16), (1 + ROWS) * 0x3C003C00),
        (torch.tensor([1.0] * 3), (1 + 2 + 3 + 3 * ROWS) * 0x3F800000),  # more than 32 bits hold
        (torch.tensor([2**40, 1]), 256 * 2 + 3 + (256 + 1) * ROWS),
        (
            torch.zeros(4100, dtype=torch.int32).index_fill(0, torch.tensor([1023, 1024, 4099]), 1),
            1024 + 1 + 4 + (1 + 2 + 5) * ROWS,
        ),
        (torch.tensor([0, 255, 254], dtype=torch.uint8)[1:], 255 + 2 * 254 + 509 * 2 * ROWS),
        (torch.arange(6, dtype=torch.uint8)[1:], 1 + 4 + 9 + 16 + 25 + 15 * 2 * ROWS),  # words do not begin there
    ],
)
def test_the_checksum_is_of_bits_and_their_places(tensor, total) -> None:
    """Columns and rows of 1024 words of 4 bytes are counted from 1."""
    assert memory.checksum(tensor) == total


@pytest.mark.parametrize("dtype", [torch.uint8, torch.bfloat16, torch.float32, torch.int64])
def test_the_checksum_needs_little_memory(dtype, monkeypatch) -> None:
    """It is the same in parts of any size, past 64 bits too, and never makes 64 bits of more than a part."""
    tensor = torch.full((7, 1000), -(2**62) if dtype == torch.int64 else 3).to(dtype)
    total = memory.checksum(tensor)
    largest, summed = [], torch.Tensor.sum
    monkeypatch.setattr(
        torch.Tensor, "sum", lambda part, *at, **how: largest.append(part.numel()) or summed(part, *at, **how)
    )
    for elements in (1, 1024, 2047, 2048, 7000, 7168, 9000):
        monkeypatch.setattr(memory, "_COMPARED", 8 * elements)
        largest.clear()
        assert memory.checksum(tensor) == total
        assert max(largest) <= max(1024, elements)
    assert memory.checksum(tensor[:0]) == 0


@pytest.mark.parametrize("places", [(0, 1), (0, 1024), (5, 2048 + 7), (3000, 3001)])
def test_who_only_moves_weights_is_seen(places) -> None:
    """As who lays them out for a kernel of its own, in place; by `data` torch does not count it as a write."""

    class Large(Doubled):
        def shared(self, cell, seed, device):
            return {"w": torch.arange(3002, dtype=torch.float32)}

    sets = made(definition=Large())
    w, (one, other) = sets.inputs[0]["w"], places
    w.data[[one, other]] = w[[other, one]].clone()
    assert sets.damage() == "inputs were changed: w" and sets.damage() is None
    assert w.equal(torch.arange(3002, dtype=torch.float32))


@pytest.mark.parametrize("bench", ["pack", "combine"])
def test_random_loads_have_as_many_rows_in_every_draw(bench: str) -> None:
    """Also of the base draws: of other experts, by other tokens."""
    axes = {
        "tokens": 129,
        "hidden": 8,
        "experts": 16,
        "top_k": 6,
        "skew": 1.2,
        "layout": "block128",
        "capacity_factor": 0.9,
    }
    cell = cell_of(bench, **axes, sampler="plackett_luce", dtype="fp32")
    sets = Sets(Job(cell, ("torch",), Settings(check_seeds=3)), find(bench).definition(), "cpu")
    assert len(sets.base) == 3
    ids = [drawn.inputs["topk_ids"] for drawn in (*sets.base, *sets.fresh)]
    loads = [one.flatten().bincount(minlength=16).sort().values for one in ids]
    assert all(one.equal(loads[0]) for one in loads)
    assert not any(one.equal(other) for one, other in itertools.combinations(ids, 2))


def test_a_bound_tensor_that_is_moved_leaves_what_is_checked_where_it_was() -> None:
    """It is another tensor on the same memory, whose writes are counted."""
    sets = made()
    bound = sets.bound(1)
    assert bound.keys() == {"x", "ids", "w", "y", "count"} and bound["x"].data_ptr() == sets.inputs[1]["x"].data_ptr()
    bound["y"].set_(torch.zeros(4, 3))
    sets.outputs[1]["y"].fill_(3)
    assert float(bound["y"].max()) == 0
    bound["x"].add_(0)
    assert sets.damage() == "inputs were written, if only to restore them: x"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int32, torch.float8_e4m3fn])
def test_a_digest_sees_every_bit_and_its_place(dtype) -> None:
    tensor = torch.arange(1, 9).to(dtype).view(2, 4)
    known = digest(tensor)
    assert known == digest(tensor.clone()) != digest(tensor, 6)
    assert known != digest(tensor.view(torch.uint8).flip(0).view(dtype))
    other = tensor.clone()
    other.view(torch.uint8)[1, -1] ^= 1
    assert known != digest(other)


def digest(tensor: torch.Tensor, key: int = 5) -> int:
    return int(memory.digests(memory.as_bytes(tensor)[None], key))


@pytest.mark.parametrize("size", [0, 5, 16, 8 * (1 << 17), 8 * (1 << 17) + 3])
def test_rows_have_the_digests_that_they_have_alone(size: int) -> None:
    """Wherever they lie, and however many lanes there are at a time; a change of either end is seen."""
    whole = torch.randint(0, 256, (3, size + 512), dtype=torch.uint8)
    whole[2, 256 : 256 + size] = whole[0, 256 : 256 + size]
    rows = whole[:, 256 : 256 + size]
    found = memory.digests(rows, 5).tolist()
    assert found == [digest(row) for row in rows] == [digest(row.clone()) for row in rows] and found[0] == found[2]
    assert found == memory.digests(torch.nn.functional.pad(rows, (3, 0))[:, 3:], 5).tolist()
    for place in {0, size - 1} if size else ():
        rows[2, place] ^= 128
        assert memory.digests(rows, 5).tolist()[2] != found[2]
        rows[2, place] ^= 128


def test_rows_that_collide_by_one_key_do_not_by_another() -> None:
    """An author who knew the key could write other bytes of the same digest: what is added to one lane is taken from another."""
    factors, row = memory._factors(0, torch.device("cpu")), torch.zeros(2, dtype=torch.int64)
    other = row + torch.stack([factors[1], -factors[0]])
    assert digest(row, 0) == digest(other, 0)
    assert all(digest(row, key) != digest(other, key) for key in (1, 5, 2**31))


@pytest.mark.parametrize("size", [5, 16, 8 * (1 << 17), 8 * 5 * (1 << 17) + 40])
def test_digests_of_a_gpu_are_those_of_a_cpu(monkeypatch, size: int) -> None:
    """By products and sums, of two parts of the three rows at a time."""
    rows = torch.randint(0, 256, (3, size + 512), dtype=torch.uint8)[:, 256 : 256 + size]
    known = memory.digests(rows, 5).tolist()
    monkeypatch.setattr(memory, "_has_mv", lambda rows: False)
    monkeypatch.setattr(memory, "_AT_A_TIME", 6 << 20)
    assert memory.digests(rows, 5).tolist() == known


@pytest.mark.parametrize(
    ("tensor", "length"),
    [(torch.zeros(3, 4), 48), (torch.zeros(3, 4)[:, :2], 40), (torch.zeros(4, 3).T, 48), (torch.zeros(0, 4), 0)],
)
def test_the_extent_of_a_tensor_ends_behind_its_last_element(tensor, length) -> None:
    first, end = memory.extent(tensor)
    assert (first, end - first) == (tensor.data_ptr(), length)
