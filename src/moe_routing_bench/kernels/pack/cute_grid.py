"""How many groups of threads the CuTe DSL pack kernels launch."""

from typing import Any

import cutlass
import cutlass.cute as cute


def token_groups(tokens: Any, rows: Any, checked_rows: int) -> Any:
    """How many groups of threads handle every token, and check every output row where each checks `checked_rows`."""
    return cutlass.max(tokens, cute.ceil_div(rows, checked_rows)) if checked_rows else tokens
