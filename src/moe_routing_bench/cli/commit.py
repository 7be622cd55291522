"""The commit that an installed package was built from, for the rows that it measures."""

import os

from moe_routing_bench.measure import provenance
from moe_routing_bench.packages import PACKAGE
from moe_routing_bench.store.shipped import installed, shipped


def name_commit() -> None:
    """Let this process and its jobs say which commit an installed package was built from, where its wheel has recorded it.

    Git is kept from looking above the package: an environment often lies in a repository of the user's, whose commit says
    nothing of this code.
    """
    if not installed():
        return
    above = [str(PACKAGE.resolve().parent), os.environ.get("GIT_CEILING_DIRECTORIES", "")]
    os.environ["GIT_CEILING_DIRECTORIES"] = os.pathsep.join(filter(None, above))
    commit = shipped("COMMIT")
    if commit.is_file():
        os.environ[provenance.COMMIT] = commit.read_text(encoding="utf-8").strip()
