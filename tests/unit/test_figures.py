"""Every figure draws from any table of the schema, says when there is nothing to draw, and is reproducible."""

import importlib
import subprocess
import sys

import pytest
from rows import rows

from moe_routing_bench.figures import FIGURES, style

FULL = rows()
MEASURED = [name for name, figure in FIGURES.items() if figure.source == "measurements"]


def draw(name, table):
    """The figure and all its texts."""
    figure = importlib.import_module(f"moe_routing_bench.figures.{FIGURES[name].module}").draw(table)
    return figure, "\n".join(t.get_text() for t in figure.findobj(lambda a: hasattr(a, "get_text")))


@pytest.mark.parametrize("name", MEASURED)
def test_draws(name):
    """Full, CPU, failed and empty tables."""
    assert "no data" not in draw(name, FULL)[1]
    assert "only ratios are meaningful" in draw(name, rows(gpu=False))[1]
    assert "no data: " in draw(name, rows(status="crashed"))[1]
    assert "no data: " in draw(name, FULL.iloc[:0])[1]


@pytest.mark.parametrize("name", ["pareto"])
def test_same_rows_same_svg(name, tmp_path):
    """Equal rows give equal files."""
    for copy in "ab":
        style.save(draw(name, FULL)[0], tmp_path / f"{copy}.svg", tmp_path / f"{copy}.png")
    assert (tmp_path / "a.svg").read_bytes() == (tmp_path / "b.svg").read_bytes()


def test_no_torch():
    """Figures and report read rows without importing torch."""
    modules = ", ".join(f"moe_routing_bench.figures.{f.module}" for f in FIGURES.values())
    code = f"import sys, {modules}, moe_routing_bench.report.render; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0
