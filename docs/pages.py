"""Hooks of MkDocs (mkdocs.yml): pages that lie outside of docs/, links between pages, and lists as Markdown hosts read them.

A link from one page to another stays; one to any other file of the repository becomes a link to the repository, or plain text without `repo_url`.
"""

import os
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
OUTSIDE = {
    "README.md": "index.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
    "SECURITY.md": "security.md",
    "config/README.md": "config.md",
    "examples/own_kernel/README.md": "examples/own_kernel.md",
    "examples/own_cute_kernel/README.md": "examples/own_cute_kernel.md",
    "examples/own_model/README.md": "examples/own_model.md",
}
LINK = re.compile(r"(!?)\[([^\]]*)\]\((?!https?:|#|mailto:)([^)#\s]+)(#[^)\s]*)?\)")
FENCE = re.compile(r"^```.*?^```$", re.M | re.S)
ITEM = re.compile(r"(- |\d+\. )")


def site_path(source: str) -> str | None:
    """Where a file of the repository lies in the site; None where it is no page or picture."""
    if source in OUTSIDE:
        return OUTSIDE[source]
    inside = source.startswith("docs/") and source.endswith((".md", ".svg", ".png"))
    return source.removeprefix("docs/") if inside and (ROOT / source).is_file() else None


def linked(text: str, source: str, repository: str | None) -> str:
    """The text of a page of the repository with links that hold in the site."""
    here = site_path(source) or ""

    def replaced(link: re.Match[str]) -> str:
        target = os.path.normpath(Path(source).parent / link[3])
        page = site_path(target)
        if page:
            address = os.path.relpath(page, Path(here).parent)
        elif repository:
            address = f"{repository.rstrip('/')}/blob/main/{target}"
        else:
            return link[2]
        return f"{link[1]}[{link[2]}]({address}{link[4] or ''})"

    return LINK.sub(replaced, text)


def indented(text: str) -> str:
    """The text with four blanks before what belongs to an item of a list, as Python-Markdown wants it; other hosts take two or three."""
    lines, more, width = [], 0, 0
    for line in text.splitlines():
        item = ITEM.match(line)
        if item:
            width, more = len(item[1]), 4 - len(item[1])
        elif line and not line.startswith(" "):
            width = more = 0
        inside = width and line.startswith(" " * width)
        lines.append(" " * more + line if inside else line)
    return "\n".join(lines) + "\n"


def on_files(files, config):
    """Add the pages that lie outside of docs/."""
    from mkdocs.structure.files import File

    for source, page in OUTSIDE.items():
        files.append(File.generated(config, page, content=(ROOT / source).read_text()))
    return files


def on_page_markdown(markdown: str, page, config, files) -> str:
    """Mend links and lists; code blocks at the margin stay."""
    sources = {to: source for source, to in OUTSIDE.items()}
    text = linked(markdown, sources.get(page.file.src_uri, f"docs/{page.file.src_uri}"), config.repo_url)
    parts, end = [], 0
    for code in FENCE.finditer(text):
        parts += [indented(text[end : code.start()]), code[0] + "\n"]
        end = code.end() + 1
    return "".join([*parts, indented(text[end:])])
