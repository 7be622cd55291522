"""Implementations of `pack` that go wrong, one way each; loaded by the fault tests in place of real ones."""

import os
import signal
import time

import torch


def bind(problem, *, x, order, inverse, packed, fault):
    """A correct pack that then commits its fault."""

    def pack():
        packed.copy_(x[order.long().clamp_min(0) // problem.top_k])
        packed[order < 0] = 0
        FAULTS[fault]({"x": x}, {"packed": packed})

    return pack


def _raise(inputs, outputs):
    raise ValueError("the kernel was called wrongly")


def _wrong(inputs, outputs):
    outputs["packed"][0, 0] += 1


def _nan(inputs, outputs):
    outputs["packed"][-1, -1] = float("nan")


def _mutate(inputs, outputs):
    inputs["x"][0, 0] += 1


FAULTS = {
    "none": lambda inputs, outputs: None,
    "kill": lambda inputs, outputs: os.kill(os.getpid(), signal.SIGKILL),
    "hang": lambda inputs, outputs: time.sleep(600),
    "raise": _raise,
    "wrong": _wrong,
    "nan": _nan,
    "memory": lambda inputs, outputs: torch.empty(1 << 52),
    "mutate": _mutate,
}
