"""What is said while a cell is measured."""

import os
import pty
from types import SimpleNamespace

import pytest

from moe_routing_bench.cli import printing


@pytest.mark.parametrize(
    ("expected", "said"), [(None, "   0 s"), (100.0, "   0 s, about 2 min remain"), (0.1, "   0 s, about 0 s remain")]
)
def test_the_time_taken_and_the_rest_are_said_now_and_then(expected, said, monkeypatch):
    """A clock stands still, as a busy machine may take a second to start a thread."""
    reading, writing = os.pipe()
    monkeypatch.setattr(printing, "_STDERR", writing)
    monkeypatch.setattr(printing, "EVERY", 0.02)
    monkeypatch.setattr(printing, "time", SimpleNamespace(monotonic=lambda: 100.0))
    with printing.waited(expected), os.fdopen(reading) as lines:
        assert [lines.readline() for _ in range(3)] == [f"{said}\n"] * 3
    os.close(writing)


def test_what_is_short_says_nothing(capfd):
    with pytest.raises(ValueError, match="inside"), printing.waited(None):
        raise ValueError("inside")
    assert capfd.readouterr().err == ""


def test_on_a_terminal_one_line_changes_and_goes(monkeypatch):
    reading, writing = pty.openpty()
    monkeypatch.setattr(printing, "_STDERR", writing)
    now = iter([100.0])
    monkeypatch.setattr(printing, "time", SimpleNamespace(monotonic=lambda: next(now, 101.0)))
    with printing.waited(60.0):
        shown = os.read(reading, 100)
    assert shown == b"\r\x1b[K   1 s, about 59 s remain" and os.read(reading, 100) == b"\r\x1b[K"
    os.close(reading)
    os.close(writing)
