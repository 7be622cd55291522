"""Experts in blocks of rows: the numbers of the reference, whatever the routing, and nothing on CUDA reads tensors on the host."""

import itertools

import pytest
import torch
from operator_cases import EACH, cases
from torch import Tensor
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode

from campaign import sampled
from moe_routing_kernels.activations import ACTIVATIONS
from moe_routing_kernels.choices import chooser
from moe_routing_kernels.ops import backends, blocks, cuda, reference
from moe_routing_kernels.target import Target

torch.set_num_threads(1)
HIDDEN, INTERMEDIATE = 6, 4
# Rows of each expert, and rows of none behind them.
ROUTINGS = {
    "one_row": ([0, 1, 0], 0),
    "one_expert": ([13], 2),
    "none": ([0, 0, 0], 5),
    "ragged": ([3, 0, 8, 1, 0], 1),
    "hot": ([0, 300, 0, 1], 3),
    "equal": ([16, 16, 16, 16], 0),
    "more_than_a_block": ([129, 257, 1, 400], 7),
    "few_rows_of_many": ([0] * 60 + [2, 0, 1, 0], 0),
}


def drawn(name: str, activation: str, dtype: torch.dtype) -> tuple[list[Tensor], Tensor, list[Tensor | None]]:
    """rows and gradient (R, H), offsets (E + 1,), and w13, w2, b13, b2."""
    counts, spare = ROUTINGS[name]
    torch.manual_seed(17)
    bounds, experts = list(itertools.accumulate(counts, initial=0)), len(counts)
    wide = INTERMEDIATE * (1 if activation == "relu2" else 2)
    shapes = [(experts, wide, HIDDEN), (experts, HIDDEN, INTERMEDIATE)]
    shapes += [(experts, wide), (experts, HIDDEN)] if activation == "swiglu_oai" else []
    network = [torch.randn(shape).to(dtype) for shape in shapes]
    rows = [torch.randn(bounds[-1] + spare, HIDDEN).to(dtype) for _ in range(2)]
    return rows, torch.tensor(bounds, dtype=torch.int32), network + [None] * (4 - len(network))


def compare(got: Tensor, want: Tensor) -> None:
    eps = torch.finfo(want.dtype).eps
    torch.testing.assert_close(got, want, rtol=8 * eps, atol=32 * eps * float(want.abs().max()) if want.numel() else 0)


@pytest.mark.parametrize("copies", [1, blocks.COPIES], ids=["block_by_block", "at_once"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("name", ROUTINGS)
def test_they_are_the_reference(name, activation, dtype, copies, monkeypatch) -> None:
    """Output and gradients, also of an expert without rows; zero in rows of none."""
    monkeypatch.setattr(blocks, "COPIES", copies)
    (rows, grad), offsets, (w13, w2, b13, b2) = drawn(name, activation, dtype)
    network = (offsets, w13, w2, activation, b13, b2)
    compare(blocks.experts(rows, *network), reference.experts(rows, *network))
    wanted = (True, True, True, b13 is not None, b2 is not None)
    got = blocks.experts_backward(grad, rows, *network, wanted)
    want = reference.experts_backward(grad, rows, *network, None, wanted)
    for entry, right in zip(got, want, strict=True):
        assert (entry is None) == (right is None)
        if entry is not None:
            assert entry.dtype == dtype
            compare(entry, right)


@pytest.mark.parametrize(
    "wanted",
    list(itertools.product([True, False], repeat=5)),
    ids=lambda entry: "".join(str(int(of_it)) for of_it in entry),
)
def test_they_add_up_what_is_wanted(wanted) -> None:
    (rows, grad), offsets, (w13, w2, b13, b2) = drawn("ragged", "swiglu_oai", torch.float64)
    network = (offsets, w13, w2, "swiglu_oai", b13, b2)
    whole = blocks.experts_backward(grad, rows, *network, (True,) * 5)
    for got, right, of_it in zip(blocks.experts_backward(grad, rows, *network, wanted), whole, wanted, strict=True):
        assert (got is not None and torch.equal(got, right)) if of_it else got is None


@pytest.mark.parametrize("name", ROUTINGS)
def test_every_row_has_a_lane(name: str) -> None:
    counts, spare = ROUTINGS[name]
    offsets = torch.tensor(list(itertools.accumulate(counts, initial=0)), dtype=torch.int32)
    used = int(offsets[-1])
    outcome = blocks.blocks_of(offsets, used + spare)
    lanes = outcome.row.flatten()[~outcome.empty.flatten()]
    assert lanes.tolist() == list(range(used))
    assert (
        torch.equal(outcome.row.flatten()[outcome.lane[:used]], lanes)
        and outcome.nowhere[:, 0].tolist() == [False] * used + [True] * spare
    )
    height = outcome.row.shape[1]
    assert blocks.LEAST <= height <= blocks.MOST and height & (height - 1) == 0
    for block, expert in enumerate(outcome.expert.tolist()):
        rows = outcome.row[block][~outcome.empty[block, :, 0]]
        assert ((rows >= offsets[expert]) & (rows < offsets[expert + 1])).all()


@pytest.mark.parametrize(("dtype", "blocks_at_once"), [(torch.bfloat16, 3), (torch.float32, 3), (torch.float64, 1)])
def test_copies_of_weights_are_bounded(dtype: torch.dtype, blocks_at_once: int, monkeypatch) -> None:
    """In the dtype of the sums, which is wider than 16 bits; a block too large for the bound goes alone."""
    w13, w2 = torch.empty(5, 8, 6, dtype=dtype), torch.empty(5, 6, 4, dtype=dtype)
    outcome = blocks.blocks_of(torch.arange(6, dtype=torch.int32), 5)
    for copies, step in ((4 * (48 + 24) * 3 + 4, blocks_at_once), (1, 1)):
        monkeypatch.setattr(blocks, "COPIES", copies)
        parts = [len(outcome.expert[part]) for part in outcome.parts(w13, w2)]
        assert sum(parts) == len(outcome.expert) and max(parts) == step


@pytest.mark.parametrize(
    ("layout", "dtype"),
    sampled(
        [case for case in EACH if case[0] != "expanded" and case[1] != torch.float16],
        [("sliced", torch.float32), ("empty", torch.float32), ("contiguous", torch.bfloat16)],
        unpack=True,
    ),
)
def test_nothing_on_cuda_reads_tensors_on_the_host(layout: str, dtype: torch.dtype, monkeypatch) -> None:
    """Every operation without kernels, forward and backward: tensors without data suffice. The reference of experts needs these."""
    monkeypatch.setattr(chooser, "installed", lambda package: False)
    monkeypatch.setattr(backends, "target", lambda device: Target.of("sm_80"))
    monkeypatch.setattr(cuda, "ready", lambda tensor: tensor.contiguous())  # fake tensors have no address
    for remembered in (chooser.kernel, chooser.way):
        remembered.cache_clear()
    ran = set()
    for name, given in cases(layout, dtype):
        operation = name.partition("-")[0]
        if operation == "layer_backward" and layout != "empty":  # which needs kernels
            continue
        with FakeTensorMode() as mode:
            fakes = [mode.from_tensor(entry) if isinstance(entry, Tensor) else entry for entry in given]
            getattr(cuda, operation)(*fakes)
        ran.add(operation)
    assert ran >= {
        "gate",
        "permute",
        "pack",
        "combine",
        "combine_backward",
        "experts",
        "feed",
        "experts_training",
        "layer_training",
        "experts_backward",
    }
    for remembered in (chooser.kernel, chooser.way):
        remembered.cache_clear()


def test_the_reference_reads_offsets_on_the_host() -> None:
    """So that the test above can fail."""
    (rows, _), offsets, (w13, w2, *_) = drawn("ragged", "swiglu", torch.float32)
    with FakeTensorMode() as mode:
        fakes = [mode.from_tensor(entry) for entry in (rows, offsets, w13, w2)]
        with pytest.raises(DataDependentOutputException):
            reference.experts(*fakes, "swiglu", None, None)


def test_grouped_products_are_taken_where_torch_has_them(monkeypatch) -> None:
    """On other devices torch loops over groups, whose ends it reads on the host."""
    calls = []
    monkeypatch.setattr(cuda, "_grouped_backward", lambda *given: calls.append("groups"))
    monkeypatch.setattr(blocks, "experts_backward", lambda *given: calls.append("blocks"))
    rows, network = torch.zeros(4, 16).bfloat16(), [torch.zeros(2, 16, 16).bfloat16(), torch.zeros(2, 16, 8).bfloat16()]
    offsets = torch.tensor([0, 2, 4], dtype=torch.int32)
    for arch in ("sm_80", "sm_90a", "sm_100a", "sm_120a"):
        monkeypatch.setattr(backends, "target", lambda device, arch=arch: Target.of(arch))
        cuda.experts_backward(rows, rows, offsets, *network, "swiglu", None, None, None, [True] * 5)
    assert calls == ["blocks", "groups", "groups", "blocks"]
