"""The index arithmetic of the grouped GEMMs with tokens on the N side, traced with numpy in place of the DSL: lanes are arrays."""

import itertools
from types import SimpleNamespace

import numpy as np
import pytest

pytest.importorskip("cutlass")
import torch

from activations import EVERY, GATED
from campaign import sampled
from moe_routing_kernels.activations import activation_of
from moe_routing_kernels.experts.common import activate
from moe_routing_kernels.gemm.sm90 import epilogue, grouped_gemm, schedule, training_epilogue
from moe_routing_kernels.gemm.sm90 import loads as producer
from moe_routing_kernels.gemm.sm90.tile import GROUP, TILE_K, GroupedGemm, Tile
from moe_routing_kernels.ops.reference import activation_gradient

LANES = np.arange(32)


@pytest.fixture
def numbers(monkeypatch):
    """Numpy in place of the DSL; a warp's vote is a set of bits."""
    arch = SimpleNamespace(
        lane_idx=lambda: LANES,
        vote_ballot_sync=lambda votes: int(np.packbits(votes, bitorder="little").view("<u4")[0]),
        popc=int.bit_count,
        make_warp_uniform=lambda value: value,
        rcp_approx=lambda value: 1 / value,
        block_idx_in_cluster=lambda: 0,
    )
    math = SimpleNamespace(exp2=lambda value, fastmath: np.exp2(value))
    replaced = {"min": np.minimum, "max": np.maximum, "select_": np.where}
    for module in (schedule, schedule, epilogue, producer):
        monkeypatch.setattr(module, "cute", SimpleNamespace(arch=arch, math=math))
        monkeypatch.setattr(module, "cutlass", SimpleNamespace(**replaced))
    monkeypatch.setattr(epilogue, "Float32", np.float32)
    monkeypatch.setattr(schedule, "Int32", np.int32)
    monkeypatch.setattr(schedule, "Int32", np.int32)
    return arch


def loads(experts: int, most: int, seed: int) -> np.ndarray:
    """Rows per expert; a third of the experts have none."""
    rng = np.random.default_rng(seed)
    return rng.integers(1, most + 1, experts) * (rng.random(experts) > 1 / 3)


@pytest.mark.parametrize("experts", [2, 8, 31, 32, 33, 60, 300, 1024])
@pytest.mark.parametrize(
    ("most", "tokens", "narrowest", "cluster"),
    [
        (1, 8, 0, 1),
        (20, 8, 0, 1),
        (150, 16, 0, 1),
        (3000, 160, 0, 1),
        (1, 8, 8, 1),
        (150, 16, 8, 1),
        (60, 24, 8, 1),
        (3000, 176, 88, 1),
        (20, 8, 8, 2),
        (3000, 176, 88, 2),
    ],
)
def test_every_tile_once_and_those_that_share_weights_together(numbers, experts, most, tokens, narrowest, cluster):
    """Tiles cover each expert's rows and columns once, GROUP tiles of tokens for the same weights in a row.

    Blocks of a cluster find neighbouring tiles of one expert and one part, the last of which may be empty.
    """
    rows = loads(experts, most, experts)
    gemm = GroupedGemm(184, 352, experts, "swiglu", Tile(1, 1, tokens, narrowest=narrowest, cluster=cluster))
    starts = np.r_[0, rows.cumsum()]
    tiles = -(-rows // (tokens * cluster))
    first_tiles = np.r_[0, tiles.cumsum()]
    total = first_tiles[-1] * gemm.m_tiles
    assert total * cluster <= gemm.most_tiles(int(rows.sum()))
    shown = range(total) if total < 3000 else np.unique(np.random.default_rng(1).integers(0, total, 1500))
    found = []
    for tile in shown:
        for rank in range(cluster):
            numbers.block_idx_in_cluster = lambda rank=rank: rank
            found.append(tuple(map(int, schedule.locate(int(tile), starts, first_tiles, gemm))))
    for first, second in zip(found[::cluster], found[cluster - 1 :: cluster], strict=True):
        assert (first[0], first[3]) == (second[0], second[3]), "of a cluster, the same weights"
        assert cluster == 1 or first[2] <= second[1] <= first[1] + tokens, "neighbours"
    empty = [tile for tile in found if tile[1] >= tile[2]]
    assert all(schedule.n_of(row, end, gemm.tile) == narrowest for _, row, end, _ in empty)
    found = [tile for tile in found if tile not in empty]
    assert len(set(found)) == len(found), "a tile twice"
    for expert, row, end, part in found:
        assert starts[expert] <= row < end <= starts[expert + 1] and (narrowest or end == starts[expert + 1])
        assert (row - starts[expert]) % (8 if narrowest else tokens) == 0
        assert 0 <= part < gemm.m_tiles
        width = schedule.n_of(row, end, gemm.tile)
        assert width in gemm.tile.n_sizes and (not narrowest or width - 8 < max(end - row, narrowest - 7) <= width)
    if total < 3000:
        assert [(expert, part, row) for expert, row, _, part in sorted_in_parts(found)] == [
            (expert, part, begin)
            for expert, count in enumerate(tiles)
            for group in range(0, count * cluster, GROUP)
            for part in range(gemm.m_tiles)
            for begin in begins(starts[expert], rows[expert], count * cluster, tokens, narrowest)[group : group + GROUP]
            if begin < starts[expert + 1]
        ]
        assert not narrowest or sum(end - row for _, row, end, _ in found) == rows.sum() * gemm.m_tiles


def sorted_in_parts(found):
    """Neighbouring tiles of one expert and part in the order of their rows."""
    return [one for _, part in itertools.groupby(found, lambda tile: (tile[0], tile[3])) for one in sorted(part)]


def begins(start, rows, count, tokens, narrowest):
    """First rows of an expert's tiles: every `tokens` rows, or shared in steps of 8, the longer ones first."""
    shared = [8 * len(eights) for eights in np.array_split(np.arange(-(-rows // 8)), max(count, 1))]
    lengths = shared if narrowest else [tokens] * count
    return [start + sum(lengths[:number]) for number in range(count)]


def test_no_block_has_long_tiles_only(numbers):
    """Qwen3's 1024 rows per expert in six tiles, two of which are longer: 132 blocks take every 132nd, 132 being a multiple of 6."""
    gemm = GroupedGemm(768, 2048, 128, "swiglu", Tile(2, 2, 176, pingpong=True, narrowest=88))
    starts, first_tiles = 1024 * np.arange(129), 6 * np.arange(129)
    work = np.zeros(132)
    for tile in range(128 * 6 * gemm.m_tiles):
        _, row, end, _ = schedule.locate(tile, starts, first_tiles, gemm)
        work[tile % 132] += end - row
    assert work.max() / work.mean() < 1.02


def test_the_ring_turns_its_phase(numbers):
    """Three stages: 0, 1, 2, 0 and so on; the phase changes with each round."""
    index, phase, seen = np.int32(0), np.int32(1), []
    for _ in range(7):
        seen.append((int(index), int(phase)))
        index, phase = schedule.advance(index, phase, 3)
    assert seen == [(0, 1), (1, 1), (2, 1), (0, 0), (1, 0), (2, 0), (0, 1)]


@pytest.mark.parametrize("tokens", [8, 16, 24, 144, 192])
def test_gathered_rows_lie_where_tma_would_put_them(tokens):
    """In the swizzle of 128 bytes, bits 4 to 6 of an address are those bits xor bits 7 to 9; every vector is written once."""
    threads = np.arange(128)
    passes = -(-tokens // producer.ROWS)
    rows = threads // 8 + np.arange(passes)[:, None] * producer.ROWS
    places = 2 * (producer.place(threads) + np.arange(passes)[:, None] * (producer.ROWS * TILE_K))
    linear = rows * 128 + threads % 8 * 16
    assert (places == (linear ^ (linear >> 7 & 7) << 4)).all()
    assert sorted(places[rows < tokens]) == list(range(0, tokens * 128, 16))
    assert ((rows < tokens) == (rows - threads // 8 + (threads >= 64) * 8 < tokens)).all(), (
        "halves of the warpgroup are in or out"
    )


@pytest.mark.parametrize(("steps", "stages"), [(1, 3), (3, 3), (4, 3), (12, 5), (32, 4), (7, 24)])
def test_a_skipped_tile_turns_the_ring_as_its_steps_would(numbers, steps, stages):
    for start in range(stages):
        place = stepped = (np.int32(start), np.int32(1))
        for _ in range(steps):
            stepped = schedule.advance(*stepped, stages)
        assert schedule.skip(*place, steps, stages) == stepped


class Barrier:
    """An mbarrier: a phase is over after `count` arrivals, copies that were announced included."""

    def __init__(self, count):
        self.count, self.left, self.phase = count, count, 0

    def arrive(self):
        self.left -= 1
        assert self.left >= 0, "more arrivals than the barrier counts"
        if not self.left:
            self.left, self.phase = self.count, self.phase + 1

    def passed(self, parity):
        return self.phase % 2 != parity


@pytest.mark.parametrize("seed", sampled(range(3), [0]))
@pytest.mark.parametrize("cluster", [1, 2])
@pytest.mark.parametrize(("pingpong", "lag"), [(False, 0), (True, 0), (False, 1), (False, 2)])
def test_the_ring_neither_hangs_nor_shows_what_has_not_come(numbers, pingpong, lag, cluster, seed):
    """Warps that gather, and those that multiply, in any order, each wait and arrival as in the kernel; weights come by parts.

    With a lag the first warpgroup is never more than one lead ahead of the second.
    """
    rng = np.random.default_rng(seed)
    tiles = int(rng.integers(0, 6))
    tokens = int(rng.choice([144, 192]))  # together, 4 stages or 3
    tile = Tile(2, 2, tokens, pingpong, narrowest=tokens // 2, cluster=cluster, lag=lag)
    gemm = GroupedGemm(64, int(rng.integers(4 if lag else 1, 12)) * 64, 2, "", tile, top_k=1)
    stages, steps = gemm.stages, gemm.k_tiles
    blocks, parts = range(cluster), 4 + cluster  # what each gathering warp brings, and each block of the weights
    full = [[Barrier(1 + parts) for _ in range(stages)] for _ in blocks]
    empty = [[Barrier(tile.sharing * cluster) for _ in range(stages)] for _ in blocks]
    held = [[[None] * stages for _ in range(parts)] for _ in blocks]
    reading = [[0] * stages for _ in blocks]
    turns = [[[], []] for _ in blocks]
    copies = [[[] for _ in range(parts)] for _ in blocks]  # on their way, in order

    def load(block, warp):
        index, phase = np.int32(0), np.int32(1)
        for step in range(tiles * steps):
            while not empty[block][index].passed(phase):
                yield
            if warp == 0:
                full[block][index].arrive()
                for other in blocks:
                    copies[other][4 + block].append((index, step))
            copies[block][warp].append((index, step))
            index, phase = schedule.advance(index, phase, stages)
            yield

    def bring(block, part):
        while True:
            if copies[block][part]:
                index, step = copies[block][part].pop(0)
                assert not reading[block][index], "a stage is filled while it is multiplied"
                held[block][part][index] = step
                yield
                full[block][index].arrive()
            yield

    def release(block, index):
        reading[block][index] -= 1
        for other in blocks:
            empty[other][index].arrive()

    def multiply(block, group):
        index, phase, first, stride = np.int32(0), np.int32(0), 0, 1
        turn = turns[block]
        if pingpong:
            stride = 2
            if group == 1:
                first, (index, phase) = 1, schedule.skip(index, phase, steps, stages)
                turn[0].append(group)
        for tile_number in range(first, tiles, stride):
            while pingpong and not turn[group]:
                yield
            while lag and group == 1 and not turn[0]:
                yield
            if pingpong or (lag and group == 1):
                turn[group if pingpong else 0].pop()
            previous = None
            for k in range(steps):
                while not full[block][index].passed(phase):
                    yield
                reading[block][index] += 1
                yield
                assert [part[index] for part in held[block]] == [tile_number * steps + k] * parts
                if group == 0 and k == lag - 1:
                    turn[0].append(group)
                    assert len(turn[0]) == 1
                if previous is not None:
                    release(block, previous)
                previous, (index, phase) = index, schedule.advance(index, phase, stages)
            if pingpong:
                turn[1 - group].append(group)
                assert len(turn[1 - group]) == 1
            yield
            release(block, previous)
            if pingpong:
                index, phase = schedule.skip(index, phase, steps, stages)

    running = [load(block, warp) for block in blocks for warp in range(4)]
    running += [multiply(block, group) for block in blocks for group in range(2)]
    memory = [bring(block, part) for block in blocks for part in range(parts)]
    weights, turn = 0.05 + rng.random(len(running) + len(memory)), 0
    while running:
        able = [*running, *memory]
        chances = weights[: len(able)] / weights[: len(able)].sum()
        chosen = able[rng.choice(len(able), p=chances)]
        if next(chosen, "over") == "over":
            running.remove(chosen)
        turn += 1
        assert turn < 400_000, "hangs"


@pytest.mark.parametrize("activation", EVERY)
def test_activations_are_those_of_torch(numbers, activation):
    """Between -12 and 12, and at every pair of a limit, its neighbours, infinities and NaN."""
    gate, up = pairs(activation)
    wanted = activate(activation, torch.cat([gate, up], -1) if activation_of(activation).gated else gate)
    with np.errstate(all="ignore"):
        got = epilogue.activate(gate.numpy(), up.numpy(), activation)
    assert np.allclose(got, wanted.numpy(), rtol=2e-6, atol=1e-5, equal_nan=True)
    assert epilogue.activate(gate, None, "") is gate


@pytest.mark.parametrize("activation", GATED)
def test_slopes_are_those_of_torch(numbers, activation, monkeypatch):
    """The gradients of gate and up, none beyond a limit, and what was activated again."""
    for name in ("cute", "cutlass", "Float32"):
        monkeypatch.setattr(training_epilogue, name, getattr(epilogue, name))
    gate, up = pairs(activation)
    grad = torch.linspace(0.5, 2, len(gate))[:, None]
    preact = torch.cat([gate, up], -1)
    with np.errstate(all="ignore"):
        *got, value = training_epilogue.derive(gate.numpy(), up.numpy(), grad.numpy(), activation)
    plain = (preact.abs() < 1e3).all(1)  # else 0 times infinity may be met sooner
    wanted = activation_gradient(activation, preact, grad)[plain]
    assert np.allclose(np.concatenate(got, 1)[plain], wanted.numpy(), rtol=1e-5, atol=1e-5)
    assert np.allclose(value, activate(activation, preact).numpy(), rtol=2e-6, atol=1e-5, equal_nan=True)
    limit = activation_of(activation).limit
    if limit is not None:
        assert not got[0][(gate > limit).numpy()].any() and not got[1][(up.abs() > limit).numpy()].any()


def pairs(activation):
    """Gates and ups (n, 1) in float32: a line of them, and every pair of special values."""
    limit = np.float32(activation_of(activation).limit or 7.0)
    near = [np.nextafter(at, to) for at in (limit, -limit) for to in (np.float32(-np.inf), np.float32(np.inf))]
    special = torch.tensor([limit, -limit, *near, 0.0, 1.5, np.inf, np.nan])
    line = torch.stack([torch.linspace(-12, 12, 301), torch.linspace(12, -12, 301) * 0.9], 1)
    both = torch.cat([line, torch.cartesian_prod(special, special)])
    if activation == "geglu":  # torch's value is 0 from -6 down, which times infinity is NaN
        both = both[~both[:, 1].isinf()]
    return both[:, :1], both[:, 1:]


@pytest.mark.parametrize("activation", ["swiglu_oai", ""])
@pytest.mark.parametrize(
    "tile",
    [
        Tile(2, 2, 24),
        Tile(1, 2, 24),
        Tile(2, 2, 24, pingpong=True),
        Tile(1, 1, 24),
        Tile(2, 2, 16, by_warp=True),
    ],
)
def test_a_bias_is_that_of_the_row_of_weights(numbers, activation, tile, monkeypatch):
    """Row 16 w + 8 h + l / 4 of an MMA is that of a thread's half h in warp w: of 16 gated ones, 8 gates lie above their ups.

    Where warps store by themselves, 64 gates do.
    """
    columns = 192 if tile.by_warp else 200
    gemm = GroupedGemm(columns, 64, 2, activation, tile, biased=True)
    places = []
    for column in range(0, gemm.m_tiles * gemm.width * tile.sharing, gemm.width):
        for m_atom in range(tile.m_atoms):
            for warp in range(4):
                monkeypatch.setattr(epilogue.cute.arch, "warp_idx", lambda warp=warp: 4 + warp, raising=False)
                for half in range(2):
                    of_row, place = epilogue.bias_of(column, m_atom, half, gemm)
                    row = m_atom * 64 + warp * 16 + half * 8 + LANES // 4
                    gates = 64 if gemm.blocked else 8
                    if gemm.gated:
                        assert (of_row == column + row // (2 * gates) * gates + row % gates).all()
                        assert (place == of_row + (row // gates % 2) * columns).all()
                    else:
                        assert (of_row == column + row).all() and (place == of_row).all()
                    places += list(place[of_row < columns][::4])
    assert sorted(places) == list(range(2 * columns if gemm.gated else columns)), "every bias once"


def test_accumulators_become_pairs_of_the_result(numbers):
    """Rows r and r + 8 of an MMA are a gate and its up of a gated GEMM, else two rows of the result."""
    acc = np.arange(2 * 2 * 3 * 2, dtype=np.float32).reshape(2, 2, 3, 2)
    plain = epilogue.activated(acc, GroupedGemm(64, 64, 2, "", Tile(2, 1, 24)))(1, 2)
    assert plain == [(acc[0, 0, 2, 1], acc[1, 0, 2, 1]), (acc[0, 1, 2, 1], acc[1, 1, 2, 1])]
    (gated,) = epilogue.activated(acc, GroupedGemm(64, 64, 2, "swiglu", Tile(2, 1, 24)))(1, 2)
    for token in range(2):
        gate, up = acc[token, 0, 2, 1], acc[token, 1, 2, 1]
        assert gated[token] == pytest.approx(gate / (1 + np.exp(-gate)) * up)


@pytest.mark.parametrize("activation", ["swiglu", ""])
def test_a_warp_stores_its_own_columns(numbers, activation, monkeypatch):
    """What its blocks bring to shared memory and back: each row and column once, from the accumulators that are theirs; banks as without conflicts.

    `stmatrix` writes 8 numbers of a matrix's column for each of 8 addresses, and lane l has rows l / 4 of columns 2 (l % 4) and the next.
    """
    gemm = GroupedGemm(192, 64, 2, activation, Tile(2, 2, 32, by_warp=True))
    monkeypatch.setattr(epilogue, "activate", lambda gate, up, _: gate if up is None else (gate, up))
    atoms = 1 if gemm.gated else 2
    written = {}
    for warp, m_atom, sixteen in itertools.product(range(4), range(atoms), range(2)):
        acc = np.array(  # rows of weights and tokens, by thread
            [
                [[[[(64 * atom + 16 * warp + 8 * half + lane // 4, 8 * n + 2 * (lane % 4) + token) for atom in range(2)]
                   for n in range(4)] for half in range(2)] for token in range(2)]
                for lane in range(32)
            ]
        )  # fmt: skip
        buffer = {}
        for q in range(4):
            for lane in range(32):
                found = [
                    pair
                    for n in range(2)
                    for pair in epilogue.activated(Tuples(acc[lane]), gemm)(m_atom, 2 * sixteen + n)
                ][q]
                for value, token in zip(found, range(2), strict=True):
                    address = epilogue.place_of(*first_of_matrix(8 * q + 2 * (lane % 4) + token)) + lane // 4
                    buffer[address] = value
        assert sorted(buffer) == list(range(epilogue.WARP_BUFFER)), "each place once"
        for lane in range(32):
            at = epilogue.place_of(lane // 2, lane % 2)
            row, column = sixteen * 16 + lane // 2, 16 * warp + lane % 2 * 8 + 64 * m_atom
            written |= {(row, column + i): buffer[at + i] for i in range(8)}
    assert len(written) == 32 * 64 * atoms
    for (row, column), value in written.items():
        assert value == (((column, row), (64 + column, row)) if gemm.gated else (column, row))
    for first in range(0, 32, 8):  # 8 lanes, 16 bytes each
        assert len({epilogue.place_of(*first_of_matrix(lane)) // 8 % 8 for lane in range(first, first + 8)}) == 8
        assert len({epilogue.place_of(lane // 2, lane % 2) // 8 % 8 for lane in range(first, first + 8)}) == 8


class Tuples:
    """Accumulators that are pairs (row of weights, token)."""

    def __init__(self, values):
        self.values = values

    def __getitem__(self, place):
        return tuple(map(int, self.values[place]))


def first_of_matrix(lane):
    """The token and the half of the columns whose place lane 8 q + i gives: of the i-th address of the q-th matrix."""
    return lane // 16 * 8 + lane % 8, lane // 8 % 2


@pytest.mark.parametrize(("by_warp", "run"), [(False, 8), (True, 64)])
def test_gates_and_ups_take_turns_as_the_tensor_map_sees_them(monkeypatch, by_warp, run):
    """Rows of w13, 192 gates and 192 ups, in the order of a tile's rows: 8 gates and their 8 ups, or 64 and 64."""
    gemm = GroupedGemm(192, 64, 2, "swiglu", Tile(2, 2, 16, by_warp=by_warp))
    monkeypatch.setattr(grouped_gemm, "cute", SimpleNamespace(make_layout=lambda shape, stride: (shape, stride)))
    ((least, two, more), *others), (strides, *_) = grouped_gemm.weight_layout(gemm)
    assert others == [64, 2] and (least, two, more) == (run, 2, 192 // run)
    rows = [
        i * strides[0] + j * strides[1] + n * strides[2] for n in range(more) for j in range(2) for i in range(least)
    ]
    assert rows == [64 * (row // (2 * run) * run + row % run + row // run % 2 * 192) for row in range(384)]


@pytest.mark.parametrize(
    ("tile", "width", "parts", "chunk"),
    [
        (Tile(2, 2, 144), 64, 6, 48),
        (Tile(2, 2, 160), 64, 6, 40),
        (Tile(1, 1, 8), 32, 24, 8),
        (Tile(1, 2, 64), 32, 12, 64),
        (Tile(1, 2, 112), 32, 12, 56),
    ],
)
def test_sizes_of_a_gated_product(tile, width, parts, chunk):
    gemm = GroupedGemm(768, 2048, 128, "swiglu", tile)
    assert (gemm.width, gemm.m_tiles, gemm.epi_tokens) == (width, parts, chunk)
    assert gemm.epi_pitch // 8 % 2 == 1, "an odd number of 16 bytes"
    assert gemm.stage_bytes == (tile.m + tile.tokens) * 128
    assert gemm.threads == 128 * (1 + tile.warpgroups)


@pytest.mark.parametrize(
    ("tile", "gated", "plain"),
    [
        (Tile(2, 2, 192, True), (64, 5), (32, 5)),
        (Tile(2, 2, 176, True), (16, 5), (16, 5)),
        (Tile(2, 2, 160, True), (40, 5), (40, 5)),
        (Tile(2, 2, 128, True), (64, 6), (64, 5)),
        (Tile(2, 2, 144), (48, 4), (24, 4)),
        (Tile(2, 2, 160), (40, 4), (16, 4)),
    ],
)
def test_chunks_leave_room_for_a_stage_more(tile, gated, plain):
    """As (chunk, stages) of a gemm with 128 or 64 rows of weights per column of the result."""
    up, down = GroupedGemm(768, 2048, 128, "swiglu", tile, 8), GroupedGemm(2048, 768, 128, "", tile)
    assert [(gemm.epi_tokens, gemm.stages) for gemm in (up, down)] == [gated, plain]
    assert tile.m == (128 if tile.pingpong else 256) and up.m_tiles == 768 // (up.width * tile.sharing)
    for gemm in (up, down):
        assert 128 * gemm.registers[0] + 256 * gemm.registers[1] == 384 * 168, "those that the kernel starts with"


@pytest.mark.parametrize(("top_k", "arrivals"), [(0, 1), (8, 1 + 128)])
def test_who_arrives_when_a_stage_has_come(top_k, arrivals):
    """The thread that asks TMA, and each thread that gathers."""
    assert GroupedGemm(768, 2048, 128, "swiglu", Tile(2, 2, 144), top_k).arrivals == arrivals


def test_sizes_of_a_plain_product():
    gemm = GroupedGemm(2048, 768, 128, "", Tile(2, 2, 144))
    assert (gemm.width, gemm.m_tiles, gemm.gated, gemm.tile.m) == (128, 8, False, 256)
