"""How the short stream is cut from the buffers, without a GPU: sizes and places of its launches."""

import contextlib
from types import SimpleNamespace

import pytest
import torch

from moe_routing_bench.measure import calibration, stream_kernel

BUFFER, CACHE = 64 << 20, 1 << 20  # bytes


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """Ends of the parts of source and target that are streamed, in elements, in place of launches."""
    found: list[tuple[int, int]] = []

    def launch(source, target, reads, writes, block, warps):
        part = min(source.numel() // reads, target.numel() // writes) // block * block
        found.append((source.storage_offset() + source.numel(), target.storage_offset() + target.numel()))
        assert part and source.storage_offset() % 8 == 0 and target.storage_offset() % 8 == 0, "a load of 16 bytes"
        return part * 2 * (reads + writes)

    monkeypatch.setattr(stream_kernel, "launch", launch)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", lambda: SimpleNamespace(replay=lambda: None))
    monkeypatch.setattr(torch.cuda, "graph", lambda graph: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(L2_cache_size=CACHE))
    monkeypatch.setattr(calibration, "_seconds", lambda *_: 1e-3)
    return found


def ceilings(read_bytes: int, write_bytes: int) -> calibration.GpuCeilings:
    """Without what needs a device."""
    one = object.__new__(calibration.GpuCeilings)
    one._kernel, one._moved, one._short = stream_kernel, read_bytes + write_bytes, None
    one._source, one._target = (torch.empty(BUFFER // 2, dtype=torch.bfloat16) for _ in range(2))
    return one


@pytest.mark.parametrize(
    ("mix", "nbytes"), [((1, 8), 9 << 20), ((8, 1), 36 << 20), ((1, 2), 3 << 20), ((1, 1), 5_000_001)]
)
def test_a_short_stream_moves_what_the_stage_moves(mix, nbytes, launches) -> None:
    one = ceilings(nbytes * mix[0] // sum(mix), nbytes * mix[1] // sum(mix))
    rate = one._streamed_short(mix)["short_stream_gb_per_s"]
    assert one._short is not None
    sets = one._short[1] / nbytes
    assert round(sets) >= min(BUFFER / nbytes, 5 * CACHE / nbytes + 1) - 1 and sets == pytest.approx(
        round(sets), rel=0.02
    )
    assert rate == pytest.approx(one._short[1] / 1e-3 / 1e9)
    assert all(max(ends) <= BUFFER // 2 for ends in launches)
    assert len(set(launches)) == round(sets), "every launch of a graph has parts of its own"
    before = len(launches)
    one._streamed_short(mix)
    assert len(launches) == before, "the second calibration replays the graph of the first"


def test_a_stage_of_less_than_a_mebibyte_has_no_short_stream(launches) -> None:
    assert ceilings(1 << 18, 1 << 19)._streamed_short((1, 2)) == {} and not launches
