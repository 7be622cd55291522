"""What a mutation run found: the score of every module, and the survivors with what they change. `make mutants` runs it.

A mutant is one small change of a function; it is killed where a test fails. Two kinds are counted apart, because no test should hold
them: other wording of a text that has a space in it, and `strict=` of a zip whose lengths are equal by construction. Survivors
that are accepted stand in mutants.yaml beside this file, with the reason: one by one, or, where a function runs only on a GPU or in
a process that a mutation run cannot see, all that survive in it. These have a column of their own.
"""

import json
import re
from collections import Counter, defaultdict
from pathlib import Path

import yaml
from mutmut.mutation.diff_apply import get_diff_for_mutant
from mutmut.stats import status_by_exit_code

ACCEPTED = Path(__file__).with_suffix(".yaml")
FOLDER = Path("mutants")
KILLED = ("killed", "timeout", "segfault", "caught by type check")
_TEXT = re.compile(r"""f?("[^"]*"|'[^']*')""")


def changed(mutant: str, path: Path) -> tuple[str, str]:
    """The first line that a mutant takes away, and the one that it puts in its place."""
    lines = get_diff_for_mutant(mutant, path=path).splitlines()
    found = {
        sign: [line[1:].strip() for line in lines if re.match(rf"\{sign}(?!\{sign}\{sign})", line)] for sign in "-+"
    }
    return (found["-"] or [""])[0], (found["+"] or [""])[0]


def kind_of(old: str, new: str) -> str:
    """`wording`, `strict` or `logic`."""
    if _TEXT.sub("", old) == _TEXT.sub("", new) and any(
        " " in text for text in set(_TEXT.findall(old)) - set(_TEXT.findall(new))
    ):
        return "wording"
    without = re.compile(r",? *strict=\w+,?")
    return "strict" if without.sub("", old).replace(", )", ")") == without.sub("", new).replace(", )", ")") else "logic"


def main() -> None:
    """Print a line per module, then every survivor that nobody has accepted."""
    accepted = {(one["in"], one.get("to")) for one in yaml.safe_load(ACCEPTED.read_text())}
    survivors, scores = [], defaultdict(Counter)
    for meta in sorted(FOLDER.rglob("*.meta")):
        path = meta.relative_to(FOLDER).with_suffix("")
        for mutant, code in json.loads(meta.read_text())["exit_code_by_key"].items():
            status = status_by_exit_code[code]
            if status == "not checked":
                continue
            name, (old, new) = mutant.rpartition("__mutmut_")[0], changed(mutant, path)
            kind = kind_of(old, new)
            said = "accepted" if (name, new) in accepted else "elsewhere" if (name, None) in accepted else kind
            scores[str(path)][
                "killed" if status in KILLED and kind == "logic" else said if status not in KILLED else f"{kind} killed"
            ] += 1
            if status not in KILLED and said == "logic":
                survivors.append(f"{name}: {status}\n  - {old}\n  + {new}")
    print(
        f"{'module':<60} {'killed':>7} {'left':>6} {'score':>7} {'accepted':>9} {'runs elsewhere':>15} {'wording left':>13}"
    )
    for path, found in [*scores.items(), ("all", sum(scores.values(), Counter()))]:
        logic = found["killed"] + found["logic"]
        score = f"{found['killed'] / logic:.1%}" if logic else "–"
        print(
            f"{path:<60} {found['killed']:>7} {found['logic']:>6} {score:>7} {found['accepted']:>9} {found['elsewhere']:>15} {found['wording']:>13}"
        )
    print("\n".join(["", *survivors]))


if __name__ == "__main__":
    main()
