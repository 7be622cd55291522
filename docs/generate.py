"""Write the generated blocks of the documents, and the file of published rows that a wheel has: `python docs/generate.py`.

A block stands between the lines `<!-- generated: NAME -->` and `<!-- end -->` of a Markdown page. It holds what `BLOCKS`
makes of the sources, the configs or the stored rows (`docs/stored_tables.py`, `docs/layer_tables.py`, `docs/rank_tables.py`, `docs/seed_tables.py`, `docs/others_tables.py`). A figure in prose that is computed has a comment behind it (`docs/prose_numbers.py`). `tests/recipes/test_docs.py` fails where a page
differs from what this program would write.
"""

import ast
import contextlib
import gzip
import hashlib
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import computed
import layer_tables
import others_tables
import pandas as pd
import rank_tables
import seed_tables
import stored_tables
from prose_numbers import MARK as COMPUTED
from stored_tables import ROOT, table

from moe_routing_bench.answers import stored
from moe_routing_bench.benches.registry import BENCHES
from moe_routing_bench.config import presets
from moe_routing_bench.config.axes import AXES, Axis
from moe_routing_bench.config.expand import expand
from moe_routing_bench.config.load import load, on
from moe_routing_bench.store import project_files
from moe_routing_bench.store.records import about
from moe_routing_kernels.routers import zoo

SOURCES = ROOT / "src"
PACKAGES = KERNELS, _ = (SOURCES / "moe_routing_kernels", SOURCES / "moe_routing_bench")
OPERATIONS = {*BENCHES, "shared_experts"}  # docs/glossary.md describes them
PAGES = (
    *sorted(ROOT.glob("*.md")),
    *sorted(ROOT.glob("docs/*.md")),
    *sorted(ROOT.glob("docs/*/*.md")),
    ROOT / "config/README.md",
)
MARK = "<!-- generated: "
BLOCK = re.compile(rf"({MARK}(.+?) -->\n).*?(<!-- end -->)", re.DOTALL)


def summary(module: Path) -> str:
    """The first sentence of a module's docstring, on one line; `SystemExit` where there is none."""
    docstring = ast.get_docstring(ast.parse(module.read_text()))
    if not docstring:
        raise SystemExit(f"{module}: no docstring, which docs/architecture.md shows")
    paragraph = " ".join(docstring.split("\n\n")[0].split())
    sentence = re.split(r"(?<=\.) (?=[A-Z`])", paragraph)[0]
    return sentence.replace("``", "`").replace("|", r"\|")


def packages() -> str:
    """A table for each of the two packages that are installed: a line per package directly below it, but for those of operations."""
    return "\n".join(
        table(
            [
                {
                    f"in `{package.name}`": f"`{path.parent.name}/`",
                    "contents": summary(path).removeprefix(f"{path.parent.name}: "),
                }
                for path in sorted(package.glob("*/__init__.py"))
                if package != KERNELS or path.parent.name not in OPERATIONS
            ]
        )
        for package in PACKAGES
    )


def cells() -> str:
    """How many cells each config asks for."""
    with contextlib.chdir(ROOT):  # a config names its traces from there
        models = presets.load("config/models.yaml")
        found = [
            *(
                path
                for path in sorted(Path("config").glob("*.yaml"))
                if path.name not in ("models.yaml", "claims.yaml", "texts.yaml")
            ),
            *sorted(Path("config/seeds").glob("*.yaml")),
        ]
        configs = {str(path.relative_to("config")): load(path) for path in found}
        counts = {name: [len(expand(on(one, way), models)) for way in ("gpu", "cpu")] for name, one in configs.items()}
    said = {name: f"{gpu}; {cpu} on a CPU" if cpu != gpu else str(gpu) for name, (gpu, cpu) in counts.items()}
    return table([{"config": f"`{name}`", "cells": cells} for name, cells in said.items()])


def axes() -> str:
    """The axes of a grid entry: what each is, its default, and the benches that read it."""
    lines = []
    for axis in (one for one in AXES.values() if one.scope != "config"):
        readers = [name for name, bench in BENCHES.items() if axis.universal or axis.name in bench.axes]
        choices = f": {', '.join(f'`{name}`' for name in axis.listed)}" if axis.choices else ""
        lines.append(
            {
                "axis": f"`{axis.name}`",
                "meaning and values": f"{axis.summary}{choices}",
                "default": _default(axis),
                "benches": "all" if readers == list(BENCHES) else ", ".join(readers),
            }
        )
    return table(lines)


def _default(axis: Axis) -> str:
    if axis.follows:
        return f"that of `{axis.follows}`"
    known = axis.default if axis.default is not None else "none" if axis.optional else ""
    return f"{known:g}" if isinstance(known, float) else str(known)


FIRST = (  # columns that a reader looks at first; `moe-routing-bench columns` lists all
    *("status", "reason", "median_us", "ci_low_us", "converged", "suspect", "suspect_reason", "cold", "turns"),
    *("speedup", "best_speedup", "best_other", "verdict", "noise_floor", "anomaly", "gb_per_s", "share_of_stream"),
    *("share_of_roofline", "over_dense", "workspace_bytes", "rel_l2_error", "tolerance", "code_fingerprint"),
)


def columns() -> str:
    """The columns of `FIRST`: what each holds, and its unit."""
    return table(
        [{"column": f"`{name}`", "unit": about()[name].unit, "contents": about()[name].meaning} for name in FIRST]
    ).replace("|ln ratio|", r"\|ln ratio\|")


def kernel_steps() -> str:
    """The measured time of each step of docs/kernels, and its rate."""
    flops = 2 * 32768 * 2048 * 1536
    times = pd.read_csv(ROOT / "docs/kernels/times.csv")
    return table(
        [
            {"step": row.step, "time in µs": f"{row.us:,.0f}", "TFLOP/s": f"{flops / row.us / 1e6:.3g}"}
            for row in times.itertuples()
        ]
    )


BLOCKS: Mapping[str, Callable[[], str]] = {
    "packages": packages,
    "cells": cells,
    "axes": axes,
    "columns": columns,
    "kernel-steps": kernel_steps,
    "rules": zoo.table,
    **stored_tables.BLOCKS,
    **layer_tables.BLOCKS,
    **rank_tables.BLOCKS,
    **seed_tables.BLOCKS,
    **others_tables.BLOCKS,
}


def written(*some: str) -> Iterator[tuple[Path, str]]:
    """Every page with blocks or computed figures, and what it should hold, with `some` in these blocks alone; `SystemExit` for a mark without an
    end or an unknown name."""
    for page in PAGES:
        text = page.read_text()
        names = [name for _, name, _ in BLOCK.findall(text)]
        if len(names) != text.count(MARK) or not set(names) <= set(BLOCKS):
            raise SystemExit(f"{page}: a block without an end, or with another name than {', '.join(BLOCKS)}")
        marks = [name for _, name in COMPUTED.findall(text)]
        if not set(marks) <= set(computed.COMPUTED):
            raise SystemExit(f"{page}: a figure with another name than {', '.join(computed.COMPUTED)}")
        if names or marks:
            chosen = set(some or names)
            made = BLOCK.sub(
                lambda found, chosen=chosen: (
                    found[1] + BLOCKS[found[2]]() + found[3] if found[2] in chosen else found[0]
                ),
                text,
            )
            if not some:
                made = COMPUTED.sub(lambda found: f"{computed.COMPUTED[found[2]]()}<!--={found[2]}-->", made)
            yield page, made


def main(*some: str) -> None:
    """Rewrite the pages whose blocks are out of date, or `some` of the blocks, and print the names of the pages."""
    for page, text in written(*some):
        if text != page.read_text():
            page.write_text(text)
            print(page.relative_to(ROOT))
    if not some and write_rows():
        print(ROWS.relative_to(ROOT))


ROWS = ROOT / "results" / project_files.ROWS


def write_rows() -> bool:
    """Write what a wheel has of the published rows, if it is not what the stored rows say; whether it was written."""
    with contextlib.chdir(ROOT):
        runs = sorted(name for names in stored.runs().values() for name in names)
        places = {run: ROWS.parent / run / "measurements.parquet" for run in runs}
        wanted = stored.packed({run: hashlib.sha256(path.read_bytes()).hexdigest() for run, path in places.items()})
    if ROWS.is_file() and gzip.decompress(ROWS.read_bytes()) == gzip.decompress(wanted):
        return False
    ROWS.write_bytes(wanted)
    return True


if __name__ == "__main__":
    main(*sys.argv[1:])
