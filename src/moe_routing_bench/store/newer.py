"""Files that a newer version of this package wrote: they are named and kept, because this version can neither read nor replace them."""

from pathlib import Path

import pyarrow as pa

from moe_routing_kernels.errors import UserError, bad

KEEP = "keep what a newer version of this package wrote, and update the package"


class Newer(UserError):
    """A file that a newer version wrote."""


def versions(table: pa.Table) -> set[int | None]:
    """The schema versions of a table's rows; None where it has no such column."""
    if "schema_version" not in table.column_names:
        return {None}
    return set(table["schema_version"].to_pylist())


def check(path: Path, table: pa.Table, ours: int) -> None:
    """Raise `Newer` where a row has a higher schema version than this code writes."""
    if higher := [version for version in versions(table) if isinstance(version, int) and version > ours]:
        raise Newer(str(bad("schema_version", max(higher), f"{ours} or lower in {path}", KEEP)))
