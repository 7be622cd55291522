"""`ep_exchange` by the memory of other GPUs, on CPUs: the mailbox and torch's operator are replaced by messages that do the same."""

import contextlib
import functools
import gc
import types
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from test_rank_benches import CASES, case
from torch import Tensor

import rank_processes
from mailbox_messages import Messages
from moe_routing_bench.benches import mailboxes
from moe_routing_bench.benches.ep_exchange import all_to_all
from moe_routing_bench.benches.ranks import of_rank
from moe_routing_bench.benches.registry import BENCHES

BENCH = BENCHES["ep_exchange"]
NAMES = ("torch_symm_mem", "torch_symm_mem_graph", "cute_push", "cute_push_graph")
_SETS = 2


class Graph:
    """A CUDA graph of which a CPU knows that it was replayed."""

    replays = 0

    def replay(self) -> None:
        Graph.replays += 1


def test_what_a_captured_call_holds_lives_as_long_as_its_replay(monkeypatch: pytest.MonkeyPatch) -> None:
    """Seen on two H200s: a graph read the addresses of ranks from a tensor that was freed with its mailbox."""
    stream = types.SimpleNamespace(wait_stream=lambda other: None)
    monkeypatch.setattr(torch.cuda, "Stream", lambda: stream)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: stream)
    monkeypatch.setattr(torch.cuda, "stream", contextlib.nullcontext)
    monkeypatch.setattr(torch.cuda, "graph", contextlib.nullcontext)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    held, calls = torch.zeros(1), []
    alive = weakref.ref(held)
    call = functools.partial(lambda tensor: calls.append(tensor.shape), held)
    replay = mailboxes.captured(call)
    del held, call
    gc.collect()
    before = len(calls)
    replay()
    assert alive() is not None and (len(calls), Graph.replays) == (before, 1)


def all_to_all_vdev(rows: Tensor, out: Tensor, splits: Tensor, splits_offsets: Tensor, group: str) -> None:
    """As torch documents it: the first rows to the ranks of `splits`, in order; counts and offsets of what came."""
    come = torch.empty_like(splits)
    dist.all_to_all_single(come, splits.contiguous())
    splits_offsets.copy_(torch.stack([come, come.cumsum(0) - come]))
    sent, here = splits.tolist(), come.tolist()
    dist.all_to_all_single(out[: sum(here)], rows[: sum(sent)].contiguous(), here, sent)


def outputs_of(rank: int, cases: list[str]) -> list[Any]:
    """Of each implementation and case: how many graphs were captured, and the outputs of two sets after each was called twice, in turn."""
    graphs: list[int] = []

    def captured(run):
        graphs.append(0)
        return run

    for module in (mailboxes, all_to_all):
        module.captured = captured
    mailboxes.Mailbox = Messages  # type: ignore[misc, assignment]
    all_to_all._symmetric = lambda *shape, dtype: torch.full(shape, 77, dtype=dtype)
    torch.ops.symm_mem.all_to_all_vdev = all_to_all_vdev
    found = []
    for implementation in NAMES:
        for name in cases:
            cell, sets = drawn(name)
            graphs.clear()
            outputs = [of_rank(BENCH.definition().empty_outputs(cell, inputs), rank) for inputs in sets]
            calls = [
                BENCH.bind(implementation, cell, of_rank(inputs, rank) | each)
                for inputs, each in zip(sets, outputs, strict=True)
            ]
            for each in outputs:
                for tensor in each.values():
                    tensor.fill_(77)
            returned = [call() for _ in range(2) for call in calls][-_SETS:]
            found.append((len(graphs), [each | kept for each, kept in zip(outputs, returned, strict=True)]))
    return found


def drawn(name: str) -> tuple[Any, list[dict[str, Tensor]]]:
    """A case, and inputs of two sets."""
    cell, inputs = case("ep_exchange", name)
    other = {part: tensor.flip(0) for part, tensor in inputs.items()}
    return cell, [inputs, other]


@pytest.mark.parametrize("ranks", [2, 3])
def test_rows_come_and_go_back_and_stay_until_the_set_is_called_again(ranks: int, tmp_path: Path) -> None:
    cases = [name for name in CASES if case("ep_exchange", name)[0].ranks == ranks]
    found = rank_processes.called(ranks, tmp_path, functools.partial(outputs_of, cases=cases))
    assert all(isinstance(each, list) for each in found), found
    for i, (implementation, name) in enumerate((one, name) for one in NAMES for name in cases):
        cell, sets = drawn(name)
        assert found[0][i][0] == (_SETS if implementation.endswith("_graph") else 0)
        for number, inputs in enumerate(sets):
            outputs = {
                f"{part}@{rank}": tensor for rank in range(ranks) for part, tensor in found[rank][i][1][number].items()
            }
            expected = BENCH.definition().reference(cell, inputs)
            assert BENCH.check(implementation, cell, inputs, outputs, expected).error is None, (implementation, name)
