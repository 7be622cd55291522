"""The figures: each is one module with a pure function ``draw(table) -> matplotlib Figure``. No torch.

``captions.yaml`` lists them in the order of the report, with their titles and captions.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from importlib import resources
from types import MappingProxyType

import yaml

NOTHING = "nothing-to-draw"  # id of the text, in a drawing, of a panel without data


@dataclass(frozen=True)
class Figure:
    """A figure's name (of its file, rule and module), title, caption, and the table that it draws.

    `source` is the name of that table's Parquet file: "measurements", "quality" for the training runs, or "perft" for the
    adaptations of these.
    """

    name: str
    title: str
    caption: str
    source: str = "measurements"

    @property
    def module(self) -> str:
        """The module that draws it, below this package."""
        return self.name


_CAPTIONS = yaml.safe_load(resources.files(__name__).joinpath("captions.yaml").read_text(encoding="utf-8"))
FIGURES: Mapping[str, Figure] = MappingProxyType({name: Figure(name, **said) for name, said in _CAPTIONS.items()})
