"""Pack in CuTe DSL, to start from: a block of threads copies one output row, 16 bytes per thread and step."""

import functools
from collections.abc import Callable
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64
from torch import Tensor

from moe_routing_kernels.cute.cache import DTYPES, cached, compile_kernel, current_arch, fake_tensor
from moe_routing_kernels.pack import Pack

THREADS = 128


@cute.jit
def vectors(matrix: cute.Tensor, row: Any, width: cutlass.Constexpr):
    """One row of a matrix as (width, vectors of the row). Its offset has 64 bits: large matrices have more than 2**31 elements."""
    hidden = cutlass.const_expr(matrix.shape[1])
    offset = cute.assume(Int64(row) * hidden, divby=width)
    return cute.make_tensor(matrix.iterator + offset, cute.make_layout((width, hidden // width)))


@cute.kernel
def row_kernel(
    x: cute.Tensor, order: cute.Tensor, packed: cute.Tensor, top_k: cutlass.Constexpr, width: cutlass.Constexpr
):
    """Block r copies the token of choice order[r] to packed[r], or writes zeros where order[r] < 0: padding."""
    row, thread = cute.arch.block_idx()[0], cute.arch.thread_idx()[0]
    choice = order[row]
    source, target = vectors(x, cutlass.max(choice, 0) // top_k, width), vectors(packed, row, width)
    fragment = cute.make_rmem_tensor((width,), x.element_type)
    fragment.fill(0)
    for column in cutlass.range(thread, target.shape[1], THREADS):
        if choice >= 0:
            cute.autovec_copy(source[None, column], fragment)
        cute.autovec_copy(fragment, target[None, column])


@cute.jit
def row_host(
    x: cute.Tensor,
    order: cute.Tensor,
    packed: cute.Tensor,
    top_k: cutlass.Constexpr,
    width: cutlass.Constexpr,
    stream: Any,
):
    row_kernel(x, order, packed, top_k, width).launch(grid=(order.shape[0], 1, 1), block=(THREADS, 1, 1), stream=stream)


@cached
def compile_for(arch: str, dtype: str, hidden: int, top_k: int, keep: bool = False) -> Any:
    """Compile for an architecture, without a GPU. The object file is named after this source, so an edit compiles anew."""
    element = DTYPES[dtype]
    tokens, rows = cute.sym_int(), cute.sym_int()  # one kernel for any number of them
    matrices = fake_tensor(element, tokens, hidden), fake_tensor(Int32, rows), fake_tensor(element, rows, hidden)
    return compile_kernel(row_host, [*matrices, top_k, _width(dtype)], arch, keep)


def _width(dtype: str) -> int:
    """Elements of 16 bytes."""
    return 128 // DTYPES[dtype].width


def unsupported(problem: Pack) -> str | None:
    """Why this problem cannot run, or None."""
    if problem.packed != problem.dtype:
        return "copies rows as they are"
    return "takes rows of whole 16 bytes" if problem.hidden % _width(problem.dtype) else None


def precompile(problem: Pack, arch: str) -> None:
    """Put the kernel of a problem into the cache; needs no GPU."""
    compile_for(arch, problem.dtype, problem.hidden, problem.top_k)


def bind(problem: Pack, *, x: Tensor, order: Tensor, inverse: Tensor, packed: Tensor) -> Callable[[], None]:
    """Bind x (T, H) and order (R,) int32; the call writes packed (R, H)."""
    kernel = compile_for(current_arch(), problem.dtype, problem.hidden, problem.top_k)
    return functools.partial(kernel, x, order, packed)
