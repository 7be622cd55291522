"""Colours that every picture shares: of a name on white paper, and of the same name on a dark page.

Chosen by farthest points in OKLab, as seen with normal vision and with deuteranopia and protanopia (Machado et al. 2009), among colours of
a contrast of at least 3:1 on white; the dark ones mirror their lightness and have 3:1 on the page's dark background.
"""

from collections import Counter
from collections.abc import Collection, Iterable

PAPER, NIGHT = "#ffffff", "#161616"  # what they are drawn on; report.css says the same
PALETTE = {
    "#0173b2": "#409bdd", "#d55e00": "#e0701f", "#550000": "#fedad4", "#220088": "#d5dcfe", "#992255": "#f87ba6", "#005500": "#8dd787", "#5533aa": "#b2a4fd", "#779988": "#688979",
    "#7788ff": "#6472e7", "#550055": "#fec1fb", "#996666": "#b07b7b", "#3399cc": "#1e8abc", "#445577": "#9baed5", "#443333": "#e1cbcb", "#6666dd": "#7577f0", "#ee6666": "#d24c4f",
    "#556622": "#9aae6a", "#339944": "#319843",
}  # fmt: skip
OTHER = "#767676"  # of what has no colour of its own
_DARK = PALETTE | {OTHER: "#8f8f8f", "#000000": "#f0f0f0"}


def assigned(names: Iterable[str], together: Iterable[Collection[str]] = ()) -> dict[str, str]:
    """A colour for each name, in the order of the palette, so that a later name never moves an earlier one. When it is used up, a name
    has the first of the colours that fewest have with which it is drawn: `together` are the names of each such picture."""
    palette, pictures, found = list(PALETTE), [set(one) for one in together], {}
    for i, name in enumerate(names):
        others = {other for picture in pictures if name in picture for other in picture}
        taken = Counter(found[other] for other in others if other in found)
        found[name] = palette[i] if i < len(palette) else min(palette, key=taken.__getitem__)
    return found


def dark(color: str) -> str:
    """The colour of the same name on a dark page. Raises KeyError for one that is not of the palette."""
    return _DARK[color]
