"""The kernels in the layout of Hugging Face's package `kernels`: loaded by its rules in a process that knows no other copy of them.

The package is no dependency of the tests, because it brings clients of the Hub and of a signature service. Where it is installed, it loads
the layout; elsewhere its documented rules do, for a local folder: the variant of the backend, ``__init__.py`` under the module name of the metadata.
"""

import ast
import base64
import hashlib
import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
_spec = importlib.util.spec_from_file_location("huggingface_layout", ROOT / "workflow/scripts/huggingface.py")
assert _spec and _spec.loader
script = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(script)

LOADER = """
import importlib.util, json, sys
from pathlib import Path

sys.modules["moe_routing_kernels"] = None  # what imports it by its name fails
folder = Path(sys.argv[1])

def load(backend):
    if backend != "cpu" or not importlib.util.find_spec("kernels"):  # of another backend than there is the package refuses to load one
        variant = folder / "build" / f"torch-{backend}"
        name = json.loads((variant / "metadata.json").read_text())["id"]
        spec = importlib.util.spec_from_file_location(name, variant / "__init__.py")
        sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[name])
        return sys.modules[name]
    import kernels

    return kernels.get_local_kernel(folder, backend=backend)
"""
LAYER = """
import torch
from torch.nn.functional import silu

first, second = load("cpu"), load("cuda")
assert first is not second and first.__name__ != second.__name__, "two versions fit into one process"
torch.manual_seed(0)
T, H, I, E, k = 24, 16, 32, 5, 2
x, logits = torch.randn(T, H, dtype=torch.float64, requires_grad=True), torch.randn(T, E, dtype=torch.float64)
w13, w2 = torch.randn(E, 2 * I, H, dtype=torch.float64), torch.randn(E, H, I, dtype=torch.float64)
weights, ids = logits.softmax(1).topk(k)
weights = weights / weights.sum(1, keepdim=True)
wide = torch.einsum("eih,th->tei", w13, x)
each = torch.einsum("ehi,tei->teh", w2, silu(wide[..., :I]) * wide[..., I:])
expected = (each.gather(1, ids[..., None].expand(T, k, H)) * weights[..., None]).sum(1)
expected.square().sum().backward()
wanted, x.grad = x.grad, None
for one in (first, second):
    got = one.ops.layer(x, logits, w13, w2, top_k=k)
    torch.testing.assert_close(got, expected)
    got.square().sum().backward()
    torch.testing.assert_close(x.grad, wanted)
    x.grad = None
    adopting = torch.nn.Module()
    adopting.gate_up_proj, adopting.down_proj = w13, w2
    torch.testing.assert_close(one.layers.SwigluExperts.forward(adopting, x, ids, weights), expected)
    assert hasattr(getattr(torch.ops, one.__name__), "gate"), "operators are registered under the module's name"
    assert sorted(one.__all__) == ["layers", "ops"]
assert not hasattr(torch.ops.moe_routing_kernels, "gate")
print("equal")
"""
MODULES = """
name, variant = load("cpu").__name__, folder / "build" / "torch-cpu"
missing = []
for path in sorted(variant.rglob("*.py")):
    parts = path.relative_to(variant).with_suffix("").parts
    if parts[0] != "moe_routing_kernels":
        module = ".".join([name, *(parts[:-1] if parts[-1] == "__init__" else parts)])
        try:
            importlib.import_module(module)
        except ImportError as error:
            missing.append((error.name or str(error)).partition(".")[0])
closure = importlib.import_module(f"{name}.closure")
files = closure.closure([f"{name}.gate.cute_gate"])
assert variant / "gate/cute_packed.py" in files and variant / "implementations.py" in files, files
spec = importlib.util.spec_from_file_location("older", variant / "moe_routing_kernels/__init__.py")
older = importlib.util.module_from_spec(spec)
spec.loader.exec_module(older)
assert older.ops is sys.modules[name].ops and older.__all__ == sys.modules[name].__all__
print(sorted(set(missing)))
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("hub") / "moe-routing-kernels"
    assert [path.name for path in script.write(made)] == ["torch-cpu", "torch-cuda"]
    return made


def run(code: str, folder: Path) -> str:
    done = subprocess.run(
        [sys.executable, "-I", "-c", LOADER + code, str(folder)], capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_a_layer_of_the_layout_is_that_of_the_formula(folder: Path) -> None:
    """Also its gradient, of two variants in one process, and of the layer that models adopt."""
    assert run(LAYER, folder) == "equal"


def test_each_module_of_the_layout_imports_its_own_package(folder: Path) -> None:
    """Only the compilers of kernels, and transformers, may be missing; code that a kernel depends on is found, too."""
    missing = ast.literal_eval(run(MODULES, folder))
    assert set(missing) <= {"cutlass", "triton", "transformers", "tvm_ffi"}


def test_a_module_loads_what_the_hub_allows_alone() -> None:
    """What a module imports as it is loaded: of a "noarch" kernel the standard library, torch with what it depends on, and the backends' compilers."""
    allowed = sys.stdlib_module_names | {"torch", "filelock", "triton", "cutlass", "cuda", "transformers", "tvm_ffi"}
    found = {}
    for place, text in script.contents().items():
        top = [ast.parse(text)] if place.endswith(".py") else []
        while top:  # not the bodies of functions: they may need what their caller has
            node = top.pop()
            if isinstance(node, ast.Import):
                found |= {alias.name.partition(".")[0]: place for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and not node.level:
                found[(node.module or "").partition(".")[0]] = place
            elif not isinstance(node, ast.FunctionDef):
                top += ast.iter_child_nodes(node)
    assert "torch" in found and {name: place for name, place in found.items() if name not in allowed} == {}


@pytest.mark.parametrize(("backend", "packages"), [("cpu", []), ("cuda", ["nvidia-cutlass-dsl", "tvm-ffi"])])
def test_metadata_of_a_variant(backend: str, packages: list[str], folder: Path, tmp_path: Path) -> None:
    """A hash for each file but the metadata; an identifier that is a module name, and another one for other sources."""
    variant = folder / "build" / f"torch-{backend}"
    metadata = json.loads((variant / "metadata.json").read_text())
    hashed = {
        path.relative_to(variant).as_posix(): base64.b64encode(hashlib.sha256(path.read_bytes()).digest()).decode()
        for path in variant.rglob("*")
        if path.is_file() and path.suffix != ".pyc" and path.name != "metadata.json"
    }
    assert metadata["digest"] == {"algorithm": "sha256", "files": hashed}
    assert (metadata["python-depends"], metadata["backend"]) == (packages, {"type": backend})
    assert metadata["id"].isidentifier() and metadata["name"] == "moe-routing-kernels"
    script.write(tmp_path)
    again = json.loads((tmp_path / "build" / variant.name / "metadata.json").read_text())
    assert again == metadata, "the same sources give the same bytes"


def test_other_sources_have_another_identifier(monkeypatch: pytest.MonkeyPatch, folder: Path, tmp_path: Path) -> None:
    monkeypatch.setattr(script, "LAYERS", script.LAYERS + "\n")
    script.write(tmp_path)
    both = [json.loads((one / "build/torch-cpu/metadata.json").read_text())["id"] for one in (folder, tmp_path)]
    assert both[0] != both[1]


@pytest.mark.parametrize(
    ("place", "line", "found"),
    [
        ("a.py", "from moe_routing_kernels.b import c", "from .b import c"),
        ("a/b.py", "from moe_routing_kernels import c", "from .. import c"),
        ("a/b/c.py", "    from moe_routing_kernels.d.e import f", "    from ...d.e import f"),
        ("a.py", "from moe_routing_kernels_more import c", None),
        ("a.py", 'x = "from moe_routing_kernels import c"', None),
    ],
)
def test_imports_become_relative(place: str, line: str, found: str | None) -> None:
    text = f"if True:\n    pass\n{line}\n" if line[0] != " " else f"if True:\n{line}\n"
    assert script.relative(text, Path(place)) == text.replace(line, found or line)


@pytest.mark.parametrize("line", ["import moe_routing_kernels", "import os, moe_routing_kernels.gate as g"])
def test_what_binds_the_package_is_refused(line: str) -> None:
    with pytest.raises(ValueError, match=r"a\.py:1: got `import moe_routing_kernels`"):
        script.relative(line, Path("a.py"))
