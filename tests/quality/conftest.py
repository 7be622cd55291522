"""What the tests of the quality part share: one thread, and a text of their own."""

from pathlib import Path

import numpy as np
import pytest
import torch


@pytest.fixture(autouse=True, scope="session")
def one_thread() -> None:
    """A process with a pool of threads cannot fork workers, as later tests may do."""
    torch.set_num_threads(1)


@pytest.fixture
def text(tmp_path: Path) -> str:
    """A text of the test's own, which it may change."""
    return written(tmp_path / "text")


@pytest.fixture(scope="session")
def shared_text(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The same text for tests that only read it."""
    return written(tmp_path_factory.mktemp("shared") / "text")


def written(folder: Path) -> str:
    """A folder of 20 documents of 500 bytes each, over few letters and with words that repeat."""
    draw = np.random.default_rng(0)
    words = [bytes(draw.choice(list(b"abcdefgh"), draw.integers(2, 6)).tolist()) for _ in range(30)]
    folder.mkdir()
    for number in range(20):
        chosen = b" ".join(words[i] for i in draw.integers(0, len(words), 150))
        (folder / f"{number:02}.txt").write_bytes(chosen[:500])
    return str(folder)
