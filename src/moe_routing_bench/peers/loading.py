"""Parts of other packages, loaded without importing the packages: compiled operators, and single modules.

vLLM and SGLang register their CUDA kernels with torch when a library is loaded. Their Python packages ask for much more than the kernels do,
and for other versions of torch.

Their Triton kernels, tables of tiles and what calls them are in a few files, which import configuration, platforms and servers. Each chosen
file is run as it is, with stand-ins for all that it imports of its package otherwise, by a module of its own that `sys.modules` has under a
private name only: a package that is complete, imported before or after, is not touched.
"""

import builtins
import importlib.util
import re
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from types import ModuleType
from typing import Any


@dataclass(frozen=True)
class Library:
    """A shared library within a package, by its path there, and the namespace below ``torch.ops`` that it registers."""

    package: str
    path: str
    namespace: str

    def missing(self) -> str | None:
        """Why there is no such library, or None."""
        if importlib.util.find_spec(self.package) is None:
            return f"{self.package} is not installed"
        if self._file() is None:
            return f"{self.package} is installed without {self.path}: it is of another version, or not for CUDA"
        return None

    def operators(self) -> Any:
        """Its operators, as attributes. Raises FileNotFoundError where there is none, OSError where it cannot be loaded."""
        import torch

        if (file := self._file()) is None:
            raise FileNotFoundError(f"{self.package} has no {self.path}")
        torch.ops.load_library(file)  # loads a library once
        return getattr(torch.ops, self.namespace)

    def _file(self) -> Path | None:
        spec = importlib.util.find_spec(self.package)
        folders = (Path(folder) for folder in (spec and spec.submodule_search_locations) or ())
        return next((folder / self.path for folder in folders if (folder / self.path).is_file()), None)


VLLM = Library("vllm", "_moe_C_stable_libtorch.abi3.so", "_moe_C")
VLLM_ROWS = Library("vllm", "_C_stable_libtorch.abi3.so", "_C")  # activations, and quantised rows
SGLANG = Library("sgl_kernel", "sm90/common_ops.abi3.so", "sgl_kernel")
LIBRARIES = {"vLLM": VLLM, "SGLang": SGLANG}  # of kernels that both have, with one interface
MSLK = Library("mslk", "mslk.so", "mslk")


_REQUIREMENT = re.compile(r"([A-Za-z0-9._-]+)[^=;]*(?:==([^,;\s]+))?")
_PRIVATE = f"{__name__}."  # before the names of modules that were run from their files


class StandIn:
    """What is imported from a module that is neither given nor run: a decorator, a base class or a value that nothing depends on.

    It answers as long as modules are loaded. Afterwards it raises RuntimeError, so that no work is left out of a measured call in silence.
    """

    def __init__(self, name: str, loading: Callable[[], bool]) -> None:
        self._name, self._loading = name, loading

    def __getattr__(self, name: str) -> "StandIn":
        if name.startswith("__"):
            raise AttributeError(name)
        return StandIn(f"{self._name}.{name}", self._loading)

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        """What a decorator returns for a function or class: the same; else another stand-in, or false where a condition is asked for."""
        self._check()
        alone = len(arguments) == 1 and not options
        return arguments[0] if alone and callable(arguments[0]) else self

    def __bool__(self) -> bool:
        self._check()
        return False

    def __mro_entries__(self, bases: tuple) -> tuple:
        return ()

    def __or__(self, other: object) -> "StandIn":
        return self

    __ror__ = __or__

    def __getitem__(self, key: object) -> "StandIn":
        return self

    def _check(self) -> None:
        if not self._loading():
            raise RuntimeError(f"{self._name} is a stand-in: its package was not loaded as a whole")


class Partial:
    """Modules of `package`: those named in `files` are run from its folder, when they are first imported; `given` has members of others
    by module, and members that replace those of a file once it has run. Everything else of the package
    is a stand-in. A module of another package is taken from `given` where that has it, and imported where not."""

    def __init__(
        self,
        package: str,
        files: tuple[str, ...],
        given: Mapping[str, Mapping[str, Any]],
    ) -> None:
        self._package, self._files, self._given = package, files, given
        self._modules: dict[str, ModuleType] = {}
        self._depth = 0

    def module(self, name: str) -> ModuleType:
        """The module of a full name. Raises FileNotFoundError where the package has no such file, and what running it raises."""
        self._depth += 1
        try:
            return self._loaded(name)
        finally:
            self._depth -= 1

    def _loaded(self, name: str) -> ModuleType:
        if name in self._modules:
            return self._modules[name]
        parent, _, last = name.rpartition(".")
        above = self._loaded(parent) if parent else None
        if name in self._files:
            module = self._run(name)
        else:
            module = _Known(name, lambda: self._depth > 0)
            self._modules[name] = module
        vars(module).update(self._given.get(name, {}))
        if above is not None:
            setattr(above, last, module)
        return module

    def _run(self, name: str) -> ModuleType:
        """Run a file as a module whose own imports come here."""
        path = file_of(name)
        if path is None:
            raise FileNotFoundError(f"{self._package} is installed without {name}: it is of another version")
        module = self._modules[name] = ModuleType(_PRIVATE + name)
        sys.modules[module.__name__] = module  # where dataclasses look their fields' types up
        package = name if path.name == "__init__.py" else name.rpartition(".")[0]

        def importing(
            wanted: str, scope: Any = None, local: Any = None, members: Any = (), level: int = 0
        ) -> ModuleType:
            if level:
                base = package.rsplit(".", level - 1)[0] if level > 1 else package
                wanted = f"{base}.{wanted}" if wanted else base
            return self._import(wanted, members or ())

        vars(module).update(__file__=str(path), __builtins__=vars(builtins) | {"__import__": importing})
        try:
            exec(compile(path.read_bytes(), str(path), "exec"), vars(module))
        except BaseException:
            del self._modules[name], sys.modules[module.__name__]
            raise
        return module

    def _import(self, name: str, members: tuple[str, ...]) -> ModuleType:
        """What an import statement is given: the module, or the first of its path where no members are asked for."""
        top = name.partition(".")[0]
        if top != self._package and name not in self._given:
            return builtins.__import__(name, {}, {}, members)
        module = self.module(name)
        for member in members:
            if f"{name}.{member}" in (*self._files, *self._given):
                self.module(f"{name}.{member}")
        return module if members else self._modules[top]


class _Known(ModuleType):
    """A module in place of a package's own: what it was not given is a stand-in."""

    def __init__(self, name: str, loading: Callable[[], bool]) -> None:
        super().__init__(name)
        self._loading = loading

    def __getattr__(self, name: str) -> StandIn:
        if name.startswith("__"):
            raise AttributeError(name)
        return StandIn(f"{self.__name__}.{name}", self._loading)


class Quiet:
    """A logger without output, which a file may be given."""

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *arguments, **options: None


def file_of(name: str) -> Path | None:
    """The file of a module by its full name, found without importing its package, or None."""
    top, *rest = name.split(".")
    spec = importlib.util.find_spec(top)
    for folder in (Path(folder) for folder in (spec and spec.submodule_search_locations) or ()):
        for path in (folder.joinpath(*rest).with_suffix(".py"), folder.joinpath(*rest, "__init__.py")):
            if rest and path.is_file():
                return path
    return None


def complete(package: str) -> bool:
    """Whether all that a package's distribution requires is installed, in the versions that it pins: then it can be imported whole."""
    try:
        wanted = metadata.requires(package) or []
        for line in wanted:
            name, version = _REQUIREMENT.match(line).groups()  # type: ignore[union-attr]
            if ";" not in line and metadata.version(name) != (version or metadata.version(name)):
                return False
    except metadata.PackageNotFoundError:
        return False
    return True
