"""What all unit tests share."""

import pytest


@pytest.fixture(autouse=True, scope="module")
def one_thread(request):
    """Where a module uses torch, no pool of threads: a process with one cannot fork workers, as later tests may do."""
    torch = getattr(request.module, "torch", None)
    if torch is not None:
        torch.set_num_threads(1)
