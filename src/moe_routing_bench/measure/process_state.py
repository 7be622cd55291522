"""State of the process that all implementations of a cell share, beyond what one call reads and sets: environment variables and random numbers.

Each has a function that reads it, one that puts it back, and one that says which harm a change does.
"""

import os
import random
from typing import Any

import numpy as np
import torch

_COMPILERS = (
    "_TORCHINDUCTOR_",
    "TORCHINDUCTOR_",
    "TRITON_",
    "CUTE_DSL_",
    "TVM_",
)  # note in the environment where their caches are
_LONGEST = 20  # letters of a value that is shown: a longer one may be a password


def variables() -> dict[str, str]:
    """The environment variables, but for those of compilers."""
    return {name: text for name, text in os.environ.items() if not name.startswith(_COMPILERS)}


def put_variables(was: dict[str, str]) -> None:
    """Make `variables` what they were."""
    for name in variables().keys() - was.keys():
        del os.environ[name]
    os.environ.update(was)


def harm_of_variables(now: dict[str, str], was: dict[str, str]) -> str | None:
    """Which variables were changed and removed, in words, and which added; None where some were added and that is all.

    What is added is gone again before another implementation can read it, and honest libraries add some when they are imported.
    """
    removed, added = sorted(was.keys() - now.keys()), sorted(now.keys() - was.keys())
    changed = [name for name in sorted(was.keys() & now.keys()) if was[name] != now[name]]
    if not removed and not changed:
        return None
    words = [f"{name} is {_shown(now[name])}, no longer {_shown(was[name])}" for name in changed]
    words += [f"{name} was removed" for name in removed] + [f"{name} was added" for name in added]
    return f"os.environ: {', '.join(words)}"


def _shown(text: str) -> str:
    return repr(text) if len(text) <= _LONGEST else "another"


def random_states() -> tuple[Any, ...]:
    """Those of Python, numpy and torch, of a CPU, to be compared."""
    kind, keys, *rest = np.random.get_state()
    return random.getstate(), (kind, np.asarray(keys).tobytes(), *rest), torch.get_rng_state().numpy().tobytes()


def put_random_states(was: tuple[Any, ...]) -> None:
    """Make `random_states` what they were."""
    of_python, (kind, keys, *rest), of_torch = was
    random.setstate(of_python)
    np.random.set_state((kind, np.frombuffer(keys, np.uint32), *rest))
    torch.set_rng_state(torch.frombuffer(bytearray(of_torch), dtype=torch.uint8))


def harm_of_random_states(now: tuple[Any, ...], was: tuple[Any, ...]) -> None:
    """Nothing: tuners draw random inputs, and others see none of it once it is put back."""
