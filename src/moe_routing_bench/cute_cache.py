"""Compiled CuTe DSL kernels on disk: a second process loads an object file in 0.1 s and compiles nothing.

An object is named by everything it depends on: the sources of the kernel and of what kernels share, the versions of the
compiler and its calling convention, the host's machine type, and the arguments (architecture, dtype, shape class). It is
written under a temporary name and renamed, one process at a time, so concurrent jobs share one cache. Filling it needs
no GPU.
"""

import functools
import hashlib
import inspect
import os
import platform
import sys
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import cutlass.cute as cute
from filelock import FileLock
from platformdirs import user_cache_path

from moe_routing_bench import cute_support, files

FOLDER = "MOE_ROUTING_BENCH_KERNELS"  # environment variable that names another folder


def folder() -> Path:
    """Where the objects lie."""
    return Path(os.environ.get(FOLDER) or user_cache_path("moe-routing-bench") / "kernels")


def objects() -> list[Path]:
    """The object files that are there."""
    return sorted(folder().glob("*.o"))


def cached(build: Callable[..., Any], also: tuple[str, ...] = ()) -> Callable[..., Any]:
    """Keep what `build(arch, *shape, keep=False)` compiles, in this process and on disk.

    `also` names source files besides its own that its kernel is made of.
    With `keep` it always compiles, because only a fresh kernel carries its PTX and cubin. The arguments must have a `repr`
    that tells them apart.
    """

    @functools.cache
    def kernel(*arguments: Any, keep: bool = False) -> Any:
        if keep:
            return build(*arguments, keep=True)
        path = folder() / f"{_key(build, also, arguments)}.o"
        path.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(f"{path}.lock"):
            found = _load(path)
            if found is None:
                with files.replacing(path) as temporary:
                    build(*arguments).export_to_c(str(temporary), function_name="kernel")
                found = _load(path)
        return found

    return functools.wraps(build)(kernel)


def _key(build: Callable[..., Any], also: tuple[str, ...], arguments: tuple[Any, ...]) -> str:
    """Names an object: the kernel's module, and a hash of all that it depends on."""
    sources = [Path(inspect.getfile(build)), *map(Path, also), Path(cute_support.__file__), Path(__file__)]
    known = [version(name) for name in ("nvidia-cutlass-dsl", "apache-tvm-ffi")] + [platform.machine(), repr(arguments)]
    text = "\n".join([*(hashlib.sha256(source.read_bytes()).hexdigest() for source in sources), *known])
    return f"{build.__module__.rpartition('.')[2]}-{hashlib.sha256(text.encode()).hexdigest()[:24]}"


def _load(path: Path) -> Any:
    """The kernel of an object file; None where there is none, or a damaged one, which is removed."""
    if not path.exists():
        return None
    try:
        return cute.runtime.load_module(str(path), enable_tvm_ffi=True).kernel
    except Exception as error:
        print(f"kernel cache: {path} cannot be loaded and is compiled again ({error})", file=sys.stderr)
        path.unlink(missing_ok=True)
        return None
