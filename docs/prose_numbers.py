"""Every measured figure in the documents' prose is computed, or listed with the reason why it is not: `python docs/prose_numbers.py`.

A figure is a number with a unit of measurement (µs, %, x, TFLOP/s, ...), with a decimal point, or `53 of 75`, outside of code, links and generated blocks. A
comment behind it says that it is computed, `1.19<!--=lead-->`: `docs/generate.py` fills in what `docs/computed.py` makes of stored rows. All others are in
`docs/prose_numbers.yaml`, by page and one of `REASONS`. `--write` drops figures that are gone and adds new ones as `unsorted`, which tests refuse.
"""

import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import yaml

ROOT = Path(__file__).resolve().parents[1]
LIST = ROOT / "docs/prose_numbers.yaml"
REASONS = {
    "definition": "set by the method, the code, a config or arithmetic: limits, tolerances, bars, sizes, budgets, versions",
    "hardware": "what a data sheet or the architecture says",
    "others": "published by another project, with the source next to it",
    "simulation": "drawn by a simulation or property of the method that a test repeats",
    "experiment": "measured once, on a day that the text or the notebook names; no stored row has it",
    "estimate": "how long or how large something is for a reader; nothing is claimed by it",
}
EVERYTHING = "*"  # all figures of a page
UNSORTED = "unsorted"
MARK = re.compile(r"(\d[\d.,e-]*)<!--=([\w-]+)-->")
_HIDDEN = re.compile(
    r"<!-- generated: .*?<!-- end -->|^```.*?^```$|``.*?``|`[^`\n]*`|\]\([^)]*\)|https?://\S+|\d[\d.,e-]*<!--=[\w-]+-->",
    re.DOTALL | re.MULTILINE,
)
_UNITS = (
    *("%", r"per cent\b", r"[µun]s\b", r"m?s\b", r"seconds?\b", r"minutes?\b", r"h\b", r"hours?\b", r"[GT]FLOP/s"),
    *(r"[KMGT]i?B(?:/s)?\b", r"[kMGT]B/s", r"mJ\b", r"W\b", r"[MG]Hz\b", r"bits per byte\b", r"cycles?\b"),
)
_UNIT = rf"(?: ?(?:{'|'.join(_UNITS)})|x(?![\w-])| times\b)"
_NUMBER = r"\d[\d,]*(?:\.\d+)?(?:e-?\d+)?"
_SHARING = rf"(?:{_NUMBER}(?:,| to| and| or| of|;| instead of)? )*"  # numbers before it with the same unit
_OF_VERSIONS = (
    "torch",
    "triton",
    "Python",
    "CUDA",
    "QuACK",
    "vLLM",
    "SGLang",
    "version",
    "DSL",
    "NVCC",
    "kernels",
    "≥",
)
_DECIMAL = rf"{''.join(f'(?<!{name} )' for name in _OF_VERSIONS)}\d+\.\d+(?:e-?\d+)?(?![\d.]*[\w+]|\.\d)"
FIGURE = re.compile(
    rf"(?<![\w.#/+-]){_SHARING}(?:{_NUMBER}{_UNIT}|{_DECIMAL}|\d[\d,]* of (?:the |its |all )?\d[\d,]*\b)"
)


def pages() -> list[Path]:
    """README and the documents."""
    return [ROOT / "README.md", *sorted(ROOT.glob("docs/*.md")), *sorted(ROOT.glob("docs/*/*.md"))]


def figures(text: str) -> Iterator[str]:
    """Every figure of a page that is neither generated nor computed, in their order; one may go on in the next line."""
    for part in re.split(r"\n\s*\n|\n(?=[|#]|\s*(?:[-*]|\d+\.) )", _HIDDEN.sub("`", text)):
        if not part.startswith("#"):
            yield from (found[0] for found in FIGURE.finditer(" ".join(part.split())))


def stated() -> dict[str, list[str]]:
    """The figures of every page that has some, each once."""
    found = {str(page.relative_to(ROOT)): list(dict.fromkeys(figures(page.read_text()))) for page in pages()}
    return {name: figures for name, figures in found.items() if figures}


def listed() -> dict[str, dict[str, list[str]]]:
    """The file: figures by page and reason."""
    return yaml.safe_load(LIST.read_text()) if LIST.is_file() else {}


def missing(
    said: Mapping[str, Sequence[str]], known: Mapping[str, Mapping[str, Sequence[str]]]
) -> list[tuple[str, str]]:
    """Page and text of the figures that are not listed under one of `REASONS`."""
    found = []
    for page, texts in said.items():
        reasons = known.get(page, {})
        sorted_ones = {text for reason, entries in reasons.items() if reason in REASONS for text in entries}
        found += [(page, text) for text in texts if not {text, EVERYTHING} & sorted_ones]
    return found


def gone(said: Mapping[str, Sequence[str]], known: Mapping[str, Mapping[str, Sequence[str]]]) -> list[tuple[str, str]]:
    """Page and text of the listed figures that are no longer there."""
    return [
        (page, text)
        for page, reasons in known.items()
        for entries in reasons.values()
        for text in entries
        if text not in said.get(page, ()) and not (text == EVERYTHING and page in said)
    ]


def updated() -> dict[str, dict[str, list[str]]]:
    """The list without figures that are gone, and with new ones as `UNSORTED`."""
    said, known = stated(), listed()
    lost = set(gone(said, known))
    kept = {
        page: {reason: [text for text in texts if (page, text) not in lost] for reason, texts in reasons.items()}
        for page, reasons in known.items()
    }
    for page, text in missing(said, known):
        entries = kept.setdefault(page, {}).setdefault(UNSORTED, [])
        entries += [] if text in entries else [text]
    return {page: {why: texts for why, texts in reasons.items() if texts} for page, reasons in sorted(kept.items())}


def main(write: bool) -> int:
    """Print the figures that are neither computed nor listed, and listed ones that are gone; 1 if there are any."""
    if write:
        head = "# Figures in the documents' prose that are not computed from stored rows, by page and reason (docs/prose_numbers.py).\n"
        LIST.write_text(head + yaml.safe_dump(updated(), allow_unicode=True, sort_keys=True, width=140))
    said, known = stated(), listed()
    lines = [f"{page}: {text}: neither computed nor listed" for page, text in missing(said, known)]
    lines += [f"{page}: {text}: listed and gone" for page, text in gone(said, known)]
    print("\n".join(lines) or f"{sum(map(len, said.values()))} figures are listed")
    return int(bool(lines))


if __name__ == "__main__":
    sys.exit(main("--write" in sys.argv[1:]))
