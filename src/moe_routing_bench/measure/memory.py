"""Memory of inputs and outputs: tensors between guard bytes, poison that no right answer holds, and checksums; and what a call takes on top."""

import functools
import random
import secrets
from collections.abc import Callable, Mapping, Sequence
from math import prod

import torch
from torch import Tensor

from moe_routing_bench.benches.checks import nbytes
from moe_routing_bench.measure.sharing import Arena

INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by size
_GUARD, _GUARD_BYTE = 512, 0xA5  # bytes on either side of a tensor, a multiple of every alignment that kernels ask for
_COMPARED = 1 << 28  # bytes that are compared at a time
_POISON_INT = 0x40  # in every byte: far out of range of every index, and far below overflow when added to
_ROW, _ROWS_COUNT = 1024, 1_000_003  # elements of a row of a checksum, and what a row counts more than a column
SCARS = 16  # elements of an output
_POISON_FLOAT = 0xFF  # NaN in every format of the table
_AT_A_TIME = 1 << 25  # bytes that a GPU multiplies at a time
_WORD = 4  # bytes of a number of a checksum: few numbers, whose sums rarely pass 64 bits
_LANE, _LANES = 8, 1 << 17  # bytes that a digest reads as a number, and how many of these at a time
_CALLS = 3  # after which nothing is compiled, tuned or allocated for the first time


class Guarded:
    """Tensors of one shape in one piece of memory, `whole`, each between guard bytes."""

    def __init__(self, like: Tensor, count: int, arena: Arena | None = None) -> None:
        """`count` tensors of the form of `like`, uninitialised, in memory of `arena` if there is one."""
        self._end = _GUARD + nbytes(like)
        stride = -(-self._end // _GUARD) * _GUARD + _GUARD
        empty = arena.empty if arena else functools.partial(torch.empty, dtype=torch.uint8, device=like.device)
        self.whole = empty(count * stride).view(count, stride)
        self.tensors = [inside(row, like.dtype, like.shape) for row in self.whole]
        self.mend()

    def _guards(self) -> tuple[Tensor, Tensor]:
        return self.whole[:, :_GUARD], self.whole[:, self._end :]

    def rows(self, first: int, step: int) -> Tensor:
        """The bytes (n, nbytes) of the tensors first, first + step, ..."""
        return self.whole[first::step, _GUARD : self._end]

    def unlike(self, known: Tensor, first: int, step: int) -> Tensor:
        """Which of the tensors first, first + step, ... differ from `known` (nbytes,) in a byte: (n,) bool, on the device."""
        parts = self.rows(first, step).split(max(1, _COMPARED // known.numel()) if known.numel() else 1)
        return torch.cat([(part != known).any(1) for part in parts])

    def intact(self) -> bool:
        """Whether the guards are as they were."""
        return all(bool((guard == _GUARD_BYTE).all()) for guard in self._guards())

    def mend(self) -> None:
        """Write the guards."""
        for guard in self._guards():
            guard.fill_(_GUARD_BYTE)

    def poison(self) -> None:
        """Fill the tensors, not the guards, with what no right answer holds: eight bytes at a time, as bytes of rows take a GPU eight times as
        long."""
        value, lanes = _poison_of(self.tensors[0]), (self._end - _GUARD) // _LANE
        first = _GUARD // _LANE
        self.whole.view(torch.int64)[:, first : first + lanes].fill_(_lane_of(value))
        self.whole[:, _GUARD + lanes * _LANE : self._end].fill_(value)


def inside(row: Tensor, dtype: torch.dtype, shape: Sequence[int]) -> Tensor:
    """The tensor between the guard bytes of a row of `Guarded.whole`."""
    return row[_GUARD : _GUARD + prod(shape) * dtype.itemsize].view(dtype).view(*shape)


def poison(tensors: Mapping[str, Tensor]) -> None:
    """Fill tensors with what no right answer holds."""
    for tensor in tensors.values():
        tensor.view(torch.uint8).fill_(_poison_of(tensor))


def places(memory: Tensor, like: Tensor, count: int = SCARS) -> Tensor:
    """Where `count` elements lie that cannot be foreseen: the places (n, e, size) of their bytes, of tensors like `like`, in rows of bytes
    (n, nbytes). More than a few are others in every row."""
    size, of = like.element_size(), like.numel()
    if count <= SCARS:
        chosen = torch.tensor(some(count, of), dtype=torch.long, device=memory.device).expand(len(memory), -1)
    else:  # sooner than so many by the system's generator
        unforeseen = torch.Generator(memory.device).manual_seed(secrets.randbits(63))
        shape = (len(memory), min(count, of))
        chosen = torch.randint(max(of, 1), shape, generator=unforeseen, device=memory.device)
    return chosen[..., None] * size + torch.arange(size, device=memory.device)


def scar(memory: Tensor, like: Tensor, places: Tensor) -> Tensor:
    """Fill the elements at `places` with what no right answer holds; returns `places`."""
    memory.scatter_(1, places.flatten(1), _poison_of(like))
    return places


def scarred(memory: Tensor, like: Tensor, places: Tensor) -> Tensor:
    """In which of the rows any of the elements that `scar` has filled is as it left them: (n,) bool, on the device."""
    return (memory.gather(1, places.flatten(1)).view(places.shape) == _poison_of(like)).all(-1).any(-1)


def _lane_of(byte: int) -> int:
    """Eight such bytes as a number."""
    return int.from_bytes(bytes([byte]) * _LANE, "little", signed=True)


def _poison_of(tensor: Tensor) -> int:
    return _POISON_FLOAT if tensor.is_floating_point() else _POISON_INT


def as_bytes(tensor: Tensor) -> Tensor:
    """The memory of a contiguous tensor, (nbytes,) uint8."""
    return tensor.contiguous().view(-1).view(torch.uint8)


def checksum(tensor: Tensor) -> int:
    """A sum over the memory of a contiguous tensor as integers of `_WORD` bytes, each times its column plus a multiple of its row, in rows
    of `_ROW`: a call that puts elements elsewhere changes it. In parts: what all sets share is too large for a copy, the more so for one in
    64 bits."""
    data, step, total, row = as_bytes(tensor), max(1, _COMPARED // 8 // _ROW), [], 1
    words = 0 if data.storage_offset() % _WORD else len(data) // _WORD * _WORD
    in_words = data[:words].view(INTEGERS[_WORD]) if words else data[:0]
    for flat in (in_words, data[words:]):
        whole = len(flat) // _ROW * _ROW
        for part in (*flat[:whole].view(-1, _ROW).split(step), flat[whole:].view(1, -1)):
            columns, rows = (part.sum(dim, dtype=torch.int64) for dim in (0, 1))
            total += [
                (columns * torch.arange(1, 1 + len(columns), device=flat.device)).sum(),
                (rows * torch.arange(row, row + len(rows), device=flat.device)).sum() * _ROWS_COUNT,
            ]
            row += len(rows)
    return int(torch.stack(total).sum())


def digests(rows: Tensor, key: int) -> Tensor:
    """A number for each of the rows of bytes (n, nbytes): (n,) int64, on the device. Rows with equal bytes have equal numbers, others differ
    unless an author knew the key: a sum of lanes of 64 bits, each times a random odd number."""
    count, size = rows.shape
    if size % _LANE or rows.storage_offset() % _LANE or (count > 1 and rows.stride(0) % _LANE):
        padded = rows.new_zeros(count, size + -size % _LANE)
        padded[:, :size] = rows
        rows = padded
    total = rows.new_zeros(count, dtype=torch.int64)
    if not size:
        return total
    lanes, factors = rows.view(torch.int64), _factors(key, rows.device)
    steps = random.Random(key)
    if _has_mv(rows):
        for part in lanes.split(_LANES, 1):
            total += torch.mv(part, factors[: part.shape[1]]) * (steps.getrandbits(62) | 1)
        return total
    whole = lanes.shape[1] // _LANES
    *of_parts, of_rest = [steps.getrandbits(62) | 1 for _ in range(whole + 1)]
    weights = torch.tensor(of_parts, dtype=torch.int64, device=rows.device)
    parts = lanes[:, : whole * _LANES].unflatten(1, (whole, _LANES))
    most = max(1, _AT_A_TIME // (count * _LANES * _LANE))  # few launches; intermediate numbers stay in the cache
    for part, weight in zip(parts.split(most, 1), weights.split(most), strict=True) if whole else ():
        total += ((part * factors).sum(2) * weight).sum(1)
    rest = lanes[:, whole * _LANES :]
    return total + (rest * factors[: rest.shape[1]]).sum(1) * of_rest


def _has_mv(rows: Tensor) -> bool:
    """Whether a product of integers with a vector is there, which needs no intermediate numbers: on a CPU."""
    return rows.device.type == "cpu"


@functools.lru_cache(2)
def _factors(key: int, device: torch.device) -> Tensor:
    """Random odd numbers (n,) int64 for as many lanes as are multiplied at a time."""
    generator = torch.Generator(device).manual_seed(key)
    return torch.randint(1 << 62, (_LANES,), generator=generator, device=device) * 2 + 1


def extent(tensor: Tensor) -> tuple[int, int]:
    """The first address of a tensor's memory, and the one after its last."""
    last = (
        sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride(), strict=True))
        if tensor.numel()
        else -1
    )
    return tensor.data_ptr(), tensor.data_ptr() + (last + 1) * tensor.element_size()


def some(count: int, of: int) -> list[int]:
    """So many numbers below `of`, or all of them, that cannot be foreseen."""
    return secrets.SystemRandom().sample(range(of), min(count, of))


def footprint(before: int | None, call: Callable[[], object]) -> dict[str, int]:
    """Row fields of a call that was bound when `allocated` said `before`: `workspace_bytes`, kept since then by binding and by the first
    calls; `transient_bytes`, the most that one more call has on top; and their sum, `peak_memory_bytes`. Empty for None, a CPU.

    Inputs and outputs are the harness's and count nowhere. Memory that other libraries take outside of torch's allocator is not seen.
    """
    if before is None:
        return {}
    for _ in range(_CALLS):
        call()
    torch.cuda.synchronize()
    kept = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    call()
    torch.cuda.synchronize()
    workspace, transient = max(0, kept - before), torch.cuda.max_memory_allocated() - kept
    return {"workspace_bytes": workspace, "transient_bytes": transient, "peak_memory_bytes": workspace + transient}


def allocated(device: str) -> int | None:
    """Bytes that torch's allocator has given out on the GPU; None on a CPU."""
    if device == "cpu":
        return None
    torch.cuda.synchronize()
    return torch.cuda.memory_allocated()
