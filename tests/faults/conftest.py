"""One thread: a process with a pool of threads cannot fork workers."""

import pytest


@pytest.fixture(autouse=True, scope="session")
def one_thread() -> None:
    import torch

    torch.set_num_threads(1)
