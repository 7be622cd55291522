"""Stored rows that other code measured than today's: which benches, and the reason why they are still shown."""

from collections.abc import Iterable
from pathlib import Path

import yaml

from moe_routing_bench.benches.registry import BENCHES
from moe_routing_bench.store import paths
from moe_routing_kernels.errors import bad, pick


def stale(rows: Iterable[tuple[str, str | None]]) -> list[str]:
    """The benches among rows, each a bench and its code fingerprint, of which some row is not of today's code; sorted."""
    found: dict[str, set[str | None]] = {}
    for bench, code in rows:
        found.setdefault(bench, set()).add(code)
    return sorted(
        name for name, codes in found.items() if name not in BENCHES or codes != {BENCHES[name].code_fingerprint()}
    )


def reasons(platform: str) -> dict[str, str]:
    """Why stale rows of a platform are still shown, by bench: what its stale.yaml says; nothing where there is none.

    Raises `UserError` for a file that is no mapping of benches to reasons.
    """
    path: Path = paths.results(platform) / "stale.yaml"
    if not path.is_file():
        return {}
    found = yaml.safe_load(path.read_text(encoding="utf-8"))
    if not isinstance(found, dict) or not all(isinstance(text, str) and text for text in found.values()):
        raise bad(str(path), found, "a mapping of benches to the reason why their rows are still shown")
    return {pick(f"bench in {path}", name, BENCHES): text for name, text in found.items()}
