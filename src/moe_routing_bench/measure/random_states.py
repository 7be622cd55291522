"""The states of the random numbers that all implementations of a cell share: Python's, numpy's and torch's, of a CPU."""

import random
from typing import Any

import numpy as np
import torch


def states() -> tuple[Any, ...]:
    """All of them, to be compared."""
    kind, keys, *rest = np.random.get_state()
    return random.getstate(), (kind, np.asarray(keys).tobytes(), *rest), torch.get_rng_state().numpy().tobytes()


def put_back(was: tuple[Any, ...]) -> None:
    """Make `states` what they were."""
    of_python, (kind, keys, *rest), of_torch = was
    random.setstate(of_python)
    np.random.set_state((kind, np.frombuffer(keys, np.uint32), *rest))
    torch.set_rng_state(torch.frombuffer(bytearray(of_torch), dtype=torch.uint8))


def harm(now: tuple[Any, ...], was: tuple[Any, ...]) -> None:
    """Nothing: tuners draw random inputs, and others see none of it once it is put back."""
