"""What a mutation run found: the score of every module, and the survivors with what they change. `make mutants` runs it.

A mutant is one small change of a function; it is killed where a test fails. Three kinds are counted apart, because no test should hold them:
other wording of a text that has a space in it; `strict=` of a zip whose lengths are equal by construction; and lines of equal meaning, as
`_EQUAL` has them. Accepted survivors are listed in mutants.yaml with the reason: one by one, or, where a function runs only on a GPU or in
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
# What a surviving mutant may change without another meaning here: pattern and what to read in its place.
_EQUAL = (
    (
        re.compile(r"(?<=[<>])="),
        "",
    ),  # times, widths and ratios never equal a limit to the last bit; limits of whole numbers have tests of their own
    (re.compile(r"\bFalse\b"), "None"),
    (re.compile(r"(?<=astype\()float(?=\))"), "None"),
    (
        re.compile(r", *device=[\w.]+|, *(?=\))"),
        "",
    ),  # a test run has no GPU, and None is the CPU; tests/gpu has the tensors of a GPU
    (re.compile(r"[\w.]*\bdevice\b"), "None"),
)


def changed(mutant: str, path: Path) -> tuple[str, str]:
    """The first line that a mutant takes away, and the one that it puts in its place."""
    lines = get_diff_for_mutant(mutant, path=path).splitlines()
    found = {
        sign: [line[1:].strip() for line in lines if re.match(rf"\{sign}(?!\{sign}\{sign})", line)] for sign in "-+"
    }
    return (found["-"] or [""])[0], (found["+"] or [""])[0]


def kind_of(old: str, new: str) -> str:
    """`wording`, `strict`, `equal` or `logic`."""
    if _TEXT.sub("", old) == _TEXT.sub("", new) and any(
        " " in text for text in set(_TEXT.findall(old)) - set(_TEXT.findall(new))
    ):
        return "wording"
    without = re.compile(r",? *strict=\w+,?")
    if without.sub("", old).replace(", )", ")") == without.sub("", new).replace(", )", ")"):
        return "strict"
    return "equal" if any(pattern.sub(to, old) == pattern.sub(to, new) for pattern, to in _EQUAL) else "logic"


def main() -> None:
    """Print a line per module, then every survivor that mutants.yaml does not list."""
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
            place = "accepted" if (name, new) in accepted else "elsewhere" if (name, None) in accepted else kind
            dead = status in KILLED
            column = "killed" if dead and kind in ("logic", "equal") else f"{kind} killed" if dead else place
            scores[str(path)][column] += 1
            if not dead and place == "logic":
                survivors.append(f"{name}: {status}\n  - {old}\n  + {new}")
    print(
        f"{'module':<60} {'killed':>7} {'left':>6} {'score':>7} {'accepted':>9} {'runs elsewhere':>15} {'wording left':>13} {'equal left':>11}"
    )
    for path, found in [*scores.items(), ("all", sum(scores.values(), Counter()))]:
        logic = found["killed"] + found["logic"]
        score = f"{found['killed'] / logic:.1%}" if logic else "–"
        print(
            f"{path:<60} {found['killed']:>7} {found['logic']:>6} {score:>7} {found['accepted']:>9} {found['elsewhere']:>15} {found['wording']:>13} {found['equal']:>11}"
        )
    print("\n".join(["", *survivors]))


if __name__ == "__main__":
    main()
