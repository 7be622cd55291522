"""A plugin of pytest: of each test it leaves the first case, and those of entries that the recipes add."""

import pytest

NEW = ("torch_index", "count", "fp8_block64", "int4_g16", "topk_uniform", "topk_temperature", "scaling", "tiny-moe")
_FOUND: set[str] = set()  # of NEW


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    seen, kept, left = set(), [], []
    for item in items:
        test, _, parameters = item.nodeid.partition("[")
        (kept if test not in seen or any(name in parameters for name in NEW) else left).append(item)
        seen.add(test)
        _FOUND.update(name for name in NEW if name in parameters)
    config.hook.pytest_deselected(items=left)
    items[:] = kept


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    terminalreporter.write_line(f"new entries that have cases: {' '.join(sorted(_FOUND))}")
