"""The recipes of docs/extending.md, followed in a copy of the repository: `python tests/recipes/followed.py FOLDER` follows all of them.

The copy has the working tree's files, knows the commits that stored rows name, and reads the stored rows of this checkout.
"""

import os
import re
import shutil
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
RECIPES = dict(re.findall(r"^## (Add .*?)\n(.*?)(?=^## |\Z)", (ROOT / "docs/extending.md").read_text(), re.M | re.S))
BLOCK = re.compile(
    r"(?:^ *File: `(?P<path>[^`]+)`\n\n)?^(?P<indent> *)```(?P<kind>\w+)\n(?P<text>.*?)^ *```$", re.M | re.S
)
# What writes files and blocks of documents that follow from tables; the other blocks follow from stored rows.
BLOCKS = ("axes", "cells", "columns", "format-bars", "packages", "rules")
GENERATORS = (("-m", "moe_routing_bench.config.sections"), ("docs/generate.py", *BLOCKS))


def blocks(recipe: str) -> Iterator[re.Match[str]]:
    """The files, differences and commands of a recipe, in order."""
    return BLOCK.finditer(recipe)


def write(folder: Path, block: re.Match[str]) -> Path:
    """Write the file of a block, or apply its difference, below a folder; returns its path."""
    path = folder / block["path"]
    path.parent.mkdir(exist_ok=True)
    if block["kind"] == "diff":
        path.write_text(_patched(path.read_text(), re.sub(f"^{block['indent']}", "", block["text"], flags=re.M)))
    else:
        path.write_text(textwrap.dedent(block["text"]))
    return path


def _patched(old: str, difference: str) -> str:
    """`old` with the difference applied; its context must be there exactly once."""
    lines = difference.splitlines(keepends=True)
    before = "".join(line[1:] for line in lines if line[0] in " -")
    after = "".join(line[1:] for line in lines if line[0] in " +")
    assert ("\n" + old).count("\n" + before) == 1, f"not there, or more than once:\n{before}"
    return ("\n" + old).replace("\n" + before, "\n" + after)[1:]


def _compiled(source: Path) -> Iterator[Path]:
    """What Python and pytest have made of a source, which counts in a copy that has the time of the source, too."""
    return (source.parent / "__pycache__").glob(f"{source.stem}.*.pyc") if source.suffix == ".py" else iter(())


def tree(folder: Path) -> None:
    """Make a copy of the repository in a new folder, with the files and differences of all recipes, and commit it."""

    def git(*words: str, cwd: Path = folder) -> str:
        command = ["git", "-c", "user.name=recipes", "-c", "user.email=recipes@example.org", *words]
        return subprocess.run(command, cwd=cwd, capture_output=True, text=True, check=True).stdout

    for name in git("ls-files", "-co", "--exclude-standard", "-z", cwd=ROOT).split("\0"):
        if (ROOT / name).is_file() and not name.startswith("results/"):
            for one in (ROOT / name, *_compiled(ROOT / name)):
                (folder / one.relative_to(ROOT)).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(one, folder / one.relative_to(ROOT))
    for name in (".venv", "results"):
        if (ROOT / name).exists():
            (folder / name).symlink_to(ROOT / name)
    git("init", "-q")
    objects = git("rev-parse", "--path-format=absolute", "--git-path", "objects", cwd=ROOT)
    (folder / ".git/objects/info/alternates").write_text(objects)
    for recipe in RECIPES.values():
        for block in blocks(recipe):
            if block["kind"] != "sh":
                write(folder, block)
    for program in GENERATORS:
        subprocess.run([sys.executable, *program], cwd=folder, env=environment(folder), check=True)
    git("add", "-A")
    git("commit", "-qm", "All recipes")


def environment(folder: Path) -> dict[str, str]:
    """The variables of a program that imports the sources of a copy, without those of the pytest that runs it."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    return inherited | {"PYTHONPATH": str(folder / "src"), "MOE_ROUTING_BENCH_DEVICE": "cpu"}


if __name__ == "__main__":
    tree(Path(sys.argv[1]).absolute())
