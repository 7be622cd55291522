"""What an implementation raised, in words: a status, and the error with its place in one line."""

import sysconfig
import traceback
from pathlib import Path

from moe_routing_bench.packages import PACKAGES
from moe_routing_kernels.errors import one_line

_LIBRARIES = tuple({sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")})
# In errors of torch and of CUDA, and of a library that was loaded below a limit of memory.
_OF_MEMORY = ("not enough memory", "can't allocate memory", "CUBLAS_STATUS_ALLOC_FAILED")
_OF_MEMORY += ("Cannot allocate memory", "cannot allocate memory", "failed to map segment", "bad_alloc")


def described(error: BaseException) -> tuple[str, str]:
    """The status of an implementation that raised this, `out_of_memory` or `crashed`, and the reason."""
    text = said(error)
    kinds = {
        kind.__name__ for kind in type(error).__mro__
    }  # torch, which has one, could not be imported for want of memory
    memory = kinds & {"MemoryError", "OutOfMemoryError"} or any(part in text for part in _OF_MEMORY)
    return "out_of_memory" if memory else "crashed", text


def said(error: BaseException) -> str:
    """An error and its place in one line."""
    return one_line(f"{type(error).__name__}: {error} ({_place(error)})", 300)


def _place(error: BaseException) -> str:
    """File and line where the project's code, or code of no library, was last: an error inside torch is the fault of its caller."""
    frames = traceback.extract_tb(error.__traceback__)
    ours = set(PACKAGES)
    relevant = [
        frame
        for frame in frames
        if not ours.isdisjoint(Path(frame.filename).parents) or not frame.filename.startswith(_LIBRARIES)
    ]
    last = (relevant or frames)[-1]
    path = Path(last.filename)
    shown = next((path.relative_to(package.parent) for package in PACKAGES if package in path.parents), path)
    return f"{shown}:{last.lineno}"
