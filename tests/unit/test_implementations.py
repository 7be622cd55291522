"""Our implementations stand in one table each, and a line of it is all that choosing one needs."""

import ast
import importlib
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from types import ModuleType

import pytest

from moe_routing_bench.benches.bench import find
from moe_routing_bench.packages import PACKAGES
from moe_routing_kernels import choices, experts, layer
from moe_routing_kernels.choices import chooser
from moe_routing_kernels.experts import Experts
from moe_routing_kernels.implementations import (
    NEEDS,
    OPERATIONS,
    Candidate,
    chosen_by_name,
    listed,
    load,
    ranked,
    reason,
)
from moe_routing_kernels.layer import Layer
from moe_routing_kernels.permute import RowLayout
from moe_routing_kernels.target import CPU, Target

BENCH, KERNELS = PACKAGES
TABLES = (*OPERATIONS, "router", "layer", "routing", "shared_experts", "training")
GENERAL = {
    "torch",
    "torch_compile",
    "triton",
    "cute",
}  # names of backends, which are more than names of implementations
HOPPER = Target.of("sm_90a")
LAYER = Layer(RowLayout(64, 4, 16), 128, 64, "bf16", "bf16", "bf16", "")


def listings(tree: ast.AST) -> Iterator[str]:
    """The texts that a module lists: elements of tuples, lists and sets, keys, and the names of implementations."""
    for node in ast.walk(tree):
        found: list[ast.expr | None] = []
        if isinstance(node, ast.Tuple | ast.List | ast.Set):
            found = [*node.elts]
        elif isinstance(node, ast.Dict):
            found = [*node.keys]
        elif isinstance(node, ast.Call) and getattr(node.func, "id", "") in ("Candidate", "Implementation"):
            found = [*node.args[:1]]
        yield from (str(one.value) for one in found if isinstance(one, ast.Constant))


def test_a_name_is_listed_once() -> None:
    """In the table of the operation's package: another list would have to change with it."""
    where: dict[str, list[str]] = {}
    names = {one.name for operation in TABLES for one in listed(operation)} - GENERAL
    for path in (*KERNELS.rglob("*.py"), *(BENCH / "benches").rglob("*.py")):
        for name in names & set(listings(ast.parse(path.read_text(encoding="utf-8")))):
            where.setdefault(name, []).append(
                path.relative_to(KERNELS).as_posix() if KERNELS in path.parents else str(path)
            )
    plain = {"torch_loop", "torch_grouped_mm"}  # of experts and of training, two operations
    derived = {"cute_dequant"}  # a name of a layer, in the line of its experts
    for name in names - derived:
        wanted = {"experts/__init__.py", "training/__init__.py"} if name in plain else None
        assert set(where[name]) == wanted if wanted else len(where[name]) == 1, (name, where[name])
    tables = {f"{operation}/__init__.py" for operation in TABLES}
    assert {file for files in where.values() for file in files} <= tables


def test_a_table_has_each_name_once_and_modules_that_are_there() -> None:
    for operation in TABLES:
        counts = Counter(one.name for one in listed(operation))
        assert max(counts.values()) == 1, counts
        ranks = Counter((one.rank, one.trains) for one in ranked(operation))
        assert max(ranks.values(), default=1) == 1, "an order of preference"
        for one in listed(operation):
            for name in one.modules(operation):
                assert KERNELS.parent.joinpath(*name.split(".")).with_suffix(".py").is_file(), name


def test_benches_measure_what_the_tables_have() -> None:
    for operation in TABLES:
        lines = [one.name for one in listed(operation) if operation != "experts" or not (one.gathers or one.trains)]
        assert [one.name for one in find(operation).implementations if one.name in lines] == lines


@pytest.fixture
def planted(monkeypatch: pytest.MonkeyPatch):
    """One line more in the table of experts, with a module that takes everything; tables made of it are made again."""
    module = ModuleType("moe_routing_kernels.experts.planted_experts")
    monkeypatch.setitem(sys.modules, module.__name__, module)

    def plant(**values: object) -> ModuleType:
        line = Candidate("planted", "planted_experts", requires=("gpu", "triton"), **{"rank": 0, **values})
        monkeypatch.setattr(experts, "IMPLEMENTATIONS", (*experts.IMPLEMENTATIONS, line))
        monkeypatch.setattr(layer, "EXPERTS", experts.IMPLEMENTATIONS)
        around = (*layer.IMPLEMENTATIONS, *(one for one in layer._around("triton") if one.name == "planted"))
        monkeypatch.setattr(layer, "IMPLEMENTATIONS", around)
        return module

    monkeypatch.setattr(chooser, "installed", lambda package: True)
    monkeypatch.setattr(choices, "load", tuple)
    for remembered in (chooser.kernel, chooser.way):
        remembered.cache_clear()
    yield plant
    for remembered in (chooser.kernel, chooser.way):
        remembered.cache_clear()


def test_a_line_of_experts_is_all_that_choosing_it_needs(planted) -> None:
    """The operators, a layer of theirs, `auto`, and what the rows of these depend on."""
    pytest.importorskip("cutlass")
    module = planted()
    assert chooser.kernel(LAYER.experts, HOPPER) is module
    assert module.__name__ in chosen_by_name()
    (around,) = (one for one in listed("layer") if one.name == "planted")
    assert around.parts["experts"] == "planted" and around.parts["router"] == "triton"
    assert chooser.preferred(["planted", "cute"], "sm_90")[0] == "planted"
    way = chooser.way(LAYER, Target.of("sm_100a"))
    assert way is not None and way.module is module and not way.gathers


@pytest.mark.parametrize("quantised", ["weights", "rows"])
def test_operators_do_not_depend_on_experts_that_only_take_quantised_formats(planted, quantised: str) -> None:
    assert planted(quantised=quantised).__name__ not in chosen_by_name()


def test_a_line_without_a_rank_is_never_chosen(planted) -> None:
    pytest.importorskip("triton")
    module = planted(rank=None)
    assert chooser.kernel(LAYER.experts, Target.of("sm_100a")) is not module
    assert chooser.preferred(["planted", "cute"], "sm_90") == ["cute"]
    assert module.__name__ not in chosen_by_name()


def test_others_say_why_they_do_not_run() -> None:
    pytest.importorskip("cutlass")
    pytest.importorskip("triton")
    assert chooser.reasons(LAYER.experts, HOPPER) == {"cute": None, "triton": None}
    found = chooser.reasons(LAYER.experts, Target.of("sm_100a"))
    assert found == {"cute": "is written for sm_90a, not sm_100a", "triton": None}
    found = chooser.reasons(LAYER.experts, CPU)
    assert found == {"cute": "needs an NVIDIA GPU, not cpu", "triton": "needs a GPU, not cpu"}
    assert chooser.reasons(LAYER.experts, HOPPER, trains=True) == {"cute_training": None}
    quantised = replace(LAYER.experts, weights="int4_g32")
    assert list(chooser.reasons(quantised, HOPPER)) == ["cute_quantised", "cute_fp8", "dequant_cute"]


def test_what_is_not_installed_or_too_old_is_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chooser, "installed", lambda package: package == "triton")
    assert chooser.unmet(("nvidia", "cutlass"), HOPPER) == "cutlass is not installed"
    assert chooser.unmet(("gpu", "triton"), HOPPER) is None
    old = HOPPER._replace(arch="sm_61")
    assert chooser.unmet(("gpu", "triton"), old) == "triton compiles for no sm_61"


def test_triton_runs_on_a_gpu_of_another_vendor(monkeypatch: pytest.MonkeyPatch) -> None:
    """What requires CuTe DSL, or CUDA by its older name, does not; the compute capability is one of NVIDIA."""
    monkeypatch.setattr(chooser, "installed", lambda package: True)
    amd = Target("amd", "gfx942", 304, 65536, 2**37)
    assert chooser.unmet(("gpu", "triton"), amd) is None
    for requires in (("nvidia", "cutlass"), ("cuda",), ("cuda", "triton")):
        assert chooser.unmet(requires, amd) == "needs an NVIDIA GPU, not gfx942"
    assert {need for operation in TABLES for one in listed(operation) for need in one.requires} <= set(NEEDS) - {"cuda"}
    for operation in TABLES:
        for one in listed(operation):
            assert ("nvidia" in one.requires) == ("cutlass" in one.requires), one


def test_the_target_is_given_to_those_that_ask_for_it() -> None:
    """A module of another package may take the problem alone, keywords of its own, or an option of the name `target`."""

    def module(unsupported) -> ModuleType:
        made = ModuleType("made")
        made.unsupported = unsupported  # pyright: ignore[reportAttributeAccessIssue]
        return made

    problem: Experts = LAYER.experts
    assert reason(ModuleType("bare"), problem, HOPPER) is None
    assert reason(module(lambda problem: f"{problem.hidden}"), problem, HOPPER) == "128"
    assert reason(module(lambda problem, *, size: f"{size}"), problem, HOPPER, {"size": 3}) == "3"
    assert reason(module(lambda problem, target: target.arch), problem, HOPPER) == "sm_90a"
    assert reason(module(lambda problem, target=None: f"{target}"), problem) == "None"
    assert reason(module(lambda problem, target: target), problem, HOPPER, {"target": "own"}) == "own"
    assert reason(module(lambda problem, **options: f"{sorted(options)}"), problem, HOPPER, {"a": 1}) == "['a']"


def test_a_module_with_several_implementations(monkeypatch: pytest.MonkeyPatch) -> None:
    """``module:entry`` takes the functions that end in its name, and its file is that of the module."""
    module = ModuleType("moe_routing_kernels.pack.both")
    vars(module).update(bind_rows=lambda problem: "rows", unsupported_rows=lambda problem: "none", bind=print)
    monkeypatch.setitem(sys.modules, module.__name__, module)
    line = Candidate("rows", "both:rows")
    rows = load(line.place("pack"))
    assert rows.bind(None) == "rows" and reason(rows, LAYER.experts, HOPPER) == "none"
    assert not hasattr(rows, "precompile") and list(line.modules("pack")) == [module.__name__]


def test_tables_are_read_without_torch() -> None:
    """By Snakemake, which plans with them."""
    for operation in TABLES:
        assert importlib.import_module(f"moe_routing_kernels.{operation}").IMPLEMENTATIONS is listed(operation)
