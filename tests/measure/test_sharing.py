"""What a runner can map: inputs and outputs of all sets, between their guard bytes, and nothing else."""

import os

import pytest
import torch

from moe_routing_bench.benches.bench import find
from moe_routing_bench.config.expand import cell_of
from moe_routing_bench.grid.cell import Job, Settings
from moe_routing_bench.measure import runner, sharing
from moe_routing_bench.measure.inputs import Sets

CELL = cell_of("experts", tokens=16, hidden=32, intermediate=32, experts=4, top_k=2, dtype="bf16")
JOB = Job(CELL, ("torch_loop",), Settings(check_seeds=2))


@pytest.fixture(scope="module")
def sets() -> Sets:
    return Sets(JOB, find("experts").definition(), "cpu", sharing.Arena("cpu"))


def attached(sets: Sets) -> list[dict[str, torch.Tensor]]:
    """The operands as another process has them."""
    stacked, shared, descriptors = sets.handles()
    return runner.Sets(stacked, shared).attached(list(descriptors))


def test_both_sides_see_the_same(sets):
    """Every operand of every set, whatever its dtype, and what all sets share; what one side writes the other reads."""
    theirs = attached(sets)
    ours = [inputs | outputs for inputs, outputs in zip(sets.inputs, sets.outputs, strict=True)]
    assert len(theirs) == len(ours) >= 10, "a rotation takes about a millisecond"
    for mine, other in zip(ours, theirs, strict=True):
        assert mine.keys() == other.keys()
        for name, tensor in mine.items():
            assert (other[name].dtype, other[name].shape) == (tensor.dtype, tensor.shape)
            assert name in sets.outputs[0] or torch.equal(other[name], tensor), name
    (output,) = sets.outputs[0]
    theirs[-1][output].fill_(7)
    assert (sets.outputs[-1][output] == 7).all() and sets.damage() is None
    name = next(iter(sets.inputs[0]))
    theirs[1][name].view(-1)[0] += 1
    assert sets.damage() == f"inputs were changed: {name}"


def test_answers_are_in_nothing_that_is_shared(sets):
    """The bytes of a row of each expected output are in no file that a runner is given."""
    _, _, descriptors = sets.handles()
    known = [drawn.expected for drawn in (*sets.base, *sets.fresh, *sets.near)]
    rows = [t[0].contiguous().view(torch.uint8).numpy().tobytes() for one in known for t in one.values()]
    shared = [os.pread(descriptor, 1 << 24, 0) for descriptor in descriptors]
    assert rows and not any(row in data for row in rows for data in shared)


def test_new_values_are_new_in_every_set_and_as_large(sets):
    """The same numbers in other places, most of them, and others each time: an answer with a few columns patched is wrong."""
    sets.load(sets.base)
    before = [{name: tensor.clone() for name, tensor in inputs.items()} for inputs in sets.inputs]
    sets.novel()
    changed = {
        name for i, inputs in enumerate(sets.inputs) for name in inputs if not inputs[name].equal(before[i][name])
    }
    assert changed, "all that was there before would be known"
    for name in changed:
        assert all(not inputs[name].equal(before[i][name]) for i, inputs in enumerate(sets.inputs)), name
        if before[0][name].dtype.is_floating_point:
            moved = [(inputs[name] != before[i][name]).float().mean() for i, inputs in enumerate(sets.inputs)]
            assert min(moved) > 0.7, name
        assert all(
            inputs[name].flatten().float().sort().values.equal(before[i][name].flatten().float().sort().values)
            for i, inputs in enumerate(sets.inputs)
        )
    known = [{name: inputs[name].clone() for name in changed} for inputs in sets.inputs]
    versions = []
    for _ in range(6):
        sets.novel()
        versions.append(any(inputs[n].equal(known[i][n]) for i, inputs in enumerate(sets.inputs) for n in changed))
    assert not all(versions)
    sets.load(sets.base)
    assert sets.damage() is None


def test_a_tensor_in_a_file_is_read_whole_or_not_at_all():
    descriptor = os.memfd_create("shown")
    os.pwrite(descriptor, torch.arange(6, dtype=torch.int32).numpy().data, 8)
    assert sharing.read(descriptor, 8, torch.int32, (2, 3)).tolist() == [[0, 1, 2], [3, 4, 5]]
    with pytest.raises(ValueError, match="24 bytes of 28"):
        sharing.read(descriptor, 8, torch.int32, (7,))
    os.close(descriptor)


def test_as_many_sets_take_part_as_the_judge_asks_for(sets):
    """All are bound, whatever the number before."""
    bound, (stacked, shared, descriptors) = runner.Bound(JOB, "torch_loop", "cpu", 0), sets.handles()
    said = bound._bind(runner.Sets(stacked, shared), list(descriptors))
    assert said["sets"] == len(sets) and said["rotations"] == 1 and not said["launched"]
    for count in (3, 5):
        bound._limit(count)
        assert len(bound._rotation.calls) == count and bound._rotation.calls[0] is bound._bound[0]


@pytest.mark.parametrize("captured", [True, False])
def test_the_runner_of_a_gpu_says_whether_it_launches_calls_one_by_one(captured, sets, monkeypatch):
    """Then the judge chooses how many sets take part; a graph holds all."""
    rotation = runner.GraphRotation.__new__(runner.GraphRotation) if captured else None

    def on_gpu(calls, interval_us):
        if rotation is None:
            return runner.Rotation(calls)
        rotation.calls, rotation.rotations = calls, 7
        return rotation

    here = runner.Target.here()
    monkeypatch.setattr(runner.Target, "here", lambda device: here)
    monkeypatch.setattr(runner, "on_gpu", on_gpu)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    bound, (stacked, shared, descriptors) = runner.Bound(JOB, "torch_loop", "cuda", 0), sets.handles()
    said = bound._bind(runner.Sets(stacked, shared), list(descriptors))
    assert (said["sets"], said["rotations"], said["launched"]) == (len(sets), 7 if captured else 1, not captured)
