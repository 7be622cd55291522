"""The text of a spec, and its hash. Stored rows and file names hold the hash: another text is another measurement."""

import hashlib
import json
from collections.abc import Mapping
from typing import Any


def canonical(parts: Mapping[str, Any]) -> str:
    """One JSON text for the same parts, whatever their order."""
    return json.dumps(parts, sort_keys=True, separators=(",", ":"))


def spec_hash(spec: str) -> str:
    """First 16 hex digits of the SHA-256 of a spec text."""
    return hashlib.sha256(spec.encode()).hexdigest()[:16]
