"""What all tests share."""

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

# Asking torch for a GPU while tests are collected must not open CUDA: workers are forked from this process.
os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files with slow tests first: of several workers none then has a slow file left when the others are done."""
    slow = {item.path for item in items if item.get_closest_marker("slow")}
    items.sort(key=lambda item: item.path not in slow)


@pytest.fixture
def own_server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder of its own for the socket, so that this test starts its own server, which its command line names."""
    with tempfile.TemporaryDirectory(prefix="mrb-", dir="/tmp", ignore_cleanup_errors=True) as folder:
        monkeypatch.setenv("TMPDIR", folder)
        yield Path(folder)
