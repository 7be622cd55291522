"""exchange: token rows to the ranks of their experts and their sums back, by stores into the memory of other GPUs.

`Letters` says where everything lies in the memory that a rank shares with the others; kernels are in `cute_exchange`, and `mailbox`
allocates. Nothing here imports torch.
"""

from dataclasses import dataclass

from moe_routing_kernels.cute import VECTOR_BYTES


@dataclass(frozen=True)
class Letters:
    """What each rank receives: from each rank, `tokens` rows (H,), ids (k,) int32 and weights (k,) float32; and as many sums (H,) back.

    All of one kind lie together, by source rank, then by the source's token. Offsets are bytes.
    """

    ranks: int
    local: int  # experts of a rank
    tokens: int  # the most that a rank has
    hidden: int
    top_k: int
    itemsize: int  # bytes of an element of a row
    blocks: int  # thread blocks of a kernel, the same on all ranks: block b waits for the blocks b of the others
    parts: int  # of the way back: a block sends one while it waits for the one before it

    @property
    def row_bytes(self) -> int:
        """Bytes of a row."""
        return self.hidden * self.itemsize

    @property
    def rows(self) -> int:
        """Rows that come to a rank."""
        return self.ranks * self.tokens

    @property
    def choices(self) -> tuple[int, int]:
        """Shape of the ids and of the weights that come to a rank."""
        return self.rows, self.top_k

    @property
    def sums_at(self) -> int:
        """Offset of the sums; rows are at 0."""
        return _aligned(self.rows * self.row_bytes)

    @property
    def ids_at(self) -> int:
        """Offset of the ids."""
        return self.sums_at + _aligned(self.rows * self.row_bytes)

    @property
    def weights_at(self) -> int:
        """Offset of the weights."""
        return self.ids_at + _aligned(self.rows * self.top_k * 4)

    @property
    def flags_at(self) -> int:
        """Offset of the flags (slot, rank, block) int32: 1 where the stores of that block of that rank have arrived."""
        return self.weights_at + _aligned(self.rows * self.top_k * 4)

    @property
    def slots(self) -> int:
        """Flags of a block and rank: out, read, and each part of the way back."""
        return 2 + self.parts

    @property
    def bytes(self) -> int:
        """Bytes in all, whole vectors."""
        return self.flags_at + _aligned(self.slots * self.ranks * self.blocks * 4)


def _aligned(size: int) -> int:
    """The size, rounded up to whole vectors."""
    return -(-size // VECTOR_BYTES) * VECTOR_BYTES
