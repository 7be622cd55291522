"""Figures, drawn, and all that they say."""

from collections.abc import Iterator

import pandas as pd
from matplotlib.artist import Artist
from matplotlib.axis import Axis
from matplotlib.figure import Figure

from moe_routing_bench.figures import FIGURES, paper


def draw(name: str, table: pd.DataFrame) -> tuple[Figure, str]:
    """The figure and all its texts."""
    figure = paper.draw(FIGURES[name], table)
    return figure, "\n".join(texts(figure))


def texts(artist: Artist) -> Iterator[str]:
    """What an artist and all its parts say, but for the ticks between labels, which say nothing and take a third of the time to draw."""
    if hasattr(artist, "get_text"):
        yield artist.get_text()
    parts = (
        [artist.label, artist.offsetText, *artist.get_major_ticks()]
        if isinstance(artist, Axis)
        else artist.get_children()
    )
    for part in parts:
        yield from texts(part)
