"""What Chromium prints of a page: the characters on each page of the PDF and where they lie. Reads what Chromium writes, and no other PDF."""

import re
import subprocess
import unicodedata
import zlib
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from browser import browser

_OBJECT = re.compile(rb"(\d+) 0 obj\n(.*?)\nendobj", re.DOTALL)
_TOKEN = re.compile(r"<[0-9A-Fa-f]+>|/[^\s/<>\[\]()]+|-?[\d.]+|[A-Za-z*]+")
_NUMBERS = {"cm": 6, "Tm": 6, "Td": 2, "re": 4}


@dataclass(frozen=True)
class Page:
    """A printed page: its size in points, its characters in the order drawn, the left ends of these (points from the left), those that the
    clip in force would cut off there, and how many points a CSS pixel of the text has."""

    width: float
    text: str
    left: list[float]
    cut: str
    scale: float


def printed(page: Path, folder: Path) -> list[Page]:
    """The pages that `page` prints on, its scripts run; `folder` is for the profile and the PDF."""
    out = folder / "printed.pdf"
    command = [
        browser(),
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        f"--user-data-dir={folder / 'profile'}",
        "--virtual-time-budget=3000",
        "--no-pdf-header-footer",
        f"--print-to-pdf={out}",
        page.as_uri(),
    ]
    subprocess.run(command, capture_output=True, timeout=120, check=True)
    objects = {int(number): body for number, body in _OBJECT.findall(out.read_bytes())}
    return [_page(body, objects) for body in objects.values() if re.search(rb"/Type /Page\b", body)]


def _stream(body: bytes) -> str:
    found = re.search(rb"stream\n(.*)\nendstream", body, re.DOTALL)
    assert found, body[:80]
    return (zlib.decompress(found[1]) if b"FlateDecode" in body else found[1]).decode("latin-1")


def _page(body: bytes, objects: dict[int, bytes]) -> Page:
    text = body.decode("latin-1")
    box, contents = re.search(r"/MediaBox \[0 0 ([\d.]+)", text), re.search(r"/Contents (\d+) 0 R", text)
    assert box and contents
    fonts = {name: _letters(objects[int(number)], objects) for name, number in re.findall(r"/(F\d+) (\d+) 0 R", text)}
    return _drawn(_stream(objects[int(contents[1])]), fonts, float(box[1]))


def _letters(font: bytes, objects: dict[int, bytes]) -> dict[int, str]:
    """Glyph to text, of a font's ToUnicode map."""
    number = re.search(rb"/ToUnicode (\d+) 0 R", font)
    if not number:
        return {}
    found, text = {}, _stream(objects[int(number[1])])
    for block in re.findall(r"beginbfchar\n(.*?)endbfchar", text, re.DOTALL):
        for glyph, letter in re.findall(r"<(\w+)> <(\w+)>", block):
            found[int(glyph, 16)] = bytes.fromhex(letter).decode("utf-16-be")
    for block in re.findall(r"beginbfrange\n(.*?)endbfrange", text, re.DOTALL):
        for first, last, letter in re.findall(r"<(\w+)> <(\w+)> <(\w+)>", block):
            found |= {int(first, 16) + i: chr(int(letter, 16) + i) for i in range(int(last, 16) - int(first, 16) + 1)}
    return found


def _matrix(numbers: list[float]) -> np.ndarray:
    a, b, c, d, e, f = numbers
    return np.array([[a, b, 0], [c, d, 0], [e, f, 1]])


def _drawn(stream: str, fonts: dict[str, dict[int, str]], width: float) -> Page:
    """Follows transformations, clips and text positions; what else is drawn is passed over."""
    state, saved, area, at = (np.eye(3), (0.0, width)), [], None, np.eye(3)
    letters: dict[int, str] = {}
    found: list[tuple[str, float, bool, float]] = []
    held: list[str] = []
    for token in _TOKEN.findall(stream):
        if token[0] in "</-." or token[0].isdigit():
            held.append(token)
            continue
        numbers = [float(one) for one in held[-_NUMBERS.get(token, 0) :]] if token in _NUMBERS else []
        transform, clip = state
        if token == "q":
            saved.append(state)
        elif token == "Q":
            state = saved.pop()
        elif token == "cm":
            state = (_matrix(numbers) @ transform, clip)
        elif token == "re":
            area = sorted((np.array([[numbers[0], 0, 1], [numbers[0] + numbers[2], 0, 1]]) @ transform)[:, 0])
        elif token == "W" and area is not None:
            state = (transform, (max(clip[0], area[0]), min(clip[1], area[1])))
        elif token == "Tf":
            letters = fonts[held[-2][1:]]
        elif token == "Tm":
            at = _matrix(numbers)
        elif token == "Td":
            at = _matrix([1, 0, 0, 1, *numbers]) @ at
        elif token == "Tj":
            x = float((at @ transform)[2, 0])
            text = "".join(letters.get(int(held[-1][i : i + 4], 16), "") for i in range(1, len(held[-1]) - 1, 4))
            found.append((text, x, not clip[0] - 1 <= x <= clip[1] + 1, abs(float(transform[0, 0]))))
        held = []
    return Page(
        width,
        unicodedata.normalize("NFKC", "".join(text for text, *_ in found)),  # ligatures as letters
        [x for _, x, _, _ in found],
        "".join(text for text, _, cut, _ in found if cut),
        max((scale for *_, scale in found), default=0.0),
    )
