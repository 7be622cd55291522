"""One thread, because a process with a pool of threads cannot fork workers; implementations of the tests among those of `pack`."""

import pytest

from packs import add_packs, no_ceilings

__all__ = ["add_packs", "no_ceilings"]


@pytest.fixture(autouse=True, scope="session")
def one_thread() -> None:
    import torch

    torch.set_num_threads(1)
