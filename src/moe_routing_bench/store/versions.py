"""Files of results that were made by different versions of the code."""

from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path


def outvoted(
    found: Mapping[Path, set[str | None]], shown: int, today: Callable[[], str | None] = lambda: None
) -> tuple[int, str]:
    """How many versions of the code the files name, and in words which files to make again; nothing where they agree.

    Kept are those of today's code, or, where none is of today's, of the most frequent version. The first `shown` are named.
    """
    counts = Counter(code for codes in found.values() for code in codes)
    if len(counts) < 2:
        return len(counts), ""
    wanted = today()
    kept = wanted if wanted in counts else counts.most_common(1)[0][0]
    again = sorted(str(path) for path, codes in found.items() if codes != {kept})
    return len(counts), f"{', '.join(again[:shown])}{', …' * (len(again) > shown)} ({len(again)} files)"
