"""Colours and symbols that every rendering of a chart shares: of implementations, stages and routers, on white paper and on a dark page.

Chosen by farthest points in OKLab, as seen with normal vision and with deuteranopia and protanopia (Machado et al. 2009), among colours of
a contrast of at least 3:1 on white; the dark ones mirror their lightness and have 3:1 on the page's dark background.
"""

import zlib
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from importlib import resources
from types import MappingProxyType

import yaml

from moe_routing_bench.benches.layer.auto import STAGE as SHARED
from moe_routing_bench.benches.registry import BENCHES
from moe_routing_bench.comparison import origins
from moe_routing_bench.grid.run_spec import DENSE
from moe_routing_kernels.formats import weights
from moe_routing_kernels.routers.zoo import ZOO

PAPER, NIGHT = "#ffffff", "#161616"  # what they are drawn on; report.css says the same
_FILE = yaml.safe_load(
    resources.files("moe_routing_bench.figures").joinpath("palette.yaml").read_text(encoding="utf-8")
)
PALETTE: Mapping[str, str] = MappingProxyType(_FILE["palette"])
OTHER, BLACK = "#767676", "#000000"  # of a name without a colour of its own; of references
_DARK = {**PALETTE, OTHER: "#8f8f8f", BLACK: "#f0f0f0"}
# As Observable Plot names them; the last is of an eighth implementation of one colour alone.
SYMBOLS, EIGHTH = ("circle", "triangle2", "square", "diamond2", "cross", "triangle", "star"), "hexagon"


def assigned(
    names: Iterable[str], together: Iterable[Collection[str]] = (), others: Collection[str] = ()
) -> dict[str, str]:
    """A colour for each name, in the order of the palette, so that a later name never moves an earlier one. When it is used up, a name
    has the first of the colours that fewest have with which it is drawn: `together` are the names of each such picture. Of `others` none
    has the first colour then, which is that of ours. A colour for which no symbol is left has no more names, as long as there are others."""
    palette, pictures, result = list(PALETTE), [set(group) for group in together], {}
    for i, name in enumerate(names):
        near = {other for picture in pictures if name in picture for other in picture}
        taken, of_all = Counter(result[other] for other in near if other in result), Counter(result.values())
        left = [tint for tint in palette[name in others :] if of_all[tint] <= len(SYMBOLS)] or palette
        result[name] = palette[i] if i < len(palette) else min(left, key=taken.__getitem__)
    return result


NAMES = tuple(dict.fromkeys(i.name for bench in BENCHES.values() for i in bench.implementations))  # legend order
_OF = {name: [one.name for one in bench.implementations] for name, bench in BENCHES.items()}
# Benches of one figure: the stages of routing, and those over ranks.
_TOGETHER = (
    ["gate", "routing", *(stage.name for stage in BENCHES["routing"].stages)],
    [name for name, bench in BENCHES.items() if "ranks" in bench.axes],
)
COLORS = assigned(
    [*_FILE["first"], *(name for name in NAMES if name not in _FILE["first"])],
    [*_OF.values(), *([one for name in group for one in _OF[name]] for group in _TOGETHER)],
    {
        one.name
        for name, bench in BENCHES.items()
        for one in bench.implementations
        if one.name not in origins.ours(name)
    },
)
_ROUTERS = assigned(ZOO, [tuple(ZOO)])
_COMPOSITES = sorted((bench for bench in BENCHES.values() if bench.stages), key=lambda bench: -len(bench.stages))
_STAGES = [*dict.fromkeys(stage.name for bench in _COMPOSITES for stage in bench.stages), SHARED.name]
_RARE = [name for name in weights.NAMES if name not in _FILE["formats"]]
FORMATS: Mapping[str, str] = _FILE["formats"] | assigned(_RARE, [_RARE])  # of weights, in every figure
STAGES: Mapping[str, str] = dict(zip(_STAGES, _FILE["stages"], strict=True))  # those of the longest table first
FUSED: tuple[str, ...] = tuple(_FILE["fused"])  # of parts that are several stages


def _places() -> dict[str, int]:
    """Where a name's symbol stands: implementations of one colour have different ones."""
    alike: dict[str, list[str]] = {}
    for name, tint in COLORS.items():
        alike.setdefault(tint, []).append(name)
    order = list(COLORS)
    count = len(SYMBOLS)
    result = {
        name: (order.index(names[0]) + i) % count if i < count else i % (count + 1)
        for names in alike.values()
        for i, name in enumerate(names)
    }
    result |= {name: i % count for i, name in enumerate(FORMATS)}
    result |= {"ours": SYMBOLS.index("circle"), "fastest": SYMBOLS.index("triangle")}  # of pages of platforms
    # That of the dense model is not that of a router whose colour is nearly black.
    return result | {name: i % count for i, name in enumerate(ZOO)} | {DENSE: SYMBOLS.index("triangle2")}


_PLACES = _places()


def color(name: str) -> str:
    """The implementation's colour. An implementation in no table, such as another package's, gets a colour of the palette by its name."""
    return COLORS.get(name) or list(PALETTE)[zlib.crc32(name.encode()) % len(PALETTE)]


def tints(names: Iterable[str]) -> dict[str, str]:
    """Colours of implementations, in table order."""
    return {name: color(name) for name in ordered(names)}


def router(name: str) -> str:
    """The router's colour: black for the dense model, grey for a router that is no longer in the zoo."""
    return BLACK if name == DENSE else _ROUTERS.get(name, OTHER)


def dark(tint: str) -> str:
    """The colour of the same name on a dark page. Raises KeyError for a colour outside the palette."""
    return _DARK[tint]


def symbol(name: str, place: int = 0) -> str:
    """The symbol of a series, a second mark of identity: of an implementation and a router the same in every chart; of others by `place`."""
    known = _PLACES.get(name.split("+")[0].split(" ")[0], place % len(SYMBOLS))
    return (*SYMBOLS, EIGHTH)[known]


def symbols(colors: Mapping[str, str]) -> dict[str, str]:
    """The symbols of the series of a chart: no two of one colour have the same, as long as there are others."""
    taken, result = set(), {}
    for place, (name, tint) in enumerate(colors.items()):
        own = symbol(name, place)
        first = SYMBOLS.index(own) if own in SYMBOLS else 0
        order = [own, *SYMBOLS[first:], *SYMBOLS[:first]]
        result[name] = next((one for one in order if (tint, one) not in taken), own)
        taken.add((tint, result[name]))
    return result


def ordered(names: Iterable[str]) -> list[str]:
    """Names of implementations in table order, each once; unknown ones last."""
    result = set(names)
    return [n for n in NAMES if n in result] + sorted(result - set(NAMES))
