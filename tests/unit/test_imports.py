"""Import boundaries: which part of the package may know which, no cycles, and no torch in what Snakemake reads."""

import ast
import graphlib
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

import numpy as np

import moe_routing_bench

PACKAGE = Path(moe_routing_bench.__file__).parent
# part -> the parts that it may import, at the top or inside a function; each only from those above it
MAY_IMPORT = {
    "errors": "",
    "bounds": "",
    "quantities": "",
    "formats": "",
    "closure": "",
    "streams": "",
    "fields": "errors",
    "files": "errors",
    "declarations": "errors closure",
    "routers": "errors declarations",
    "grid": "errors bounds fields",
    "kernels": "errors declarations files formats closure routers",
    "choices": "errors formats",
    "ops": "errors formats routers kernels choices",
    "workload": "errors formats grid kernels",
    "benches": "errors declarations formats closure routers grid kernels choices ops workload",
    "config": "errors declarations bounds fields formats routers grid kernels workload benches",
    "store": "errors files closure grid benches config",
    "measure": "errors files streams formats closure grid workload benches store",
    "traces": "errors kernels workload store measure",
    "quality": "errors files formats closure routers grid config store measure",
    "comparison": "errors quantities formats choices benches config measure",
    "api": "errors declarations grid config store measure",
    "figures": "errors quantities formats routers grid benches config store quality comparison",
    "report": "errors quantities files formats routers grid choices benches config store quality comparison figures",
    "cli": "errors streams quantities declarations fields files formats closure routers grid kernels choices benches config store measure traces quality comparison figures report",
}
MAY_IMPORT_TORCH = {"formats", "routers", "kernels", "ops", "workload", "benches", "measure", "traces", "quality"}
WITHOUT_TORCH = (
    *(
        "formats",
        "formats.weights",
        "closure",
        "choices",
        "routers",
        "routers.zoo",
        "grid.cell",
        "grid.job",
        "workload.skew",
        "workload.trace",
    ),
    *("benches.registry", "config.axes", "config.expand", "config.load", "store.paths", "store.platforms"),
    *("store.records", "store.rows", "store.sources", "quality.code", "quality.spec.plan", "quality.spec.run_rows"),
    *(
        "quality.comparison.compare",
        "comparison.verdicts",
        "comparison.runs",
        "comparison.claims",
        "comparison.anomalies",
        "comparison.choices",
        "comparison.regret",
        "api",
        "config.claims",
        "figures",
        "report.render",
        "cli.main",
    ),
)


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
    order = list(MAY_IMPORT)
    assert all(order.index(name) < order.index(one) for one, allowed in MAY_IMPORT.items() for name in allowed.split())


def test_no_module_imports_itself_by_way_of_others():
    """Imports inside functions count as well: what is cut in two by one belongs together, or apart."""
    modules = {_name(path): path for path in FILES}
    graph = {name: {one for one in _modules(path, modules) if one != name} for name, path in modules.items()}
    try:
        graphlib.TopologicalSorter(graph).prepare()
    except graphlib.CycleError as error:
        raise AssertionError(f"a cycle: {' <- '.join(error.args[1])}") from None


def _name(path):
    parts = ("moe_routing_bench", *path.relative_to(PACKAGE).with_suffix("").parts)
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def _modules(path, modules):
    """The modules of the package that a file names in its imports: the longest part of a name that is one."""
    for name in imported(path):
        while name and name not in modules:
            name = name.rpartition(".")[0]
        if name:
            yield name


def test_files_import_what_their_part_may():
    wrong = {}
    for path in FILES:
        names = [name.split(".") for name in imported(path)]
        extra = {name[1] for name in names if name[0] == "moe_routing_bench"} - {
            part(path),
            *MAY_IMPORT[part(path)].split(),
        }
        if part(path) not in MAY_IMPORT_TORCH:
            extra |= {name[0] for name in names} & {"torch"}
        if extra:
            wrong[str(path.relative_to(PACKAGE))] = sorted(extra)
    assert not wrong, f"imports that MAY_IMPORT or MAY_IMPORT_TORCH excludes, by file: {wrong}"


def test_the_client_and_the_server_stand_alone():
    """One is started for every cell; the other outlives edits of the code: only its children import that."""
    for name, nodes in (("client", ast.walk), ("server", ast.iter_child_nodes)):
        names = {one.split(".")[0] for one in imported(PACKAGE / f"measure/{name}.py", nodes)}
        assert names <= sys.stdlib_module_names


def test_the_closure_of_imports_needs_the_standard_library_alone():
    assert {one.split(".")[0] for one in imported(PACKAGE / "closure.py")} <= sys.stdlib_module_names


def check_loads_none(modules: Iterable[str], *unwanted: str) -> None:
    """Import modules in a process of their own, and find that none of others was loaded."""
    script = f"import sys, {', '.join(modules)}\nfor name in {unwanted}: assert name not in sys.modules, name"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_what_snakemake_reads_loads_no_torch():
    figures = sorted(f"figures.{path.stem}" for path in (PACKAGE / "figures").glob("*.py") if path.stem != "__init__")
    quality = tuple(f"quality.{name}" for name in ("spec.run_rows", "spec.plan", "comparison.compare"))
    modules = [f"moe_routing_bench.{name}" for name in (*WITHOUT_TORCH, *figures, *quality, "report.render")]
    check_loads_none(modules, "torch", "triton", "cutlass")


def test_the_operators_load_no_compiler() -> None:
    """It takes 20 times as long to import as they do, and who compiles a model has it."""
    check_loads_none(["torch", "moe_routing_bench.ops"], "torch._dynamo", "triton", "cutlass")


def test_files_are_short() -> None:
    """At most 300 lines, a kernel's 400, and nine in ten at most 200: what is longer has a second reason to change."""
    lines = {path: len(path.read_text(encoding="utf-8").splitlines()) for path in PACKAGE.rglob("*.py")}
    long = {str(path): n for path, n in lines.items() if n > (400 if "kernels" in path.parts else 300)}
    assert not long and len(lines) > 400
    assert np.percentile(list(lines.values()), 90) <= 200
