"""Compiling CuTe DSL kernels, and compiled ones on disk: a second process loads an object file in 0.1 s and compiles nothing.

An object is named by everything it depends on: the sources of the kernel's module and of all modules that it imports
from its package and from this package, the versions of the compiler and its calling convention, the host's machine type, and the arguments
(architecture, dtype, shape class). It is written under a temporary name and renamed, one process at a time, so
concurrent jobs share one cache.

Compilation uses fake tensors, so it needs no GPU of the architecture; extents may be symbolic, so that one compiled kernel serves every
number of tokens.
"""

import contextlib
import contextvars
import functools
import hashlib
import importlib
import os
import platform
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import cutlass
import cutlass.cute as cute
import torch
from filelock import FileLock

from moe_routing_kernels import declarations, files
from moe_routing_kernels.closure import closure, fingerprint
from moe_routing_kernels.cute import VECTOR_BYTES
from moe_routing_kernels.errors import NoForm, bad
from moe_routing_kernels.target import of_device

DTYPES = {"bf16": cutlass.BFloat16, "fp16": cutlass.Float16, "fp32": cutlass.Float32}


def fake_tensor(dtype: Any, *shape: Any) -> Any:
    """A contiguous tensor for compilation, of a shape whose extents may be symbolic, its base aligned to 16 bytes."""
    order = tuple(reversed(range(len(shape))))
    return cute.runtime.make_fake_compact_tensor(dtype, shape, stride_order=order, assumed_align=VECTOR_BYTES)


def current_arch() -> str:
    """The DSL's name of the current CUDA device's architecture, such as sm_80 or sm_90a."""
    return of_device(torch.cuda.current_device()).arch


def compile_kernel(
    host: Callable, arguments: Sequence[Any], arch: str, keep: bool = False, only: str | None = None
) -> Any:
    """Compile a `@cute.jit` host function for `arch`; the last parameter of `host` is the stream.

    The result takes torch tensors and launches on torch's current stream. `keep` also stores PTX and cubin on it
    (`__ptx__`, `__cubin__`), for tests. `only` is the one architecture that a kernel is written for: raises `NoForm` for another,
    where the compiler itself would fail.
    """
    if only not in (None, arch):
        raise NoForm(f"arch: got {arch!r}; allowed: {only}, for which the kernel is written")
    stream = cute.runtime.make_fake_stream(use_tvm_ffi_env_stream=True)
    options = f"--gpu-arch {arch} --enable-tvm-ffi" + (" --keep-ptx --keep-cubin" if keep else "")
    return cute.compile(host, *arguments, stream, options=options)


FOLDER = "MOE_ROUTING_KERNELS_CACHE"  # environment variable that names another folder
MOST_PROBLEMS = 4096  # whose kernels are remembered


@dataclass(frozen=True)
class Asked:
    """A kernel that was asked for: the function that compiles it, by the name of its module and its own, and its arguments."""

    module: str
    name: str
    arguments: tuple[Any, ...]

    @property
    def path(self) -> Path:
        """The path of its object, whether or not it was compiled."""
        return folder() / f"{_key(self.module, self.arguments)}.o"

    def kernel(self) -> Any:
        """The kernel, compiled if it is not in the cache."""
        return getattr(importlib.import_module(self.module), self.name)(*self.arguments)


# Per thread or context: other threads go on to run kernels while one prepares a model.
_noted = contextvars.ContextVar[dict[Asked, None] | None]("noted", default=None)


@contextlib.contextmanager
def noting() -> Iterator[dict[Asked, None]]:
    """While open, kernels that are asked for are noted in the yielded dict, and neither compiled nor remembered."""
    assert _noted.get() is None, "already noting"
    noted: dict[Asked, None] = {}
    token = _noted.set(noted)
    try:
        yield noted
    finally:
        _noted.reset(token)


def per_problem(function: Callable[..., Any]) -> Callable[..., Any]:
    """Remember the kernel of a problem, so that binding it again chooses no configuration and looks nothing up."""
    remembered = functools.lru_cache(MOST_PROBLEMS)(function)

    def of_problem(*arguments: Any, **options: Any) -> Any:
        return (remembered if _noted.get() is None else function)(*arguments, **options)

    return functools.wraps(function)(of_problem)


def folder() -> Path:
    """The folder of the objects."""
    if named := os.environ.get(FOLDER):
        return Path(named)
    caches = os.environ.get("XDG_CACHE_HOME", "").strip() or os.path.expanduser("~/.cache")
    return Path(caches) / "moe-routing-kernels"


def objects() -> list[Path]:
    """The object files in the folder."""
    return sorted(folder().glob("*.o"))


def cached(build: Callable[..., Any]) -> Callable[..., Any]:
    """Keep what `build(arch, *shape, keep=False)` compiles, in this process and on disk.

    With `keep` it always compiles, because only a fresh kernel carries its PTX and cubin. The arguments must have a
    `repr` that tells them apart.
    """

    @functools.cache
    def loaded(*arguments: Any) -> Any:
        path = Asked(build.__module__, build.__name__, arguments).path
        if (loaded_kernel := _load(path)) is not None:  # without a lock, which a read-only folder cannot hold
            return loaded_kernel
        if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
            hint = "call once before the capture, or compile all kernels of a model with ops.prepare"
            raise bad("CUDA graph capture", "a kernel that is not compiled yet", "compiled kernels", hint)
        with _locked(path):
            loaded_kernel = _load(path, tell=True)
            if loaded_kernel is None:
                with files.replacing(path) as temporary:
                    build(*arguments).export_to_c(str(temporary), function_name="kernel")
                loaded_kernel = _load(path)
        return loaded_kernel

    def kernel(*arguments: Any, keep: bool = False) -> Any:
        if keep:
            return build(*arguments, keep=True)
        if (noted := _noted.get()) is not None:
            noted[Asked(build.__module__, build.__name__, arguments)] = None
            return None
        return loaded(*arguments)

    return functools.wraps(build)(kernel)


def _key(module: str, arguments: tuple[Any, ...]) -> str:
    """The name of an object: the kernel's module, and a hash of everything it depends on."""
    known = [version(name) for name in ("nvidia-cutlass-dsl", "apache-tvm-ffi")] + [platform.machine(), repr(arguments)]
    ours = module.partition(".")[0] == __name__.partition(".")[0]
    text = "\n".join([fingerprint(closure([module])) if ours else declarations.code(module, [module]), *known])
    return f"{module.rpartition('.')[2]}-{hashlib.sha256(text.encode()).hexdigest()[:24]}"


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Lock an object for writing. Raises `UserError` where the folder cannot be written."""
    lock = FileLock(f"{path}.lock")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        lock.acquire()
    except OSError as error:
        reason = error.strerror or str(error)
        raise bad(
            "kernel cache",
            str(path.parent),
            "a folder that can be written, or that holds every kernel",
            f"{reason}; {FOLDER} names another folder",
        ) from error
    try:
        yield
    finally:
        lock.release()


def _load(path: Path, tell: bool = False) -> Any:
    """The kernel of an object file; None where it is missing or damaged. With `tell`, prints why a file cannot be loaded."""
    if not path.exists():
        return None
    try:
        return cute.runtime.load_module(str(path), enable_tvm_ffi=True).kernel
    except Exception as error:
        if tell:
            print(f"kernel cache: {path} cannot be loaded and is compiled again ({error})", file=sys.stderr)
        return None
