"""The hooks of the documents' site: every page has a place, links hold there, and lists keep their code."""

import importlib
from pathlib import Path
from types import ModuleType

import pytest
import yaml

ROOT = Path(__file__).parents[2]
REPOSITORY = "https://host/owner/name"


@pytest.fixture
def pages(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(ROOT / "docs")
    return importlib.import_module("pages")


@pytest.mark.parametrize(
    ("source", "link", "shown"),
    [
        ("README.md", "[a](docs/method.md#verdicts)", "[a](method.md#verdicts)"),
        ("README.md", "![a](docs/img/bandwidth.png)", "![a](img/bandwidth.png)"),
        ("docs/seeds.md", "[a](../config/README.md#keys)", "[a](config.md#keys)"),
        ("docs/seeds.md", "[a](../src/x.py)", f"[a]({REPOSITORY}/blob/main/src/x.py)"),
        ("examples/own_kernel/README.md", "[a](../../docs/usage.md)", "[a](../usage.md)"),
        ("docs/seeds.md", "[a](#here) [b](https://x.y/z.md)", "[a](#here) [b](https://x.y/z.md)"),
    ],
)
def test_links_hold_in_the_site(source: str, link: str, shown: str, pages: ModuleType) -> None:
    assert pages.linked(link, source, REPOSITORY) == shown


def test_without_a_repository_its_files_are_not_linked(pages: ModuleType) -> None:
    assert pages.linked("[a](../src/x.py)", "docs/seeds.md", None) == "a"


def test_code_in_a_list_is_indented_by_four(pages: ModuleType) -> None:
    text = "1. One\n   more:\n\n   ```sh\n   ls\n   ```\n\n- Two\n  more\n\nText\n    code\n"
    assert (
        pages.indented(text) == "1. One\n    more:\n\n    ```sh\n    ls\n    ```\n\n- Two\n    more\n\nText\n    code\n"
    )


def test_every_page_is_in_the_navigation() -> None:
    """MkDocs would warn, but tests do not install it."""
    text = (ROOT / "mkdocs.yml").read_text().replace("!ENV", "")
    listed = {
        page
        for section in yaml.safe_load(text)["nav"]
        for value in section.values()
        for page in ([value] if isinstance(value, str) else value)
    }
    assert listed >= {str(path.relative_to(ROOT / "docs")) for path in ROOT.glob("docs/**/*.md")}
