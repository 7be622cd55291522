"""Import boundaries: which part of the package may know which, no cycles, and no torch in what Snakemake reads."""

import ast
import functools
import graphlib
import subprocess
import sys
from collections.abc import Iterable

import numpy as np

from moe_routing_bench.packages import PACKAGES

BENCH, KERNELS = PACKAGES
# House -> part -> the parts of it that a part may import, at the top or inside a function; each only from those above it.
HOUSES = {
    "moe_routing_kernels": {
        "errors": "",
        "closure": "",
        "target": "errors",
        "implementations": "target",
        "formats": "",
        "files": "errors",
        "guarded": "",
        "declarations": "errors closure",
        "routers": "errors declarations implementations",
        "activations": "errors",
        "cute": "errors declarations files closure target",
        "gate": "cute formats implementations routers target",
        "permute": "cute errors implementations target",
        "pack": "cute formats implementations target",
        "combine": "cute formats implementations target",
        "exchange": "cute errors target",
        "router": "cute gate implementations routers target",
        "gemm": "activations cute formats pack",
        "layer": "errors cute permute gate combine experts formats implementations target",
        "experts": "activations errors formats cute gemm layer pack combine permute implementations target",
        "routing": "errors implementations permute",
        "shared_experts": "experts implementations",
        "training": "formats experts implementations layer permute",
        "choices": "errors formats experts implementations layer target",
        "ops": "activations errors formats routers routing choices cute exchange gate permute pack combine experts implementations layer target",
    },
    "moe_routing_bench": {
        "student": "",
        "intervals": "student",
        "statistics": "intervals student",
        "quantities": "",
        "streams": "",
        "children": "",
        "packages": "",
        "fields": "",
        "grid": "fields",
        "parquet_sizes": "",
        "workload": "grid parquet_sizes",
        "peers": "",
        "benches": "packages grid workload peers",
        "config": "fields grid workload benches",
        "store": "children packages parquet_sizes grid benches config",
        "measure": "children packages streams intervals statistics grid workload benches store",
        "traces": "statistics workload store",
        "quality": "packages statistics grid config store measure",
        "scale": "grid workload benches config store",
        "comparison": "children quantities intervals statistics grid benches config measure",
        "api": "grid config store measure",
        "answers": "quantities grid benches config store comparison",
        "figures": "quantities statistics grid benches config store quality comparison",
        "report": "quantities statistics grid benches config store quality comparison answers figures",
        "study": "packages quantities grid benches config store quality",
        "cli": "streams packages quantities intervals statistics fields grid benches config store measure traces quality scale comparison answers figures report study",
    },
}
# Parts of the instrument that need nothing of the kernels.
WITHOUT_KERNELS = {"intervals", "quantities", "statistics", "streams", "student"}
MAY_IMPORT_TORCH = {
    "formats",
    "target",
    "routers",
    "cute",
    "exchange",
    "gate",
    "permute",
    "pack",
    "combine",
    "router",
    "gemm",
    "layer",
    "experts",
    "routing",
    "shared_experts",
    "training",
    "ops",
    "peers",
    "workload",
    "benches",
    "measure",
    "traces",
    "quality",
    "scale",
}
WITHOUT_TORCH = (
    *(
        f"moe_routing_kernels.{name}"
        for name in (
            "formats",
            "formats.weights",
            "closure",
            "choices",
            "choices.chooser",
            "implementations",
            "target",
            "routers",
            "routers.zoo",
        )
    ),
    *(
        f"moe_routing_bench.{name}"
        for name in (
            *(
                "grid.cell",
                "workload.skew",
                "workload.trace",
                "benches.registry",
                "config.axes",
                "config.expand",
            ),
            *("config.load", "store.paths", "store.platforms", "store.records", "store.rows", "store.project_files"),
            *("quality.code", "quality.plan", "quality.run_rows", "quality.compare"),
            *(
                "comparison.verdicts",
                "comparison.runs",
                "comparison.claim_verdicts",
                "comparison.anomalies",
                "comparison.regret",
            ),
            *("api", "answers.ask", "answers.said", "config.claims", "figures", "report.render", "study.progress"),
            *(f"cli.{path.stem}" for path in sorted((BENCH / "cli").glob("[a-z]*.py"))),
        )
    ),
)


def house(path):
    return path.relative_to(BENCH.parent).parts[0]


def part(path):
    return path.relative_to(BENCH.parent).with_suffix("").parts[1]


@functools.cache
def parsed(path):
    return ast.parse(path.read_text())


def imported(path, nodes=ast.walk):
    """Every module that a file imports, as an absolute name; `nodes` picks the statements to look at."""
    for node in nodes(parsed(path)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: a relative import"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


FILES = sorted(path for one in PACKAGES for path in one.rglob("*.py") if path != one / "__init__.py")


def test_every_part_has_its_place():
    for name, parts in HOUSES.items():
        assert {part(path) for path in FILES if house(path) == name} == set(parts)


def test_no_module_imports_itself_by_way_of_others():
    """Imports inside functions count as well: what is cut in two by one belongs together, or apart."""
    modules = {_name(path): path for path in FILES}
    graph = {name: {one for one in _modules(path, modules) if one != name} for name, path in modules.items()}
    try:
        graphlib.TopologicalSorter(graph).prepare()
    except graphlib.CycleError as error:
        raise AssertionError(f"a cycle: {' <- '.join(error.args[1])}") from None


def _name(path):
    parts = path.relative_to(BENCH.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def _modules(path, modules):
    """The modules of the package that a file names in its imports: the longest part of a name that is one."""
    for name in imported(path):
        while name and name not in modules:
            name = name.rpartition(".")[0]
        if name:
            yield name


def test_a_file_imports_what_its_part_may():
    """Nothing of the kernels knows the instrument, and nothing below knows what is above it."""
    wrong = []
    for path in FILES:
        own, names = house(path), [name.split(".") for name in imported(path)]
        allowed = {(own, part(path)), *((own, one) for one in HOUSES[own][part(path)].split())}
        if own == "moe_routing_bench" and part(path) not in WITHOUT_KERNELS:
            allowed |= {("moe_routing_kernels", one) for one in HOUSES["moe_routing_kernels"]}
        ours = {(name[0], name[1]) for name in names if name[0] in HOUSES}
        wrong += [f"{path}: {'.'.join(one)}" for one in ours - allowed]
        if "torch" in {name[0] for name in names} and part(path) not in MAY_IMPORT_TORCH:
            wrong.append(f"{path}: torch")
    assert not wrong, "\n".join(wrong)


# The names that these import by are in tables, of which other tests import all, or those of other packages.
NAMED_ELSEWHERE = {
    *("benches/bench", "cli/commands", "cli/doctor", "measure/originals", "measure/server"),
    *("peers/sglang_triton", "peers/vllm_triton", "cute/cache", "implementations", "routers/zoo"),
}


def test_modules_that_are_imported_by_a_text_exist() -> None:
    """A command imports many when it is called, and its tests often have others in their place."""
    modules, elsewhere, count = {_name(path) for path in FILES}, set(), 0
    for path in FILES:
        for name in named_by_texts(path):
            if name is None:
                elsewhere.add("/".join(path.with_suffix("").relative_to(BENCH.parent).parts[1:]))
            elif name.partition(".")[0] in HOUSES:
                assert name in modules, f"{path}: {name}"
                count += 1
    assert elsewhere == NAMED_ELSEWHERE and count > 50


def named_by_texts(path):
    """What a file gives to `import_module`; None where that is not in the file."""
    tree = parsed(path)
    own = {"__name__": _name(path), "__package__": _name(path).rpartition(".")[0], "KERNELS": KERNELS.name}
    for call in (node for node in ast.walk(tree) if isinstance(node, ast.Call)):
        if ast.unparse(call.func).endswith("import_module"):
            within = [node for node in ast.walk(tree) if call in ast.walk(node)]
            free = [node.id for node in ast.walk(call.args[0]) if isinstance(node, ast.Name) and node.id not in own]
            values = [value for name in free for value in literals(name, within, tree)] if free else [""]
            for value in values or [None]:
                known = own | dict.fromkeys(free, value)
                yield None if value is None else eval(ast.unparse(call.args[0]), {"__builtins__": {}}, known)


def literals(name, within, tree):
    """The literal texts that a variable goes through in a comprehension, or that its function is called with in this file."""
    for node in within:
        for loop in getattr(node, "generators", ()):
            source = loop.iter
            if isinstance(source, ast.Name):  # assigned in the same function
                assigned = [one for each in within for one in ast.walk(each) if isinstance(one, ast.Assign)]
                source = next((one.value for one in assigned if ast.unparse(one.targets[0]) == source.id), source)
            if ast.unparse(loop.target) == name and isinstance(source, ast.Tuple):
                yield from (one.value for one in source.elts if isinstance(one, ast.Constant))
        parameters = [one.arg for one in node.args.args] if isinstance(node, ast.FunctionDef) else []
        if name in parameters:
            calls = [one for one in ast.walk(tree) if isinstance(one, ast.Call) and ast.unparse(one.func) == node.name]
            given = [one.args[parameters.index(name)] for one in calls if len(one.args) > parameters.index(name)]
            yield from (one.value for one in given if isinstance(one, ast.Constant))


def test_the_client_and_the_server_stand_alone():
    """One is started for every cell; the other outlives edits of the code: only its children import that."""
    for name, nodes in (("client", ast.walk), ("server", ast.iter_child_nodes)):
        names = {one.split(".")[0] for one in imported(BENCH / f"measure/{name}.py", nodes)}
        assert names <= sys.stdlib_module_names


def test_the_closure_of_imports_needs_the_standard_library_alone():
    assert {one.split(".")[0] for one in imported(KERNELS / "closure.py")} <= sys.stdlib_module_names


def check_loads_none(modules: Iterable[str], *unwanted: str) -> None:
    """Import modules in a process of their own, and find that none of others was loaded."""
    script = f"import sys, {', '.join(modules)}\nfor name in {unwanted}: assert name not in sys.modules, name"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_what_snakemake_reads_loads_no_torch():
    figures = sorted(f"figures.{path.stem}" for path in (BENCH / "figures").glob("*.py") if path.stem != "__init__")
    quality = tuple(f"quality.{name}" for name in ("run_rows", "plan", "compare"))
    modules = [f"moe_routing_bench.{name}" for name in (*figures, *quality, "report.render")]
    check_loads_none([*WITHOUT_TORCH, *modules], "torch", "triton", "cutlass")


def test_collect_imports_scipy_where_a_run_needs_it() -> None:
    """Few runs have slow noise, or few twins; the import takes half a second."""
    check_loads_none(
        [f"moe_routing_bench.comparison.{name}" for name in ("recomputed", "verdicts", "anomalies")], "scipy"
    )


def test_a_report_loads_scipy_only_for_what_needs_it() -> None:
    """Its module of statistics takes a second, which training runs need alone."""
    check_loads_none(["moe_routing_bench.report.render", "moe_routing_bench.cli.claims"], "scipy", "matplotlib")
    check_loads_none(["moe_routing_bench.comparison.claim_verdicts"], "scipy")


def test_help_and_version_need_no_library_of_data() -> None:
    """They take as long as Python and Typer: a command's module is imported when it is called."""
    libraries = ["numpy", "pandas", "pydantic", "pyarrow", "scipy", "torch", "yaml", "moe_routing_bench.benches"]
    script = f"""import sys
from moe_routing_bench.cli import main
try:
    main.main()
finally:
    assert not set(sys.modules) & set({libraries}), set(sys.modules) & set({libraries})"""
    for option in ("--help", "--version"):
        done = subprocess.run([sys.executable, "-c", script, option], capture_output=True, text=True, check=False)
        assert (done.returncode, done.stderr) == (0, "") and "moe-routing-bench" in done.stdout


def test_the_operators_load_no_compiler() -> None:
    """It takes 20 times as long to import as they do, and who compiles a model has it."""
    check_loads_none(["torch", "moe_routing_kernels.ops"], "torch._dynamo", "triton", "cutlass")


def test_files_are_short() -> None:
    """At most 300 lines, a kernel's 400, and nine in ten at most 230: what is longer has a second reason to change."""
    lines = {path: len(path.read_text(encoding="utf-8").splitlines()) for path in FILES}
    long = {str(path): n for path, n in lines.items() if n > (400 if house(path) == "moe_routing_kernels" else 300)}
    assert lines and not long
    assert np.percentile(list(lines.values()), 90) <= 230
