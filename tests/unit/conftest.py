"""What all unit tests share."""

import functools
from collections.abc import Iterator

import pytest
import typer.main
import typer.testing


@pytest.fixture(autouse=True, scope="session")
def commands() -> Iterator[None]:
    """The tree of commands is built once and not for each call, which takes longer than most of them do."""
    once = functools.cache(typer.main.get_command)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(typer.main, "get_command", once)
        patch.setattr(typer.testing, "_get_command", once)
        yield


@pytest.fixture(autouse=True, scope="module")
def one_thread(request):
    """Where a module uses torch, no pool of threads: a process with one cannot fork workers, as later tests may do."""
    torch = getattr(request.module, "torch", None)
    if torch is not None:
        torch.set_num_threads(1)
