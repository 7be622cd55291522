"""Writes moe_routing_kernels in the layout that the package `kernels` of Hugging Face loads: ``build/torch-<backend>/`` for each backend.

The loader gives the folder a module name of its own, so that several versions fit into one process. So imports of the package itself become
relative here, and torch operators are registered under that name (`implementations.KERNELS`). A variant is pure Python ("noarch"), has a
``metadata.json`` with a SHA-256 of each file, and a folder with the name of the package for older loaders. Without a clock and without a
path: the same sources give the same bytes. Standard library only.
"""

import argparse
import ast
import base64
import hashlib
import json
import shutil
from pathlib import Path

SOURCE = Path(__file__).parents[2] / "src/moe_routing_kernels"
NAME = SOURCE.name
# The packages that the backend's kernels need, all of which the loader allows.
BACKENDS = {"cpu": (), "cuda": ("nvidia-cutlass-dsl", "tvm-ffi")}
VERSION = 0  # of the interface, which may still change

LAYERS = '''"""Layers without state, whose `forward` takes the place of that of a model's module with the same weights."""

import torch

from .ops import fused_experts


class SwigluExperts(torch.nn.Module):
    """The experts of a layer behind a router of its own: gates above ups in `gate_up_proj` (E, 2 I, H), `down_proj` (E, H, I)."""

    has_backward: bool = True
    can_torch_compile: bool = True
    gate_up_proj: torch.Tensor
    down_proj: torch.Tensor

    def forward(
        self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        """Token rows (T, H), expert ids (T, k) and weights (T, k), float32 or as the rows -> combined (T, H)."""
        return fused_experts(hidden_states, top_k_index, top_k_weights, self.gate_up_proj, self.down_proj)
'''
EXPORTS = '\nfrom . import layers, ops\n\n__all__ = ["layers", "ops"]\n'
OLDER = '''"""The kernel under the package's name, where older loaders look for it."""

import importlib.util
import sys
from pathlib import Path

_file = Path(__file__).parents[1] / "__init__.py"
_name = "{id}"
if _name not in sys.modules:
    _spec = importlib.util.spec_from_file_location(_name, _file)
    sys.modules[_name] = importlib.util.module_from_spec(_spec)
    _spec.loader.exec_module(sys.modules[_name])
globals().update({{name: getattr(sys.modules[_name], name) for name in sys.modules[_name].__all__}})
__all__ = sys.modules[_name].__all__
'''


def relative(text: str, place: Path) -> str:
    """The source of a module at `place` below the package, with relative imports of the package itself.

    Raises ValueError for ``import moe_routing_kernels...``, which binds a name that no loader gives it.
    """
    lines = text.splitlines(keepends=True)
    dots = "." * len(place.parts)
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import) and any(alias.name.partition(".")[0] == NAME for alias in node.names):
            raise ValueError(f"{place}:{node.lineno}: got `import {NAME}`; allowed: `from {NAME} import ...`")
        if (
            isinstance(node, ast.ImportFrom)
            and not node.level
            and (module := node.module or "").partition(".")[0] == NAME
        ):
            old = f"from {module} import"
            if old not in lines[node.lineno - 1]:
                raise ValueError(f"{place}:{node.lineno}: got an import over several lines; allowed: `{old}` on one")
            new = f"from {dots}{module.partition('.')[2]} import"
            lines[node.lineno - 1] = lines[node.lineno - 1].replace(old, new)
    return "".join(lines)


def contents() -> dict[str, str]:
    """The text of each file of a variant, by its path; without the compatibility folder and the metadata, which hold the identifier."""
    found = {}
    for path in sorted(SOURCE.rglob("*")):
        place = path.relative_to(SOURCE)
        if path.suffix == ".py":
            found[place.as_posix()] = relative(path.read_text(encoding="utf-8"), place)
        elif path.suffix == ".json":
            found[place.as_posix()] = path.read_text(encoding="utf-8")
    return found | {"__init__.py": found["__init__.py"] + EXPORTS, "layers.py": LAYERS}


def write(folder: Path) -> list[Path]:
    """Write a variant per backend below ``folder/build``, in place of older ones; returns their folders."""
    files, made = contents(), []
    digest = hashlib.sha256(json.dumps(files, sort_keys=True).encode()).hexdigest()[:12]
    for backend, packages in BACKENDS.items():
        variant = folder / "build" / f"torch-{backend}"
        shutil.rmtree(variant, ignore_errors=True)
        identifier = f"_{NAME}_{backend}_{digest}"
        whole = files | {f"{NAME}/__init__.py": OLDER.format(id=identifier)}
        for place, text in whole.items():
            (variant / place).parent.mkdir(parents=True, exist_ok=True)
            (variant / place).write_text(text, encoding="utf-8")
        hashes = {
            place: base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
            for place, text in sorted(whole.items())
        }
        metadata = {
            "name": NAME.replace("_", "-"),
            "id": identifier,
            "version": VERSION,
            "license": "apache-2.0",
            "python-depends": list(packages),
            "backend": {"type": backend},
            "digest": {"algorithm": "sha256", "files": hashes},
        }
        (variant / "metadata.json").write_text(json.dumps(metadata, indent=2) + "\n", encoding="utf-8")
        made.append(variant)
    return made


def main() -> None:
    """Write the layout to the folder that the command line names."""
    parser = argparse.ArgumentParser(description="Write the kernels in the layout of Hugging Face's package `kernels`.")
    parser.add_argument("folder", type=Path, help="where `build/` is written")
    folder = parser.parse_args().folder
    if folder.exists() and not folder.is_dir():
        parser.error(f"folder: got {str(folder)!r}, which is a file; allowed: a folder, or a path where none is yet")
    for variant in write(folder):
        print(variant)


if __name__ == "__main__":
    main()
