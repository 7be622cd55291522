"""Import boundaries: which part of the package may know which, and that torch stays out of what Snakemake reads."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import moe_routing_bench

PACKAGE = Path(moe_routing_bench.__file__).parent
# part -> the parts that it may import, at the top or inside a function
MAY_IMPORT = {
    "errors": "",
    "files": "",
    "platforms": "",
    "settings": "errors",
    "skew": "errors",
    "trace": "errors",
    "config": "errors",
    "routers": "errors",
    "grid": "errors settings skew trace routers benches",  # of benches and routers, the tables
    "row_map": "grid",
    "workload": "errors grid skew trace",
    "cute_cache": "cute_support files",
    "cute_layouts": "cute_support",
    "cute_support": "",
    "benches": "errors grid row_map workload routers cute_cache cute_support",
    "ops": "errors benches",
    "paths": "platforms grid routers",
    "records": "errors files grid",
    "measure": "errors settings platforms grid paths records benches routers",
    "quality": "errors files options config platforms paths records routers measure",
    "figures": "errors platforms benches quality routers",
    "report": "errors files platforms benches figures paths quality",
    "options": "paths",
    "cli": "errors options settings platforms config grid paths records benches routers figures report measure quality",
}
MAY_IMPORT_TORCH = {
    *("benches", "routers", "workload", "cute_cache", "cute_layouts", "cute_support", "measure", "ops", "quality"),
}
WITHOUT_TORCH = ("config", "grid", "paths", "records", "platforms", "benches", "routers", "figures", "report", "cli")


def part(path):
    return path.relative_to(PACKAGE).with_suffix("").parts[0]


def imported(path, nodes=ast.walk):
    """Every module that a file imports, as an absolute name; `nodes` picks the statements to look at."""
    for node in nodes(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: a relative import"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


FILES = sorted(path for path in PACKAGE.rglob("*.py") if path != PACKAGE / "__init__.py")


def test_every_part_has_its_place():
    assert {part(path) for path in FILES} <= set(MAY_IMPORT)
    assert {name for allowed in MAY_IMPORT.values() for name in allowed.split()} < set(MAY_IMPORT)


@pytest.mark.parametrize("path", FILES, ids=[str(path.relative_to(PACKAGE)) for path in FILES])
def test_a_file_imports_what_its_part_may(path):
    names = [name.split(".") for name in imported(path)]
    ours = {name[1] for name in names if name[0] == "moe_routing_bench"}
    assert ours <= {part(path), *MAY_IMPORT[part(path)].split()}
    assert part(path) in MAY_IMPORT_TORCH or "torch" not in {name[0] for name in names}


def test_the_client_and_the_server_stand_alone():
    """One is started for every cell; the other outlives edits of the code: only its children import that."""
    for name, nodes in (("client", ast.walk), ("server", ast.iter_child_nodes)):
        names = {one.split(".")[0] for one in imported(PACKAGE / f"measure/{name}.py", nodes)}
        assert names <= sys.stdlib_module_names


def test_what_snakemake_reads_loads_no_torch():
    figures = sorted(f"figures.{path.stem}" for path in (PACKAGE / "figures").glob("*.py") if path.stem != "__init__")
    quality = ("quality.run", "quality.runs", "quality.plan", "quality.commands", "quality.compare")
    modules = [f"moe_routing_bench.{name}" for name in (*WITHOUT_TORCH, *figures, *quality, "report.render")]
    script = f"import sys, {', '.join(modules)}\nfor name in ('torch', 'triton', 'cutlass'): assert name not in sys.modules, name"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
