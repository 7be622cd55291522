"""Benches over ranks: what they are, worked out by hand; their implementations in a group of processes; cells through the harness."""

import collections
import functools
import math
import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import rank_processes
from campaign import CAMPAIGN
from moe_routing_bench import api
from moe_routing_bench.benches.checks import tolerance
from moe_routing_bench.benches.ep_exchange import all_to_all, deep_ep
from moe_routing_bench.benches.experts import definition as experts
from moe_routing_bench.benches.ranks import devices, of_rank, parts, shares
from moe_routing_bench.benches.registry import BENCHES
from moe_routing_bench.config.expand import cell_of
from moe_routing_bench.grid.cell import Cell, Job, Settings
from moe_routing_bench.measure import gpus, processes, rank_process, supervisor
from moe_routing_bench.measure.candidate import Failure
from moe_routing_bench.measure.inputs import Sets
from moe_routing_bench.measure.rank_group import RankGroup
from moe_routing_bench.measure.sharing import Arena
from moe_routing_bench.store import records, rows
from moe_routing_kernels.errors import UserError
from packs import no_ceilings

__all__ = ["no_ceilings"]

SIZES = {"hidden": 16, "experts": 8, "top_k": 2, "dtype": "bf16"}
NAMES = ("dispatch", "ep_combine", "ep_pair", "ep_exchange")
LAYERS = ("ep_layer", "ep_training")
QUICK = Settings(
    *(2, 1.0),
    max_seconds=0.1,
    settle_blocks=2,
    interval_us=200,
    samples_per_block=1,
    min_blocks=2,
    max_blocks=3,
    timeout=30,
)
CASES = {  # tokens and ranks; ids of all tokens that no sampler draws
    "even": ({"tokens": 12}, None),
    "skewed": ({"tokens": 37, "skew": 1.0}, None),
    "three to two": ({"tokens": 5}, None),
    "no token on a rank": ({"tokens": 1}, None),
    "all to one rank": ({"tokens": 6}, [4, 7]),
    "all to the same rank": ({"tokens": 6}, [0, 3]),
    "one expert per rank": ({"tokens": 10, "experts": 3, "ranks": 3}, None),
    "all experts of a token on a rank": ({"tokens": 7, "top_k": 4}, [0, 1, 2, 3]),
    "dropped": ({"tokens": 7, "top_k": 4}, [5, -1, 0, 8]),
    "all dropped": ({"tokens": 3}, [-1, 8]),
}


def case(bench: str, name: str) -> tuple[Cell, dict[str, torch.Tensor]]:
    """A cell and its inputs."""
    axes, ids = CASES[name]
    cell = cell_of(bench, **SIZES | axes | ({"intermediate": 8} if bench in LAYERS else {}))
    definition = BENCHES[bench].definition()
    inputs = definition.build(cell, 3, "cpu")
    if bench in LAYERS:
        for each in parts(inputs, "logits") if ids else ():
            each[:, ids] += 20
        return cell, inputs | definition.shared(cell, 3, "cpu")
    for each in parts(inputs, "topk_ids") if ids else ():
        each.copy_(torch.tensor(ids, dtype=torch.int32).expand_as(each))
    if ids and bench == "ep_combine":
        weights = torch.rand(cell.tokens, cell.top_k)
        inputs |= definition.handle(cell, torch.cat(parts(inputs, "topk_ids")), weights)
    return cell, inputs


def test_rows_counts_and_bytes_by_hand() -> None:
    """Three tokens of two elements on two ranks of two experts each; the first rank has one of the tokens, and one choice is of no expert."""
    definition = BENCHES["dispatch"].definition()
    cell = cell_of("dispatch", tokens=3, hidden=2, experts=4, top_k=2, dtype="fp32")
    x = torch.tensor([[1.0, 1], [2, 2], [3, 3]])
    inputs = {"x@0": x[:1], "x@1": x[1:]}
    inputs |= {"topk_ids@0": torch.tensor([[3, 0]]).int(), "topk_ids@1": torch.tensor([[0, 1], [3, 2]]).int()}
    expected = definition.reference(cell, inputs)
    assert [each[:, 0].tolist() for each in parts(expected, "received")] == [[1, 2, 2], [3, 1, 3]]
    assert [each.tolist() for each in parts(expected, "counts")] == [[2, 1], [1, 2]]
    assert definition.traffic(cell, inputs, expected) == {
        "rank_tokens": [1, 2],
        "rank_rows": [3, 3],
        "rank_all_bytes": [16, 32],
        "rank_wire_bytes": [8, 16],
        "rank_deduplicated_bytes": [8, 8],
    }
    cost = definition.cost(cell, inputs, definition.empty_outputs(cell, inputs), expected)
    assert (cost.read_bytes, cost.write_bytes, cost.flops) == (24 + 24, 48 + 16, 0)


def test_sums_and_bytes_of_the_way_back_by_hand() -> None:
    """The rows of the first test, less one that is of no expert: y is 10 times the number of its row, weights are halves."""
    ids = torch.tensor([[3, 0], [0, 1], [3, -1]]).int()
    for name, ways in (("ep_combine", (0, 1)), ("ep_pair", (1, 1))):
        definition = BENCHES[name].definition()
        cell = cell_of(name, tokens=3, hidden=2, experts=4, top_k=2, dtype="fp32")
        inputs = {"topk_ids@0": ids[:1], "topk_ids@1": ids[1:]}
        inputs |= {f"y@{rank}": 10.0 * torch.arange(1, 7)[:, None].expand(6, 2) for rank in range(2)}
        if name == "ep_combine":
            handle = definition.handle(cell, ids, torch.full((3, 2), 0.5))
            assert [each.tolist() for each in parts(handle, "row_tokens")] == [[0, 1, 1, -1, -1, -1], [0, 2] + [-1] * 4]
            inputs |= handle
        else:
            inputs |= {f"{part}@{r}": torch.full((r + 1, 2), 0.5) for part in ("x", "topk_weights") for r in range(2)}
        expected = definition.reference(cell, inputs)
        assert [each[:, 0].tolist() for each in parts(expected, "combined")] == [[10], [25, 10]]
        fields = definition.traffic(cell, inputs, expected)
        out, back = ways
        assert (fields["rank_tokens"], fields["rank_rows"]) == ([1, 2], [3, 2])
        assert fields["rank_all_bytes"] == [16 * out + 24 * back, 24 * out + 16 * back]
        assert fields["rank_wire_bytes"] == [8 * out + 16 * back, 16 * out + 8 * back]
        assert fields["rank_deduplicated_bytes"] == [8 * out + 8 * back] * 2
        cost = definition.cost(cell, inputs, definition.empty_outputs(cell, inputs), expected)
        ranks = {"ep_combine": (40 + 5 * 8 + 24, 24), "ep_pair": (40 + 24 + 24 + 24, 40 + 16 + 24)}
        assert (cost.read_bytes, cost.write_bytes, cost.flops) == (*ranks[name], 0)


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("bench", ["ep_combine", "ep_layer"])
def test_limits_count_what_is_rounded_on_the_way(bench: str, dtype: str) -> None:
    """Sums of float32 have two roundings for each of a token's experts more; in 16 bits the rounding of what travels is far larger."""
    axes = {"tokens": 12} | ({"intermediate": 8} if bench == "ep_layer" else {})
    cell, definition = cell_of(bench, **SIZES | axes | {"dtype": dtype}), BENCHES[bench].definition()
    inputs = definition.build(cell, 3, "cpu")
    inputs |= definition.shared(cell, 3, "cpu") if bench == "ep_layer" else {}
    expected = definition.reference(cell, inputs)
    outputs = definition.empty_outputs(cell, inputs)
    known = parts(expected, "combined") or expected["combined"].split(shares(12, 2))
    for rank, part in enumerate(known):
        outputs[f"combined@{rank}"].copy_(part)
    parts_of_layer = experts.roundings(cell) if bench == "ep_layer" else 0
    roundings = parts_of_layer + 2 + (2 * cell.top_k if dtype == "fp32" else 0)
    found = definition.check(cell, inputs, outputs, expected)
    assert (found.tolerance, found.error) == (tolerance(dtype, roundings), None)


def exchanged() -> tuple[Cell, dict[str, torch.Tensor]]:
    """Three tokens of two elements: one of the first rank, which goes to both, and two of the second, of which the last goes nowhere. Row r of y
    is 10 (r + 1) on the first rank, a hundred times as much on the second."""
    ids = torch.tensor([[3, 0], [0, 1], [-1, 4]]).int()
    weights = torch.arange(1.0, 7).view(3, 2)
    x = torch.tensor([[1.0, 1], [2, 2], [3, 3]])
    y = 10.0 * torch.arange(1, 5)[:, None].expand(4, 2)
    batch = {"x": x, "topk_ids": ids, "topk_weights": weights}
    inputs = {f"{name}@{rank}": part for name, t in batch.items() for rank, part in enumerate((t[:1], t[1:]))}
    cell = cell_of("ep_exchange", tokens=3, hidden=2, experts=4, top_k=2, dtype="fp32")
    return cell, inputs | {"y@0": y, "y@1": 100 * y}


@pytest.mark.parametrize("by_place", [False, True])
def test_an_exchange_by_hand(by_place: bool) -> None:
    """Rows one after the other, or that of token t of rank s at 2 s + t. Nothing of what comes, or of what goes back, may differ."""
    definition = BENCHES["ep_exchange"].definition()
    cell, inputs = exchanged()
    expected = definition.reference(cell, inputs)
    nan, rows = float("nan"), ([0, 2], [0]) if by_place else ([0, 1], [0])
    outputs = {name: tensor.fill_(7) for name, tensor in definition.empty_outputs(cell, inputs).items()}
    for rank, (received, ids, weights) in enumerate(
        [
            ([[1.0, 1], [2, 2]], [[-1, 0], [0, 1]], [[nan, 2.0], [3, 4]]),
            ([[1.0, 1]], [[1, -1]], [[1.0, nan]]),
        ]
    ):
        if by_place:
            outputs[f"received_ids@{rank}"].fill_(-1)
        outputs[f"received@{rank}"][rows[rank]] = torch.tensor(received)
        outputs[f"received_ids@{rank}"][rows[rank]] = torch.tensor(ids).int()
        outputs[f"received_weights@{rank}"][rows[rank]] = torch.tensor(weights)
    outputs["combined@0"].fill_(10 + 1000)
    outputs["combined@1"].copy_(torch.tensor([[30.0 if by_place else 20.0] * 2, [0.0] * 2]))
    assert definition.check(cell, inputs, outputs, expected, by_place=by_place).error is None
    assert definition.check(cell, inputs, outputs, expected, by_place=not by_place).error
    for name, row, value in (
        ("received@0", rows[0][1], 2.5),
        ("received@1", 0, nan),
        ("received_ids@0", rows[0][0], 1),
        ("received_weights@0", rows[0][1], 3.5),
        ("combined@0", 0, 10),
        ("combined@1", 1, 1e-3),
    ):
        kept = outputs[name].clone()
        outputs[name][row] = value
        assert name in (definition.check(cell, inputs, outputs, expected, by_place=by_place).error or ""), name
        outputs[name].copy_(kept)
    outputs["received_ids@1"][2] = 0  # of the token that went to the first rank alone
    found = definition.check(cell, inputs, outputs, expected, by_place=by_place).error
    assert (found is not None) == by_place


def test_bytes_of_an_exchange_by_hand() -> None:
    """In float32: three rows of eight bytes come, one of them from the rank itself."""
    definition = BENCHES["ep_exchange"].definition()
    cell, inputs = exchanged()
    expected = definition.reference(cell, inputs)
    assert definition.traffic(cell, inputs, expected) == {
        "rank_tokens": [1, 2],
        "rank_rows": [3, 1],
        "rank_all_bytes": [16 + 24, 16 + 8],
        "rank_wire_bytes": [8 + 16, 16 + 8],
        "rank_deduplicated_bytes": [8 + 8, 8 + 8],
    }
    cost = definition.cost(cell, inputs, definition.empty_outputs(cell, inputs), expected)
    assert (cost.read_bytes, cost.write_bytes, cost.flops) == (24 + 24 + 24 + 24, 24 + 24 + 24 + 24, 0)


def test_tokens_are_split_evenly_and_experts_must_be() -> None:
    assert (shares(5, 2), shares(1, 4), shares(8, 4)) == ([2, 3], [0, 0, 0, 1], [2] * 4)
    assert cell_of("dispatch", tokens=4, **SIZES).ranks == 2
    with pytest.raises(UserError, match="ranks: got 3; allowed: a divisor of experts=8"):
        cell_of("dispatch", tokens=4, **SIZES, ranks=3)
    with pytest.raises(UserError, match="ranks"):
        cell_of("dispatch", tokens=4, **SIZES, ranks=1)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("bench", NAMES)
def test_a_wrong_row_count_order_or_sum_is_found(bench: str, name: str) -> None:
    cell, inputs = case(bench, name)
    definition = BENCHES[bench].definition()
    outputs, expected = definition.empty_outputs(cell, inputs), definition.reference(cell, inputs)
    compared = {part: want for part, want in expected.items() if part in outputs}
    for part, want in compared.items():
        outputs[part][: len(want)] = want
    assert definition.check(cell, inputs, outputs, expected).error is None
    for part, want in compared.items():
        if want.numel():
            outputs[part][len(want) - 1] += 1
            assert part in (definition.check(cell, inputs, outputs, expected).error or "")
            outputs[part][len(want) - 1] = want[-1]


@pytest.mark.parametrize("bench", LAYERS)
def test_a_wrong_result_or_gradient_of_one_rank_is_found(bench: str) -> None:
    cell, inputs = case(bench, "three to two")
    definition = BENCHES[bench].definition()
    outputs, expected = definition.empty_outputs(cell, inputs), definition.reference(cell, inputs)
    for part, tensor in outputs.items():
        name, _, rank = part.rpartition("@")
        want = expected[name]
        tensor.copy_(want.split([len(each) for each in parts(outputs, name)])[int(rank)])
    assert definition.check(cell, inputs, outputs, expected).error is None
    for part, tensor in outputs.items():
        tensor.mul_(1.5)
        assert part.rpartition("@")[0] in (definition.check(cell, inputs, outputs, expected).error or "")
        tensor.div_(1.5)
    traffic = definition.traffic(cell, inputs, expected)
    assert traffic["rank_tokens"] == [2, 3] and sum(traffic["rank_rows"]) == 5 * cell.top_k
    both_ways = 2 * (2 if bench == "ep_training" else 1)
    assert sum(traffic["rank_all_bytes"]) == both_ways * 5 * cell.top_k * cell.hidden * 2


@pytest.mark.parametrize("ranks", [2, 3])
def test_every_implementation_is_right(ranks: int, tmp_path: Path) -> None:
    """All cases in one group of processes, against the reference of one process; twice, so that nothing depends on what was there."""
    routable = [name for name, (_, ids) in CASES.items() if min(ids or [0]) >= 0 and max(ids or [0]) < 8]  # by logits
    calls = [
        (bench, implementation.name, name)
        for bench in (*NAMES, *LAYERS)
        for implementation in BENCHES[bench].implementations
        if not {"gpu", "nvidia"} & set(implementation.requires)
        for name in (routable if bench in LAYERS else CASES)
        if case(bench, name)[0].ranks == ranks
    ]
    found = rank_processes.called(ranks, tmp_path, functools.partial(_outputs, calls=calls))
    assert all(isinstance(each, list) for each in found), found
    for i, (bench, implementation, name) in enumerate(calls):
        cell, inputs = case(bench, name)
        definition = BENCHES[bench].definition()
        outputs = {f"{part}@{rank}": tensor for rank in range(ranks) for part, tensor in found[rank][i].items()}
        check = BENCHES[bench].check(implementation, cell, inputs, outputs, definition.reference(cell, inputs))
        assert check.error is None, (bench, implementation, name, check.error)


def _outputs(rank: int, calls: list[tuple[str, str, str]]) -> list[dict[str, torch.Tensor]]:
    """The outputs of each call on a rank."""
    found = []
    for bench, implementation, name in calls:
        cell, inputs = case(bench, name)
        outputs = of_rank(BENCHES[bench].definition().empty_outputs(cell, inputs), rank)
        call = BENCHES[bench].bind(implementation, cell, of_rank(inputs, rank) | outputs)
        for _ in range(2):
            for tensor in outputs.values():
                tensor.fill_(77)
            returned = call()
            outputs |= returned if isinstance(returned, dict) else {}
        found.append(outputs)
    return found


class DeepEP:
    """What the adapter uses of the package's `Buffer`, by messages: a stand-in on CPUs."""

    class Config:
        def get_nvl_buffer_size_hint(self, row_bytes: int, ranks: int) -> int:
            return row_bytes * ranks

    get_dispatch_config = get_combine_config = staticmethod(lambda ranks: DeepEP.Config())

    def __init__(self, group: Any, num_nvl_bytes: int) -> None:
        assert num_nvl_bytes == 2 * SIZES["hidden"] * group.size()
        self.ranks, self.rank = group.size(), group.rank()

    def get_dispatch_layout(self, ids: torch.Tensor, experts: int) -> tuple:
        assert ids.dtype == torch.int64
        self.local = experts // self.ranks
        here = torch.where((ids >= 0) & (ids < experts), ids // self.local, -1)
        goes = torch.stack([(here == rank).any(1) for rank in range(self.ranks)], 1)
        to_experts = torch.bincount(ids[(ids >= 0) & (ids < experts)], minlength=experts).int()
        return goes.sum(0).int(), None, to_experts, goes, None

    def dispatch(
        self,
        x,
        *,
        num_tokens_per_rank,
        num_tokens_per_expert,
        is_token_in_rank,
        topk_idx,
        topk_weights,
        num_worst_tokens,
    ) -> tuple:
        every: list[Any] = [None] * self.ranks
        torch.distributed.all_gather_object(every, (x, is_token_in_rank, topk_idx, topk_weights))
        rows, ids, weights = (torch.cat([each[part][each[1][:, self.rank]] for each in every]) for part in (0, 2, 3))
        ids = ids - self.rank * self.local
        ids = torch.where((ids >= 0) & (ids < self.local), ids, -1)
        more = num_worst_tokens - len(rows)
        padded = [torch.nn.functional.pad(each, (0, 0, 0, more), value=-1) for each in (rows, ids, weights)]
        return (*padded, [], [each[1] for each in every], None)

    def combine(self, y: torch.Tensor, goes: list[torch.Tensor]) -> tuple:
        every: list[Any] = [None] * self.ranks
        torch.distributed.all_gather_object(every, y)
        total = torch.zeros(len(goes[self.rank]), y.shape[1])
        for rank, sent in enumerate(every):
            first = sum(int(each[:, rank].sum()) for each in goes[: self.rank])
            tokens = goes[self.rank][:, rank].nonzero()[:, 0]
            total.index_add_(0, tokens, sent[first : first + len(tokens)].float())
        return total.to(y.dtype), None, None


def test_deep_ep_is_asked_for_what_the_bench_defines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the package's interface by messages; its kernels run on GPUs."""
    monkeypatch.setitem(sys.modules, "deep_ep", SimpleNamespace(Buffer=DeepEP))
    names = [name for name in CASES if case("ep_exchange", name)[0].ranks == 2]
    calls = [("ep_exchange", "deep_ep", name) for name in names]
    found = rank_processes.called(2, tmp_path, functools.partial(_outputs, calls=calls))
    assert all(isinstance(each, list) for each in found), found
    for i, name in enumerate(names):
        cell, inputs = case("ep_exchange", name)
        outputs = {f"{part}@{rank}": tensor for rank in range(2) for part, tensor in found[rank][i].items()}
        expected = BENCHES["ep_exchange"].definition().reference(cell, inputs)
        check = BENCHES["ep_exchange"].check("deep_ep", cell, inputs, outputs, expected)
        assert check.error is None, (name, check.error)


@pytest.mark.parametrize(
    ("axes", "said"),
    [
        ({}, None),
        ({"hidden": 8176, "ranks": 8}, None),
        ({"hidden": 8192}, "up to 8176, not 8192"),
        ({"hidden": 7160}, "whole 16s"),
        ({"dtype": "fp16"}, "bf16"),
        ({"experts": 9, "ranks": 3}, "not 3"),
    ],
)
def test_deep_ep_says_what_it_does_not_take(axes: dict[str, Any], said: str | None) -> None:
    cell = cell_of("ep_exchange", **SIZES | {"tokens": 4, "ranks": 2} | axes)
    found = deep_ep.unsupported(BENCHES["ep_exchange"].definition().problem(cell))
    assert found is None if said is None else said in str(found)


@pytest.mark.parametrize(
    "bench",
    [
        "dispatch",
        *(pytest.param(name, marks=CAMPAIGN) for name in ("ep_pair", "ep_exchange", *LAYERS)),
    ],
)
def test_a_cell_is_measured_on_two_processes(no_ceilings, tmp_path: Path, bench: str) -> None:
    """Of one token, so that the first rank has none. The row says what each rank had, and can be stored."""
    inner = {"intermediate": 8} if bench in LAYERS else {}
    cell = cell_of(bench, tokens=1, hidden=8, experts=4, top_k=2, dtype="bf16", **inner)
    names = tuple(one.name for one in BENCHES[bench].implementations if not {"gpu", "nvidia"} & set(one.requires))
    job, before = Job(cell, names, QUICK), processes.descendants(os.getpid())
    found = supervisor.measure(job, tmp_path / "cell.parquet")
    assert [(row["status"], row["restarts"]) for row in found] == [("ok", 0)] * len(names), [
        row.get("reason") for row in found
    ]
    for row in found:
        assert (row["rank_tokens"], row["rank_devices"], row["rank_backend"]) == ([0, 1], ["cpu"] * 2, "gloo")
        assert row["isolated"] and row["timer"] == "wall" and row["barrier_us"] > 0
        assert len(row["rank_medians_us"]) == 2 and min(row["rank_medians_us"]) > 0
        assert sum(row["rank_rows"]) == 2 and sum(row["rank_all_bytes"]) % (2 * 16) == 0
    assert not processes.running(processes.descendants(os.getpid()) - before)
    stored = records.read(tmp_path / "cell.parquet").to_pylist()
    assert [row["ranks"] for row in stored] == [2] * len(names)
    assert {name for name in rows.MEASURED if name.startswith("rank_")} <= {n for n, v in stored[0].items() if v}


@pytest.mark.parametrize(("bench", "name"), [("dispatch", "torch_all_to_all"), ("ep_layer", "ops_ep")])
def test_ranks_that_work_on_copies_see_and_give_what_the_judge_shares(bench: str, name: str, monkeypatch) -> None:
    """As ranks with GPUs do: values that are loaded after binding are used, and outputs come back, poisoned ones too."""
    monkeypatch.setattr(rank_process, "of", lambda device: rank_process.Staged)
    inner = {"intermediate": 8} if bench in LAYERS else {}
    cell = cell_of(bench, tokens=6, hidden=8, experts=4, top_k=2, dtype="bf16", **inner)
    job, definition = Job(cell, (name,), QUICK), BENCHES[bench].definition()
    group = RankGroup(job, name, "cpu")
    try:
        sets = Sets(job, definition, "cpu", Arena("cpu"))
        group.bind(sets)
        for load in (lambda: None, sets.novel):
            load()
            sets.poison()
            group.ask("rotate", 1)
            for inputs, outputs in zip(sets.inputs, sets.outputs, strict=True):
                assert definition.check(cell, inputs, outputs, definition.reference(cell, inputs)).error is None
    finally:
        group.end()


def elsewhere(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make `torch_static` return what comes in memory of its own, as a mailbox does."""
    genuine, kept, memory = all_to_all.bind_static, BENCHES["ep_exchange"].kept, dict[str, torch.Tensor]()

    def bind(problem, **tensors: Any):
        own = {name: tensors[name].clone() for name in kept}
        if fault == "one memory for all sets":
            own = {name: memory.setdefault(name, tensor) for name, tensor in own.items()}
        run, calls = genuine(problem, **{**tensors, **own}), []

        def call():
            calls.append(0)
            if fault != "once" or len(calls) == 1:
                run()
            if fault == "another type":
                return own | {"received": own["received"].double()}
            return collections.OrderedDict(own) if fault == "computed when read" else own

        return call

    monkeypatch.setattr(all_to_all, "bind_static", bind)


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        ("none", None),
        ("once", "received@0"),
        ("one memory for all sets", "received@0"),
        ("another type", "received: float64"),
        ("computed when read", "in a OrderedDict, not a plain dictionary"),
    ],
)
def test_rows_that_stay_where_they_came_are_poisoned_and_judged(fault: str, said: str | None, monkeypatch) -> None:
    """Without a copy in a call's time: of each set those that its last call returned, after each turn. A fault shows on the inputs that the
    first call had, too."""
    monkeypatch.setattr(rank_process, "of", lambda device: rank_process.Staged)
    elsewhere(fault, monkeypatch)
    cell = cell_of("ep_exchange", tokens=6, hidden=8, experts=4, top_k=2, dtype="bf16")
    job, bench, errors = Job(cell, ("torch_static",), QUICK), BENCHES["ep_exchange"], list[list[str | None]]()
    group = RankGroup(job, "torch_static", "cpu")
    try:
        sets = Sets(job, bench.definition(), "cpu", Arena("cpu"))
        group.bind(sets)
        for load in (lambda: None, sets.novel):
            load()
            sets.poison()
            group.ask("rotate", 1)
            errors.append([])
            for inputs, outputs in zip(sets.inputs, sets.outputs, strict=True):
                expected = bench.definition().reference(cell, inputs)
                errors[-1].append(bench.check("torch_static", cell, inputs, outputs, expected).error)
    except Failure as failure:
        errors.append([failure.reason])
    finally:
        group.end()
    assert any(said in (error or "") for error in errors[0]) if said else not any(map(any, errors)), errors


def test_memory_of_other_gpus_is_filled_and_fetched_by_way_of_a_rank_s_own(monkeypatch) -> None:
    """Seen on two H200s: a copy between the judge's GPU and memory that both ranks map is an invalid argument of CUDA on the second rank."""
    judge, mapped = ({name: torch.full((3,), value) for name in ("kept", "x")} for value in (1.0, 2.0))
    copies, genuine = list[tuple[int, int]](), torch.Tensor.copy_
    watched = {id(tensor) for each in (judge, mapped) for tensor in each.values()}

    def copy(self: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
        if id(self) in watched:
            copies.append((self.data_ptr(), source.data_ptr()))
        return genuine(self, source)

    monkeypatch.setattr(torch.Tensor, "copy_", copy)
    rank = object.__new__(rank_process.Staged)
    monkeypatch.setattr(rank, "_kept", lambda: ("kept",))
    monkeypatch.setattr(rank, "_wait", lambda: None)
    for source, target, value in ((judge, mapped, 5.0), (mapped, judge, 7.0)):
        source["kept"].fill_(value)
        rank._move([source], [target], ["kept", "x"])
        assert (target["kept"] == value).all() and torch.equal(target["x"], source["x"])
    direct = {
        (a[name].data_ptr(), b[name].data_ptr()): name for a, b in [(judge, mapped), (mapped, judge)] for name in a
    }
    assert len(copies) == 4 and [direct.get(pair) for pair in copies] == [None, "x", None, "x"]


def test_ranks_without_a_gpu_each_are_unsupported() -> None:
    job = Job(cell_of("dispatch", tokens=1, hidden=8, experts=4, top_k=2), ("torch_all_to_all",), QUICK)
    assert rank_process.of("cuda") is rank_process.GpuRank
    with pytest.raises(Failure, match="2 ranks take a GPU each, and this machine has 0") as failed:
        rank_process.GpuRank(job, "torch_all_to_all", "cuda", 0, rank=0, rendezvous=0)._join(1.0)
    assert failed.value.status == "unsupported"


def test_ranks_share_a_cpu_and_have_a_gpu_each() -> None:
    """So what a row says of bytes, FLOPs and ceilings is of one GPU: seen on two H200s, a layer at 243 us was below a roofline of 268 for one."""
    over, alone = (
        cell_of("dispatch", tokens=4, hidden=8, experts=8, top_k=2, ranks=4),
        cell_of("pack", tokens=4, hidden=8, experts=8, top_k=2),
    )
    assert [devices(cell, device) for cell in (over, alone) for device in ("cpu", "cuda")] == [1, 4, 1, 1]


def group(device: str = "cpu") -> RankGroup:
    """Two ranks without processes, whose hand-over and barrier take a microsecond each."""
    ranks = object.__new__(RankGroup)
    ranks.ranks, ranks.device, ranks.handover_us, ranks.least_handover_us = 2, device, 1.5, 1.0
    ranks._kind, ranks._peer_copy, ranks._barrier_us = rank_process.Rank, None, 1.0
    ranks._over_turn, ranks._medians = math.inf, [[], []]
    return ranks


def turn(ranks: RankGroup, *times_ns: object, calls: int = 4, seconds: float = 10e-6) -> float:
    """The seconds that a turn of so many calls counts, which takes so long on each rank."""
    return ranks.spent({"ranks": [{"turn_ns": each} for each in times_ns]}, seconds, calls)


def test_a_turn_counts_its_slowest_rank_and_is_not_believed_where_a_clock_is_slow() -> None:
    ranks = group()
    assert turn(ranks, 8000, 4000) == pytest.approx(8e-6)
    assert turn(ranks, 4000, 12_000, seconds=100e-6) == pytest.approx(12e-6)
    assert turn(ranks, 2000, 6000, calls=2) == pytest.approx(6e-6)
    ranks.believed()  # what holds one turn up is no slow clock
    assert ranks.fields()["rank_medians_us"] == [1.0, 3.0]
    for wrong in (-1, 1.5, None, True, [1000]):
        with pytest.raises(Failure, match="rank 1"):
            turn(ranks, 1000, wrong)
    ranks._over_turn = math.inf
    turn(ranks, 5000, 4000, seconds=12e-6)
    with pytest.raises(Failure, match=r"a turn takes 2\.00 times as long as the ranks say"):
        ranks.believed()


@pytest.mark.parametrize(
    ("device", "share", "said"),
    [("cpu", 0.95, ""), ("cpu", 0.7, "1.43 times as long"), ("cuda", 0.85, ""), ("cuda", 0.7, "1.43 times as long")],
)
def test_ranks_that_leave_a_part_of_a_turn_unsaid_are_not_believed(device: str, share: float, said: str) -> None:
    """The best turn of an honest one is as long as it says."""
    ranks = group(device)
    for seconds in (1.5e-3, 1.002e-3):
        turn(ranks, int(1e6 * share), 1000, seconds=seconds)
    if said:
        with pytest.raises(Failure, match=said):
            ranks.believed()
    else:
        ranks.believed()


def test_torch_s_own_exchange_says_where_it_cannot_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its kernel asserts that blocks have equal parts of what comes from a rank; an assertion on a GPU ends the process."""
    from torch.distributed import _symmetric_memory

    def reason(tokens: int, **axes: int) -> str | None:
        cell = cell_of("ep_exchange", **{"tokens": tokens, "hidden": 7168, "experts": 256, "top_k": 8} | axes)
        return all_to_all.unsupported_symmetric(BENCHES["ep_exchange"].definition().problem(cell))

    monkeypatch.setattr(_symmetric_memory, "is_nvshmem_available", lambda: False)
    assert "no NVSHMEM" in (reason(256) or "")
    monkeypatch.setattr(_symmetric_memory, "is_nvshmem_available", lambda: True)
    assert not any(map(reason, (2, 16, 128, 256, 2048, 8192, 16384)))
    assert reason(2048, hidden=2896) is None
    assert "rows of 5760 bytes do not divide among the 11 blocks" in (reason(250, hidden=2880) or "")


class Linked(rank_process.Rank):
    """A rank with a link to the next."""

    def _link(self) -> dict[str, float]:
        return {"gb_per_s": 300.0 - self._rank}


@pytest.mark.parametrize(("kind", "rate"), [(Linked, 299.0), (rank_process.Rank, None)])
def test_a_row_has_the_copy_of_the_slowest_link(
    kind: type, rate: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What bytes on the wire over time are compared with, from the same processes."""
    monkeypatch.setattr(rank_process, "of", lambda device: kind)
    job = Job(cell_of("dispatch", tokens=2, hidden=8, experts=4, top_k=2), ("torch_all_to_all",), QUICK)
    group = RankGroup(job, "torch_all_to_all", "cpu")
    try:
        group.bind(Sets(job, BENCHES["dispatch"].definition(), "cpu", Arena("cpu")))
        assert group._peer_copy == rate
        group._medians = [[1.0], [1.0]]
        assert group.fields()["peer_copy_gb_per_s"] == rate
    finally:
        group.end()


def test_gpus_that_are_too_few_are_said_to_be(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpus, "visible", lambda: ["0"])
    assert gpus.lacking(2, "cpu") is None and gpus.lacking(None, "nvidia-h200") is None
    assert "needs 2 GPUs, a card for each rank; there is 1" in (gpus.lacking(2, "nvidia-h200") or "")
    monkeypatch.setattr(gpus, "visible", lambda: ["0", "1"])
    assert gpus.lacking(2, "nvidia-h200") is None


def test_one_process_cannot_call_it() -> None:
    with pytest.raises(UserError, match="a call of 2 processes"):
        api.check("dispatch", "torch_all_to_all", tokens=4)
