"""What all tests of the router zoo share."""

import pytest
import torch


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    """No pool of threads: a process with one cannot fork workers, as later tests may do."""
    torch.set_num_threads(1)
