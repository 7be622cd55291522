"""Plants the mutants of the lists written by hand, one at a time, in a copy of this checkout, and says which the tests of their module kill.

A mutant is a file of a package, a piece of it and what takes its place, and the tests that are run: the fast ones, or those with its
`marks`. ``python tests/planted.py [WORD ...]`` plants those whose file or piece has one of the words. Prints the survivors, and the share that is killed by package.
"""

import os
import shutil
import subprocess
import sys
import tempfile
from collections import defaultdict
from pathlib import Path

import yaml

ROOT = Path(__file__).resolve().parent.parent
LISTS = ("planted.yaml", "strangers.yaml", "newcomers.yaml", "outsiders.yaml", "passersby.yaml")
SECONDS = 180  # more is a mutant that hangs, which a test run would notice


def package(file: str) -> str:
    """The package of a file, `kernels` for those of the other one, and `workflow` for rules."""
    outside = {"../moe_routing_kernels/": "kernels", "../../workflow/": "workflow"}
    known = next((name for start, name in outside.items() if file.startswith(start)), None)
    return known or file.partition("/")[0].removesuffix(".py")


def killed(root: Path, mutant: dict[str, str]) -> bool:
    """Whether a test fails with this mutant, in a copy of the checkout."""
    path = root / "src" / "moe_routing_bench" / mutant["file"]
    text = path.read_text(encoding="utf-8")
    if mutant["old"] not in text:
        raise SystemExit(f"{mutant['file']} has no {mutant['old']!r} any more")
    path.write_text(text.replace(mutant["old"], mutant["new"], 1), encoding="utf-8")
    command = [sys.executable, "-m", "pytest", "-qx", "-p", "no:xdist", "-p", "no:cacheprovider"]
    command += ["-m", mutant.get("marks", "not slow")]
    environment = os.environ | {"PYTHONPATH": str(root / "src"), "PYTHONDONTWRITEBYTECODE": "1"}
    try:
        run = subprocess.run(
            [*command, *mutant["tests"].split()], cwd=root, env=environment, timeout=SECONDS, capture_output=True
        )
    except subprocess.TimeoutExpired:
        return True
    finally:
        path.write_text(text, encoding="utf-8")
    return run.returncode == 1


def main(*words: str) -> None:
    """Plant them, and print what became of them."""
    texts = [Path(__file__).with_name(name).read_text(encoding="utf-8") for name in LISTS]
    mutants = [mutant for text in texts for mutant in yaml.safe_load(text)]
    outcomes: dict[str, list[bool]] = defaultdict(list)
    with tempfile.TemporaryDirectory() as folder:
        root = Path(shutil.copytree(ROOT, Path(folder) / "copy", ignore=shutil.ignore_patterns(".venv", ".git")))
        for mutant in mutants:
            if not words or any(word in f"{mutant['file']} {mutant['old']}" for word in words):
                dead = killed(root, mutant)
                outcomes[package(mutant["file"])].append(dead)
                if not dead:
                    print(f"{mutant['file']}:\n  - {mutant['old']}\n  + {mutant['new']}", flush=True)
    for name, dead in [*sorted(outcomes.items()), ("all", [dead for each in outcomes.values() for dead in each])]:
        print(f"{name:<16} {sum(dead):>4} of {len(dead):>4}")


if __name__ == "__main__":
    main(*sys.argv[1:])
