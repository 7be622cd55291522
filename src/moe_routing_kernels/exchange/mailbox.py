"""Memory that the GPUs of one host share, for `ep.layer(..., mailbox=)`: rows and sums are stored into it instead of sent as messages."""

import copy
import functools
import importlib.util

import torch
import torch.distributed as dist
from torch import Tensor

from moe_routing_kernels.errors import bad, whole
from moe_routing_kernels.target import Target

__all__ = ["Mailbox", "known_group"]

_ALIKE = ("most_tokens", "hidden", "top_k", "experts", "dtype", "multiprocessors")
_DTYPES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}


class Mailbox:
    """What each rank of a group receives in a layer: N most_tokens rows (H,) with ids and weights, and as many sums back.

    All ranks make one together, with the same sizes, and it serves any number of layers of these sizes, one after the other: a call goes
    `out`, then `back`, in the order of one stream. `experts` are those of a rank. Nothing waits for the host, and CUDA graphs may capture
    calls. A rank that has not come after `seconds` is named by a `RuntimeError` of a later call; nothing it computed since is right,
    and the mailbox is of no use any more. `out` and `back` have no gradients: those of a layer are in `ops.mailbox_gradients`.

    `copies` mailboxes in one piece of memory are `numbered`, for calls whose rows must stay while others are made.

    Bytes of each GPU and copy: about 2 N most_tokens (b H + 12 k), with b bytes per element. Raises `UserError` where ranks do not have a GPU each, all on
    one host, without CuTe DSL, and for sizes that differ by rank.
    """

    def __init__(
        self,
        most_tokens: int,
        hidden: int,
        top_k: int,
        experts: int,
        dtype: torch.dtype = torch.bfloat16,
        group: dist.ProcessGroup | None = None,
        seconds: float = 30.0,
        copies: int = 1,
    ) -> None:
        self.group = known_group(group)
        sizes = {"most_tokens": most_tokens, "hidden": hidden, "top_k": top_k, "experts": experts}
        for name, size in sizes.items():
            if not whole(size) or size < 1:
                raise bad(name, size, "a whole number, at least 1")
        if dtype not in _DTYPES:
            raise bad("dtype", dtype, ", ".join(map(str, _DTYPES)))
        target = Target.here()
        if target.vendor != "nvidia" or importlib.util.find_spec("cutlass") is None:
            raise bad(
                "mailbox",
                target.arch,
                "GPUs by NVIDIA and nvidia-cutlass-dsl",
                "leave out mailbox: messages do the same",
            )
        from torch.distributed import _symmetric_memory as symmetric

        from moe_routing_kernels.exchange import cute_back, cute_exchange

        device = torch.device("cuda", torch.cuda.current_device())
        self.dtype, self._seconds = dtype, seconds
        counts = (*sizes.values(), list(_DTYPES).index(dtype), target.multiprocessors)
        fewest = _agreed(counts, self.group, device)
        shape = (self.group.size(), experts, most_tokens, hidden, top_k, _DTYPES[dtype])
        self.letters, self._tiling = cute_exchange.choose(*shape, fewest)
        self._choices, tiling = cute_exchange.of_choices(*shape, fewest)
        self._memory = symmetric.empty(copies * self._bytes, dtype=torch.uint8, device=device)
        handle = symmetric.rendezvous(self._memory, self.group)
        self._memory.zero_()
        torch.cuda.synchronize()
        dist.barrier(group=self.group)
        self._failed = torch.zeros(1, dtype=torch.int32, pin_memory=True)
        self._said = self._failed.numpy()
        peers = torch.tensor(list(handle.buffer_ptrs), dtype=torch.int64, device=device)
        self._place = (peers, self.group.rank(), round(seconds * 1e9), self._failed.data_ptr())
        self._lay()
        self._out = cute_exchange.compile_out(target.arch, shape[-1], self.letters, self._tiling)
        back = functools.partial(cute_back.compile_back, target.arch)
        self._back = functools.cache(functools.partial(back, shape[-1], self.letters, self._tiling))
        self._back_choices = functools.cache(functools.partial(back, "fp32", self._choices, tiling, False))
        self._read = functools.cache(functools.partial(cute_exchange.compile_read, target.arch, self.letters))

    @property
    def _bytes(self) -> int:
        """Bytes of a copy: rows both ways, and the way back of a gradient per choice."""
        return self.letters.bytes + self._choices.bytes

    def numbered(self, copy_number: int) -> "Mailbox":
        """The mailbox in one of the `copies`, on all ranks the same. It has rows, ids and weights of its own."""
        start, own = copy_number * self._bytes, copy.copy(self)
        own._memory = self._memory[start : start + self._bytes]
        own._place = (self._place[0] + start, *self._place[1:])
        own._lay()
        return own

    def _lay(self) -> None:
        """The parts of the memory that callers see, and where gradients of choices are."""
        letters = self.letters
        self._place_of_choices = (self._place[0] + letters.bytes, *self._place[1:])
        self.rows = self._part(0, letters.hidden, self.dtype)
        self.ids = self._part(letters.ids_at, letters.top_k, torch.int32)
        self.weights = self._part(letters.weights_at, letters.top_k, torch.float32)

    def _part(self, start: int, width: int, dtype: torch.dtype) -> Tensor:
        """(N most_tokens, width) of the memory, from a byte on."""
        size = self.letters.rows * width * dtype.itemsize
        return self._memory[start : start + size].view(dtype).view(self.letters.rows, width)

    def out(self, x: Tensor, topk_ids: Tensor, topk_weights: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Rows x (T, H), ids (T, k) int32 of all experts and weights (T, k) float32 to the ranks of their experts -> rows (N most_tokens, H), ids
        counted from the rank's first expert, -1 elsewhere, and weights of what came.

        Rows without an id of this rank, and their weights, hold anything. Raises `RuntimeError` where a rank did not come to an earlier call.
        """
        self._come()
        self._out(x, topk_ids, topk_weights, *self._place)
        return self.rows, self.ids, self.weights

    def back(
        self,
        sums: Tensor,
        topk_ids: Tensor,
        residual: Tensor | None = None,
        combined: Tensor | None = None,
        came: Tensor | None = None,
    ) -> Tensor:
        """Sums (N most_tokens, H) of the rows that came, back to the ranks of their tokens -> combined (T, H), added up in float32, for ids (T, k) as
        of `out`; plus residual (T, H). `came` are a copy of the ids (N most_tokens, k) that came, if the mailbox holds those of another call."""
        combined = sums.new_empty(len(topk_ids), sums.shape[1]) if combined is None else combined
        came, kernel = self.ids if came is None else came, self._back(residual is not None)
        kernel(sums, came, topk_ids, combined if residual is None else residual, combined, *self._place)
        return combined

    def back_choices(self, values: Tensor, topk_ids: Tensor, came: Tensor) -> Tensor:
        """Values (N most_tokens, k) float32 of the choices that came, back to their tokens -> (T, k), for ids (T, k) as of `out` and the ids (N
        most_tokens, k) that `came`. Values of ids that are not of this rank must be 0."""
        more = self._choices.hidden - values.shape[1]
        values = torch.nn.functional.pad(values, (0, more)) if more else values
        combined = values.new_empty(len(topk_ids), self._choices.hidden)
        self._back_choices()(values, came, topk_ids, combined, combined, *self._place_of_choices)
        return combined[:, : topk_ids.shape[1]]

    def read(self) -> None:
        """Say that what came by `out` was read, and wait until the other ranks have: then any call may follow, not only `back`."""
        self._read()(*self._place)

    def check(self, x: Tensor, ids: Tensor, local: int, most_tokens: int | None, group: dist.ProcessGroup) -> None:
        """Raises `UserError` for a layer that this is not for."""
        known = self.letters
        sizes = (x.shape[1], ids.shape[1], local, x.dtype, group.group_name)
        own = (known.hidden, known.top_k, known.local, self.dtype, self.group.group_name)
        if sizes != own:
            raise bad("mailbox (hidden, top_k, experts, dtype, group)", own, f"{sizes}, as of this call")
        if x.shape[0] > known.tokens:
            raise bad("x", tuple(x.shape), f"at most {known.tokens} tokens, as the mailbox takes")
        if most_tokens is not None:
            raise bad("most_tokens", most_tokens, "None with a mailbox, which has its own")

    def _come(self) -> None:
        """`RuntimeError` where a rank has not come in time."""
        if rank := int(self._said[0]):
            raise RuntimeError(f"rank {rank - 1} did not come to an exchange within {self._seconds:g} seconds")


def _agreed(counts: tuple[int, ...], group: dist.ProcessGroup, device: torch.device) -> int:
    """The fewest multiprocessors of any rank. Raises `UserError` for other counts that differ."""
    own = torch.tensor(counts, device=device)
    every = torch.empty(group.size() * len(counts), dtype=own.dtype, device=device)
    dist.all_gather_into_tensor(every, own, group=group)
    by_rank = every.view(group.size(), -1).tolist()
    for rank, theirs in enumerate(by_rank):
        for name, ours, other in zip(_ALIKE[:-1], counts, theirs, strict=False):
            if ours != other:
                raise bad(f"{name} of rank {rank}", other, f"{ours}, as rank {group.rank()} has")
    return min(theirs[-1] for theirs in by_rank)


def known_group(group: dist.ProcessGroup | None) -> dist.ProcessGroup:
    """The group, or the default one. Raises `UserError` without one, and on a rank outside."""
    if group is None:
        if not (dist.is_available() and dist.is_initialized()):
            hint = "call torch.distributed.init_process_group first"
            raise bad("group", None, "a process group of torch.distributed", hint)
        group = dist.group.WORLD
    if not isinstance(group, dist.ProcessGroup):
        raise bad("group", group, "a process group of torch.distributed that this rank is in")
    return group
