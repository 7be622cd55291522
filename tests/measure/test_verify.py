"""What a verified implementation has done: both draws, in poisoned buffers, with all its stages, and with nothing left running."""

import contextlib
import json
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from moe_routing_bench.benches.bench import find
from moe_routing_bench.benches.checks import Check
from moe_routing_bench.config.expand import cell_of
from moe_routing_bench.grid.cell import Job, Settings
from moe_routing_bench.measure import outcome, verify, worker
from moe_routing_bench.measure.candidate import Candidate, Failure, Tainted
from moe_routing_bench.measure.host_timer import HostTimer
from moe_routing_bench.measure.inputs import Sets

CELL = cell_of("routing", tokens=12, hidden=16, experts=4, top_k=2, dtype="fp32", skew=0.5)
JOB = Job(CELL, ("torch",), Settings(check_seeds=2))


class Timer(HostTimer):
    """As on a GPU, where a lone rotation and a sample are not the same calls; says which it ran."""

    def __init__(
        self, calls, outstanding: float = 0.0, alone: float = 1.0, elsewhere: float = 0.0, paired: tuple = ()
    ) -> None:
        self.ran, self.found, self.lones, self.paired = [], (outstanding, alone, elsewhere), 0, paired
        super().__init__(calls, 1)

    def rotate(self) -> None:
        self.ran.append("rotate")
        super().rotate()

    def check(self) -> None:
        self.ran.append("check")
        super().rotate()

    def outstanding_us(self) -> float:
        return self.found[0]

    def elsewhere(self) -> float:
        return self.found[2]

    def alone_us(self) -> float:
        return self.found[1]

    def pairs(self) -> int:
        return 6 if self.paired else 0

    def _lead(self) -> None:
        """Nothing: calls are counted."""

    def among(self) -> list[float]:
        """A microsecond a call."""
        super().among()
        return [1.0] * len(self.calls_list)

    def lone(self, mark) -> list[float]:
        """In each attempt, the last one again and again, so many microseconds a call."""
        super().lone(mark)
        self.lones += 1
        return [self.paired[min(self.lones - 1, 6 * len(self.paired) - 1) // 6]] * len(self.calls_list)

    def among_us(self, blocks) -> float:
        return 1.0

    def sample(self) -> float:
        return 1.0


@pytest.fixture(scope="module")
def sets() -> Sets:
    return Sets(JOB, find("routing").definition(), "cpu")


def candidate(sets: Sets, change=lambda i, call, tensors: tensors, **timer) -> Candidate:
    """torch's routing of every set; `change` makes of a set's number, its call and what that returned what it returns instead."""
    bound = [find("routing").bind("torch", CELL, i | o) for i, o in zip(sets.inputs, sets.outputs, strict=True)]
    calls = [lambda i=i, call=call: change(i, call, call()) for i, call in enumerate(bound)]
    for call, one in zip(calls, bound, strict=True):
        call.buffers = one.buffers
    return Candidate("torch", calls, timer=Timer(calls, **timer))


@pytest.mark.parametrize(
    ("thorough", "ran", "draws"),
    [
        ({}, ["check"] * 2, "fresh base"),
        ({"thorough": True}, ["check"] * 2 + ["rotate"] * 2, "fresh base base near" + " base" * 12),
    ],
)
def test_each_run_is_checked_on_the_draws(thorough, ran, draws, sets) -> None:
    """First on the fresh one, in poisoned outputs and buffers; then on the base draws; a lone rotation on those and nearly those, and pairs on what is
    timed, which is loaded in the end."""
    seen, named = [], {id(sets.fresh): "fresh", id(sets.base): "base", id(sets.near): "near"}

    def change(i, call, tensors):
        seen.append((named[id(sets._loaded)], i))
        return tensors

    one = candidate(sets, change, paired=(1.0,))
    one.check = Check(rel_l2_error=0.25, ties=3)
    seen.clear()
    verify.verify(JOB, one, sets, **thorough)
    assert one.timer.ran == ran
    assert [name for name, _ in seen] == [name for name in draws.split() for _ in (0, 1)]
    assert all(seen[i][1] != seen[i + 1][1] for i in range(0, len(seen), 2)), "both sets, in any order"
    assert one.check.error is None and one.check.rel_l2_error == 0.25 and one.check.ties == 3
    assert one.check.max_abs_error > 0, "what was known before, and what was found"
    assert sets.draws == 2 and float(sets.outputs[0]["combined"].isnan().sum()) == 0


def test_outputs_are_copied_before_anything_else_takes_time(sets, monkeypatch) -> None:
    """A thread of before may still be writing them: asking for processes gives it time to end."""
    steps = []
    monkeypatch.setattr(verify.processes, "offspring", lambda: steps.append("asked") or set())
    monkeypatch.setattr(sets, "copied", lambda: steps.append("copied"))
    verify._run(lambda: steps.append("ran"), sets)
    assert steps == ["asked", "ran", "copied", "asked"]


def test_processes_that_are_left_running_are_swept_up(sets, monkeypatch) -> None:
    """In two seconds; those of before are not touched."""
    found, swept = iter([{1}, {1, 2}]), []
    monkeypatch.setattr(verify.processes, "offspring", lambda: next(found))
    monkeypatch.setattr(verify.processes, "sweep", lambda *given: swept.append(given))
    with pytest.raises(Failure, match=r"^processes were left running$") as failure:
        verify._run(lambda: None, sets)
    assert failure.value.status == "incorrect" and swept == [({1}, 2.0)]


def test_a_check_of_inputs_that_were_changed_says_which(sets) -> None:
    """Before anything runs: whose fault it is, is asked elsewhere."""
    name, tensor = next(iter(sets.inputs[0].items()))
    tensor.view(-1)[0] += 1
    with pytest.raises(Tainted, match=f"^inputs were changed: {name}$"):
        verify.verify(JOB, candidate(sets), sets)
    tensor.view(-1)[0] += 1  # what was found is mended
    with pytest.raises(Tainted, match=f"^inputs were changed: {name}$"):
        worker._admitted(JOB, "torch", sets, "cpu", lambda message: None)


def test_buffers_are_poisoned_once(sets) -> None:
    """Of every set, before the fresh draw; the base draws find what the fresh one left."""
    found = []
    one = candidate(sets)
    for call in one.calls:
        call.buffers = {"kept": torch.zeros(3), "row": torch.zeros(2, dtype=torch.int32)}

    def run() -> None:
        HostTimer.rotate(one.timer)
        found.extend((float(call.buffers["kept"][0]), int(call.buffers["row"][1])) for call in one.calls)
        for call in one.calls:
            call.buffers["kept"].fill_(1), call.buffers["row"].fill_(1)

    one.timer.check = run
    verify.verify(JOB, one, sets)
    assert [row for _, row in found] == [0x40404040] * 2 + [1] * 2
    assert [kept == kept for kept, _ in found] == [False] * 2 + [True] * 2


def test_a_lone_rotation_finds_scars_in_right_answers(sets) -> None:
    """In outputs and in buffers: a few elements of many."""
    found, buffer = [], torch.zeros(100)
    one = candidate(sets, lambda i, call, tensors: (buffer.zero_(), tensors)[1])
    one.calls[0].buffers = {"kept": buffer}

    def run() -> None:
        found.append((int(sets.outputs[0]["combined"].isnan().sum()), int(buffer.isnan().sum())))
        HostTimer.rotate(one.timer)

    one.timer.rotate = run
    verify.verify(JOB, one, sets, thorough=True)
    assert found == [(16, 16), (0, 0)]


@pytest.mark.parametrize("thorough", [False, True])
def test_a_rotation_of_fewer_sets_than_draws_is_checked_as_far_as_it_goes(thorough, sets) -> None:
    """As where calls take so long that the timer of a GPU leaves sets out."""

    def change(i, call, tensors):
        sets.outputs[i]["combined"][0, 0] += 100
        return tensors

    right, wrong = candidate(sets), candidate(sets, change)
    for one in (right, wrong):
        one.timer = Timer(one.calls[:1])
    verify.verify(JOB, right, sets, thorough=thorough)
    assert right.check.error is None and right.check.max_abs_error > 0
    with pytest.raises(Failure, match="combined"):
        verify.verify(JOB, wrong, sets, thorough=thorough)


@pytest.mark.parametrize("thorough", [False, True])
def test_an_input_that_is_written_while_it_is_checked_is_seen(thorough, sets) -> None:
    """Where nothing was when it was warmed up; it is mended, and what is timed is loaded."""
    before = sets.base[1].inputs["x"]

    def change(i, call, tensors):
        if i == 1 and sets.draws == 2:
            sets.inputs[1]["x"][3, 4] += 1
        return tensors

    one = candidate(sets, lambda i, call, tensors: tensors)
    one.calls[1] = lambda call=one.calls[1]: change(1, None, call())
    with pytest.raises(Failure, match=r"^inputs were changed: x$") as failure:
        verify.verify(JOB, one, sets, thorough=thorough)
    assert failure.value.status == "incorrect" and sets.inputs[1]["x"].equal(before) and sets.damage() is None


def test_what_is_written_after_the_call_is_seen(sets, monkeypatch) -> None:
    """Whoever writes it, and whether it was right before."""
    one = candidate(sets)
    compared = verify._compared

    def late(*given):
        found = compared(*given)
        sets.outputs[1]["combined"][0, 0] = 0.0
        return found

    monkeypatch.setattr(verify, "_compared", late)
    with pytest.raises(Failure, match=r"^outputs were written after the call had returned$") as failure:
        verify.verify(JOB, one, sets)
    assert failure.value.status == "incorrect"


def test_outputs_are_poisoned_for_the_fresh_draw_alone(sets) -> None:
    found = []
    one = candidate(sets)

    def run() -> None:
        found.extend(bool(out["combined"].isnan().all()) for out in sets.outputs)
        HostTimer.rotate(one.timer)

    one.timer.check = run
    verify.verify(JOB, one, sets)
    assert found == [True, True, False, False]


def wrong_order(i, call, tensors):
    """A stage of the first set hands on another order than permute's, which no output of the whole shows."""
    return tensors | {"order": tensors["order"].flip(0)} if i == 0 else tensors


def test_what_the_stages_hand_on_is_looked_at_when_it_is_thorough(sets) -> None:
    verify.verify(JOB, candidate(sets, wrong_order), sets)
    one = candidate(sets, wrong_order)
    with pytest.raises(Failure, match=r"^permute: order") as failure:
        verify.verify(JOB, one, sets, thorough=True)
    assert failure.value.status == "incorrect" and one.check.mismatches > 0
    assert one.timer.ran == ["check"] and sets._loaded is sets.base, "the others are timed on what they should be"


def test_an_error_of_the_whole_is_said_before_those_of_stages(sets) -> None:
    """Stages are given what the whole left: nothing is to be learned of them."""

    def wrong(i, call, tensors):
        tensors["combined"].add_(1)
        return wrong_order(i, call, tensors)

    with pytest.raises(Failure, match=r"^combined: relative L2"):
        verify.verify(JOB, candidate(sets, wrong), sets, thorough=True)


@pytest.mark.parametrize(
    ("found", "reason"),
    [
        ({}, None),
        ({"alone": 1.25, "elsewhere": 0.2}, None),
        ({"alone": 1.2501}, "a call takes 1.25 times as long where it is checked"),
        ({"alone": 2.0}, "2.0 us in the quickest rotation, 1.0 us in a sample; limit 1.25"),
        ({"alone": 2.0, "paired": (1.15,)}, None),
        ({"paired": (1.26,)}, "a call computes 1.26 times as long where it is checked"),
        (
            {"paired": (1.43,)},
            "lowest tenth of 120 pairs: 1.4 and 1.0 us of a call, 2.9 and 2.0 us of a rotation; limit 1.25",
        ),
        ({"elsewhere": 0.21}, "other threads do 21% of the computing"),
        ({"outstanding": 260.4}, "work went on for 260 us after the last event"),
        ({"outstanding": 0.6, "alone": 2.0}, "work went on for 1 us after the last event"),
    ],
)
def test_all_the_work_is_in_a_sample(found, reason, sets) -> None:
    """Asked only when it is thorough."""
    asked = candidate(sets, **found)
    asked.blocks.extend([[1.0] * 10] * 5)
    verify.verify(JOB, asked, sets)
    if reason is None:
        return verify.verify(JOB, asked, sets, thorough=True)
    with pytest.raises(Failure, match=re.escape(reason)) as failure:
        verify.verify(JOB, asked, sets, thorough=True)
    assert failure.value.status == "incorrect"


@pytest.mark.parametrize(("alone", "refused"), [(1.8, False), (1.81, True)])
def test_few_samples_say_less(alone, refused, sets) -> None:
    """Of fewer than 50 the least is no bound for a busy machine."""
    asked = candidate(sets, alone=alone)
    asked.blocks.extend([[1.0] * 7] * 7)
    with pytest.raises(Failure) if refused else contextlib.nullcontext():
        verify.verify(JOB, asked, sets, thorough=True)


def test_lone_rotations_follow_a_sample_and_write_their_outputs(sets) -> None:
    """As many as rotations after it; outputs are scarred before each, and wrong ones are seen."""
    asked = candidate(sets, paired=(1.0,))
    verify._alternated(JOB, asked, sets)
    assert asked.timer.lones == 6 and asked.check.error is None
    wrong = candidate(sets, lambda i, call, tensors: (sets.outputs[i]["combined"].zero_(), tensors)[1], paired=(1.0,))
    with pytest.raises(Failure, match=r"^combined: relative L2"):
        verify._alternated(JOB, wrong, sets)
    assert wrong.timer.lones <= 6
    still = candidate(sets, paired=(1.0,))
    still.timer.calls_list = [lambda: None] * 2
    with pytest.raises(Failure):
        verify._alternated(JOB, still, sets)
    assert still.timer.lones == 1


@pytest.mark.parametrize(
    ("paired", "attempts", "doubted"),
    [((1.15,), 1, False), ((1.2, 1.2, 1.1), 3, False), ((1.16,), 20, True), ((1.25,), 20, True)],
    ids=["whole", "whole in the end", "hardly whole", "hardly shortened"],
)
def test_what_pairs_cannot_tell_is_a_doubt(paired, attempts, doubted, sets) -> None:
    """Attempts go on until a call holds all its work; twenty that say neither that nor the opposite leave a row suspect, also those of a twin."""
    asked = candidate(sets, paired=paired)
    verify.verify(JOB, asked, sets, thorough=True)
    assert asked.timer.lones == 6 * attempts and len(asked.doubts) == doubted
    first = candidate(sets)
    first.blocks, first.slow, first.twin = [[1.0] * 5] * 5, [0] * 5, asked
    row = outcome.row(first)
    assert row.get("suspect", False) == doubted and ("too busy to tell" in row.get("suspect_reason", "")) == doubted


# Of honest calls next to 10 busy processes on two cores: what each call of 100 pairs of rotations computed, µs.
BUSY = [json.loads(line) for line in (Path(__file__).parents[1] / "data/busy_rotations.jsonl").read_text().splitlines()]


class Replayed(Timer):
    """Computes in rotations what was recorded, and alone `times` as much, as a call does that leaves the rest out where it is timed."""

    def __init__(self, calls, recorded: dict, times: float) -> None:
        super().__init__(calls)
        self.recorded, self.times, self.pair = recorded, times, 0

    def pairs(self) -> int:
        return 10

    def among(self) -> list[float]:
        super().among()
        return self.recorded["among"][self.pair % 100]

    def lone(self, mark) -> list[float]:
        super(Timer, self).lone(mark)
        self.pair += 1
        return [us * self.times for us in self.recorded["alone"][(self.pair - 1) % 100]]


@pytest.mark.parametrize("recorded", BUSY, ids=lambda recorded: f"{recorded['calls']}, {recorded['host']}")
def test_recorded_calls_on_a_busy_host_are_told_from_those_that_leave_work_out(recorded, sets) -> None:
    """Of an honest call, in at most four attempts; of one that leaves out three tenths, which an interval of the mean rotations let
    through, 45 %, half or nearly all of its work, in as few as it takes."""

    def verified(times: float) -> Candidate:
        asked = candidate(sets)
        asked.timer = Replayed(asked.timer.calls_list, recorded, times)
        verify.verify(JOB, asked, sets, thorough=True)
        return asked

    honest = verified(1.0)
    assert not honest.doubts and honest.timer.pair <= 40
    for share in (0.3, 0.45, 0.5, 0.9):
        with pytest.raises(Failure, match="work is left out") as failure:
            verified(1 / (1 - share))
        assert failure.value.status == "incorrect"


@pytest.mark.parametrize(("threads", "attempts"), [(1, 8), (2, 44)])
def test_calls_of_one_thread_have_few_attempts(threads, attempts, sets, monkeypatch) -> None:
    """The least of many lone rotations would be as short as that of a call that leaves work out."""
    monkeypatch.setattr(verify.torch, "get_num_threads", lambda: threads)
    assert len(list(verify._attempts("wall"))) == attempts and len(list(verify._attempts("cuda_graph"))) == 4


@pytest.mark.parametrize(("waits", "refused"), [(30, False), (10**9, True)])
def test_threads_that_wait_for_a_core_are_no_work_that_is_left_out(waits, refused, sets, monkeypatch) -> None:
    """They compute meanwhile, in most lone rotations on a busy CPU; a call that leaves work out is never as short in one."""
    monkeypatch.setattr(verify.torch, "get_num_threads", lambda: 2)
    asked = candidate(sets)
    asked.timer.alone_us = lambda: 100.0 if len(asked.timer.ran) < waits else 1.0
    with pytest.raises(Failure, match=r"100\.00 times") if refused else contextlib.nullcontext():
        verify.verify(JOB, asked, sets, thorough=True)


class Answers:
    """Six sets of two draws whose outputs y (3,) are what a test says; the check counts what differs from the draw's number."""

    draws = 2

    def __init__(self, values, returned=None) -> None:
        self.outputs = [{"y": torch.full((3,), float(one))} for one in values]
        self.inputs = [{"x": i} for i in range(len(values))]
        self.timer = SimpleNamespace(returned=returned or [None] * len(values))
        self.digests, self.known = {}, [SimpleNamespace(expected={"y": i}) for i in range(2)]
        self.name, self.checked = "a", []

    def draw_of(self, i):
        return self.known[i % 2]

    def digest(self, tensor):
        return float(tensor.sum())

    def unlike(self, first):
        return torch.tensor(
            [bool((one["y"] != self.outputs[first]["y"]).any()) for one in self.outputs[first % 2 :: 2]]
        )

    def check(self, name, cell, inputs, outputs, expected):
        assert (name, cell, outputs.keys()) == ("a", "cell", {"y"})
        self.checked.append(inputs["x"])
        wrong = int((outputs["y"] - expected["y"]).abs().gt(0.1).sum())
        return Check(
            float((outputs["y"] - expected["y"]).abs().max()),
            error=f"{wrong} wrong" if wrong else None,
            mismatches=wrong,
        )


def compared(values, returned=None) -> tuple[Check, list[int]]:
    one = Answers(values, returned)
    return verify._compared(one, SimpleNamespace(cell="cell"), one, one), one.checked


def tensors(*values) -> list[dict[str, torch.Tensor] | None]:
    """What calls returned: a tensor full of a value, or nothing."""
    return [None if one is None else {"y": torch.full((3,), float(one))} for one in values]


@pytest.mark.parametrize(
    ("values", "returned", "error", "worst", "checked"),
    [
        ([0, 1, 0, 1, 0, 1], None, None, 0.0, [0, 1]),
        ([0, 1, 0.05, 1, 0, 1.0625], None, None, 0.0625, [0, 2, 1, 5]),  # another order of sums
        ([0, 1, 0, 1, 0, 3], None, "3 wrong", 2.0, [0, 1, 5]),
        ([0, 1, 7, 1, 5, 1], None, "3 wrong", 7.0, [0, 2, 1]),  # one of a draw is enough
        ([9, 1, 9, 1, 9, 1], None, "3 wrong", 9.0, [0, 1]),  # the others of that draw are not looked at
        ([9] * 6, tensors(0, 1, 0, 1, 0, 1), None, 0.0, [0, 1]),
        ([9] * 6, tensors(0, 1, 0, 1, 4, 1), "3 wrong", 4.0, [0, 4, 1]),
        ([0, 1, 0, 1, 2, 1], tensors(None, None, None, None, 0, None), None, 0.0, [0, 1]),
        ([0, 1, 0, 1, 0, 1], tensors(None, None, None, None, 2, None), "3 wrong", 2.0, [0, 4, 1]),
        ([0, 1, 0], [None] * 3, None, 0.0, [0, 1]),
        ([0, 1, 6], [None] * 3, "3 wrong", 6.0, [0, 2, 1]),
    ],
)
def test_the_first_set_of_a_draw_is_checked_and_all_others_compared_with_it(values, returned, error, worst, checked):
    """What a call returned takes the place of the outputs that it was given; what differs is checked by itself."""
    found, seen = compared(values, returned)
    assert (found.error, found.rel_l2_error) == (error, pytest.approx(worst)) and seen == checked


def test_a_timer_of_fewer_sets_leaves_the_others_alone() -> None:
    """Events rotate over fewer sets where calls take long."""
    found, seen = compared([0, 1, 0, 1, 5, 5], [None] * 4)
    assert found.error is None and seen == [0, 1]
