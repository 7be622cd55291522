"""The figures: each is a pure function of a table to a `Chart`, in a module with those of its kind. No torch.

The page and paper draw the same chart. ``captions.yaml`` lists the figures in the order of the report, with their titles and captions.
"""

import importlib
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import resources
from types import MappingProxyType
from typing import Any

import yaml


@dataclass(frozen=True)
class Figure:
    """A figure's name (of its file and rule), title, caption, and the table that it draws.

    `source` is the name of that table's Parquet file: "measurements", "quality" for the training runs, or "perft" for the
    adaptations of these. `module` has its function, which has the figure's name where the module has several figures.
    """

    name: str
    title: str
    caption: str
    source: str = "measurements"
    module: str = ""

    @property
    def file(self) -> str:
        """The module that it is drawn from, below this package."""
        return self.module or self.name

    def chart(self, table: Any) -> Any:
        """The figure of a table (a DataFrame of the schema of `source`) as a `chart.Chart` of few series."""
        names = (self.file, "chart", "row_groups")
        module, chart, groups = (importlib.import_module(f"{__name__}.{name}") for name in names)
        return chart.few(getattr(module, self.name if self.module else "chart")(table), groups.preferred)


_CAPTIONS = yaml.safe_load(resources.files(__name__).joinpath("captions.yaml").read_text(encoding="utf-8"))
FIGURES: Mapping[str, Figure] = MappingProxyType({name: Figure(name, **said) for name, said in _CAPTIONS.items()})
