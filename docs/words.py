"""Refuse words of `docs/words.toml` in documents, docstrings and comments: `python docs/words.py`.

A hit in a document fails. In code, folders may have as many hits in all as `[left]` in that file says. `--write` sets these counts to those of today,
unless their total would rise.
"""

import ast
import functools
import io
import re
import sys
import tokenize
import tomllib
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[1]
RULES = ROOT / "docs/words.toml"
DOCUMENTS = ("*.md", "docs/*.md", "config/README.md", "examples/*/README.md", "src/*/README.md", ".github/**/*.md")
CODE = (
    "src/**/*.py",
    "docs/*.py",
    "examples/**/*.py",
    "workflow/**/*.smk",
    "workflow/**/*.sh",
    "workflow/**/*.py",
    "config/**/*.yaml",
    "Makefile",
    "Snakefile",
)
NOT_PROSE = re.compile(r"^ *```.*?^ *```|`[^`\n]+`|\]\([^)]*\)|https?://\S+", re.M | re.S)
COMMENT = re.compile(r"(?:^|\s)#+ ?(.*)$")


class Hit(NamedTuple):
    """Where a rule matches, and what it says to write."""

    place: str
    text: str
    instead: str


@functools.cache
def parsed(text: str) -> dict[str, Any]:
    """A text in TOML. Thousands of comments are held against the same rules."""
    return tomllib.loads(text)


def rules() -> list[tuple[re.Pattern[str], str]]:
    """Patterns, and what to write in place of a match."""
    return [(re.compile(rule["pattern"], re.M), rule["instead"]) for rule in parsed(RULES.read_text())["rule"]]


def matches(text: str) -> Iterator[tuple[int, str, str]]:
    """The line (from 0), the text and the advice of every match in prose, code spans and links left out."""
    prose = NOT_PROSE.sub(lambda code: "\n" * code[0].count("\n"), text)
    for pattern, instead in rules():
        for found in pattern.finditer(prose):
            yield prose.count("\n", 0, found.start()), found[0], instead


def comments(path: Path) -> Iterator[tuple[int, str]]:
    """The comments and docstrings of a file, with their lines (from 1)."""
    source = path.read_text()
    if path.suffix != ".py":
        yield from (
            (number, found[1]) for number, line in enumerate(source.splitlines(), 1) if (found := COMMENT.search(line))
        )
        return
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            yield token.start[0], token.string.lstrip("# ")
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            text = ast.get_docstring(node)
            if text:
                yield node.body[0].lineno, text


def in_documents() -> list[Hit]:
    """Every hit in a document."""
    pages = sorted({page for pattern in DOCUMENTS for page in ROOT.glob(pattern)})
    return [
        Hit(f"{page.relative_to(ROOT)}:{line + 1}", text, instead)
        for page in pages
        for line, text, instead in matches(page.read_text())
    ]


def in_code() -> dict[str, list[Hit]]:
    """Every hit in comments and docstrings, by folder."""
    hits: dict[str, list[Hit]] = {}
    for path in sorted({path for pattern in CODE for path in ROOT.glob(pattern)}):
        name = path.relative_to(ROOT)
        for start, text in comments(path):
            for line, word, instead in matches(text):
                hits.setdefault("/".join(name.parts[:3][: len(name.parts) - 1]) or ".", []).append(
                    Hit(f"{name}:{start + line}", word, instead)
                )
    return hits


def left() -> dict[str, int]:
    """How many hits each folder may have."""
    return parsed(RULES.read_text()).get("left", {})


def too_many(hits: dict[str, list[Hit]], allowed: dict[str, int]) -> list[Hit]:
    """The hits of every folder that has more of them than it may have; none while the total is no higher, since files move."""
    if sum(map(len, hits.values())) <= sum(allowed.values()):
        return []
    return [hit for folder, found in hits.items() if len(found) > allowed.get(folder, 0) for hit in found]


def write(counts: Counter[str]) -> None:
    """Set `[left]` to these counts; `SystemExit` where there would be more hits in all than before."""
    before = left()
    if before and counts.total() > sum(before.values()):
        raise SystemExit(f"error: {counts.total()} hits; allowed: at most {sum(before.values())}, as before")
    text = RULES.read_text().partition("\n[left]\n")[0]
    lines = "".join(f'"{folder}" = {count}\n' for folder, count in sorted(counts.items()))
    RULES.write_text(f"{text.rstrip()}\n\n[left]\n{lines}")


def main() -> None:
    """Print the hits and fail, or with `--write` lower the counts."""
    code = in_code()
    if "--write" in sys.argv[1:]:
        write(Counter({folder: len(found) for folder, found in code.items()}))
    hits = [*in_documents(), *too_many(code, left())]
    for hit in hits:
        print(f"{hit.place}: {hit.text.strip()!r}: write {hit.instead}")
    if hits:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
