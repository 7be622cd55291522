"""What each column of a row holds, in words: the axes say it of themselves, `columns.yaml` of all others."""

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
import yaml

from moe_routing_bench.config.axes import AXES

_FILE = Path(__file__).with_suffix(".yaml")


@dataclass(frozen=True)
class About:
    """The unit of a column (empty for texts and flags) and what it holds."""

    unit: str
    meaning: str

    @property
    def text(self) -> str:
        """Both in one line."""
        if self.unit in ("", "share", "ratio", "count"):
            return self.meaning
        what, missing, why = self.meaning.partition("; none:")
        return f"{what}, in {self.unit}{missing}{why}"


@functools.cache
def about() -> Mapping[str, About]:
    """All columns by name: the axes in the order of their table, then the others."""
    found = {axis.name: About(axis.unit, axis.summary) for axis in AXES.values()}
    return found | {name: About(*one) for name, one in yaml.safe_load(_FILE.read_text(encoding="utf-8")).items()}


def described(schema: pa.Schema) -> pa.Schema:
    """The schema with `description` and `unit` in the metadata of each field. KeyError for a column that nobody describes."""
    known = about()
    return pa.schema(
        [f.with_metadata({"description": known[f.name].meaning, "unit": known[f.name].unit}) for f in schema],
        schema.metadata,
    )
