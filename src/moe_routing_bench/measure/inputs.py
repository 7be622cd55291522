"""The input and output sets of a cell: a draw each, until a rotation through them finds the L2 cache cold.

Implementations are bound to the tensors of a set. Their values can be replaced in place, so that nothing computed from them
when an implementation was bound or captured is of use; and each tensor lies between guard bytes that no call may write.
"""

import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import ceil
from typing import Any

import torch
from torch import Tensor

from moe_routing_bench.benches.checks import nbytes
from moe_routing_bench.grid.cell import Cell, Job
from moe_routing_bench.measure import calibration, memory, token_rows
from moe_routing_bench.measure.sharing import Arena
from moe_routing_bench.measure.timers import ROTATION_US
from moe_routing_bench.workload.draw import again

_LEAST_ROTATION_US = 1000.0, ROTATION_US  # of implementations in processes of their own, on a GPU and on a CPU
_COPIED = 1 << 28  # bytes at a time


@dataclass(frozen=True)
class Drawn:
    """Inputs by name, and what the outputs should be."""

    inputs: dict[str, Tensor]
    expected: dict[str, Tensor]


class Sets:
    """R input and output sets; set i holds draw i mod D of the draws that were loaded last.

    `base` are draws by the cell's seed, one for each set, so that the answer of a set is right for no other: what is timed.
    `fresh` is one more, by a `nonce` that is unknown beforehand: other values, and the same loads of other experts by other tokens.
    `near` is the first of `base` but for a few tokens, which are those of `fresh`. What all sets share is in all. `cost` is that of
    a call, in the mean over the sets where they share weights.
    """

    def __init__(self, job: Job, definition: Any, device: str, arena: Arena | None = None) -> None:
        """Draw, allocate and load the base draws. More sets than `check_seeds` are for a GPU's L2 cache, and for isolated implementations.

        Runners of these can map what is in the `arena`: inputs and outputs of sets, not what is expected of them.
        """
        cell, settings = job.cell, job.settings
        shared = definition.shared(cell, cell.seed, device) if hasattr(definition, "shared") else {}
        if arena:
            shared = {name: arena.moved(tensor) for name, tensor in shared.items()}
        self._tokens = ceil(cell.tokens / (cell.get("ranks") or 1))  # of a tensor, where each rank has its own
        self.nonce, self._key = secrets.randbits(31), secrets.randbits(62)

        def draw(seed: int) -> Drawn:
            inputs = definition.build(cell, seed, device) | shared
            return Drawn(inputs, definition.reference(cell, inputs))

        first = draw(cell.seed)
        parts = {name: t for name, t in first.inputs.items() if name not in shared}
        outputs = definition.empty_outputs(cell, first.inputs)
        self.cost = definition.cost(cell, first.inputs, outputs, first.expected)
        count = settings.check_seeds
        alone = device == "cpu" and "ranks" not in cell  # calls of ranks take longer, as they wait for each other
        least = _least_sets(self.cost, device, _LEAST_ROTATION_US[alone]) if arena else 1
        if device == "cpu":
            count = max(count, least)
        else:
            footprint = nbytes(*parts.values(), *outputs.values())
            most = min(settings.set_limit, int(settings.set_bytes // footprint))
            count = _rotation(nbytes(*parts.values()), bool(shared), self.cost.read_bytes, count, most)
            count = max(count, min(least, most))
        self.base = [first, *(draw(seed) for seed in _seeds(cell, count)[1:])]
        if shared:  # a draw reads the weights of its own experts
            read = [definition.cost(cell, draw.inputs, outputs, draw.expected).read_bytes for draw in self.base]
            self.cost = replace(self.cost, read_bytes=round(sum(read) / count))
        self.fresh = [draw(again(cell.seed, self.nonce))]
        close = parts | token_rows.mixed(parts, self.fresh[0].inputs, self._tokens) | shared
        self.near = [Drawn(close, definition.reference(cell, close))]
        self._redrawn = lambda: definition.shared(cell, cell.seed, device)
        self._shared = {name: (t, memory.checksum(t)) for name, t in shared.items()}
        self._inputs = {name: memory.Guarded(t, count, arena) for name, t in parts.items()}
        self._outputs = {name: memory.Guarded(t, count, arena) for name, t in outputs.items()}
        self._arena, self._stacked = arena, dict[str, Tensor]()
        if arena:
            self._stacked = {n: torch.stack([memory.as_bytes(draw.inputs[n]) for draw in self.base]) for n in parts}
        self.inputs = [{n: buffer.tensors[i] for n, buffer in self._inputs.items()} | shared for i in range(count)]
        self.outputs = [{name: output.tensors[i] for name, output in self._outputs.items()} for i in range(count)]
        self.load(self.base)

    def __len__(self) -> int:
        return len(self.inputs)

    def bound(self, i: int) -> dict[str, Tensor]:
        """Inputs and outputs of set i as tensors of their own on the same memory: an implementation cannot move those that are checked."""
        return {name: tensor.detach() for name, tensor in (self.inputs[i] | self.outputs[i]).items()}

    def load(self, draws: Sequence[Drawn]) -> None:
        """Overwrite all inputs in place: set i gets draw i mod D."""
        self._loaded = draws
        for name, buffer in self._inputs.items():
            if draws is self.base and self._stacked:
                buffer.rows(0, 1).copy_(self._stacked[name])
            else:
                for j, drawn in enumerate(draws):
                    buffer.rows(j, len(draws)).copy_(memory.as_bytes(drawn.inputs[name]))
        self._versions = self._writes()

    def restore(self) -> None:
        """Load what is timed, unless it is loaded."""
        if self._loaded is not self.base:
            self.load(self.base)

    def poison(self) -> None:
        """Fill all outputs with what no right answer holds."""
        for output in self._outputs.values():
            output.poison()

    def places(self, count: int = memory.SCARS) -> dict[str, Tensor]:
        """Where `count` elements of every output lie, that cannot be foreseen."""
        return {name: memory.places(*whole, count) for name, whole in self._wholes().items()}

    def scar(self, places: dict[str, Tensor]) -> None:
        """Fill these elements with that: in a tenth of the time that choosing them takes."""
        for name, whole in self._wholes().items():
            memory.scar(*whole, places[name])

    def scarred(self, places: dict[str, Tensor], ran: Sequence[int]) -> list[int]:
        """The sets of these in which one of the elements at these places of outputs is left as it was."""
        flags = [memory.scarred(*whole, places[name]) for name, whole in self._wholes().items() if name in places]
        left = torch.stack(flags).any(0).tolist() if flags else []
        return [i for i in ran if left and left[i]]

    def _wholes(self) -> dict[str, tuple[Tensor, Tensor]]:
        """Of each output: the bytes (n, nbytes) of all sets, and the tensor of one."""
        return {name: (output.rows(0, 1), output.tensors[0]) for name, output in self._outputs.items()}

    def handles(
        self, wanted: Callable[[str], bool] = lambda name: True
    ) -> tuple[dict[str, Any], dict[str, Any], list[int]]:
        """What another process needs to map the memory of all sets, which is that of an arena: of `wanted` operands, which differ from set to
        set, the memory of all, and dtype and shape of a tensor; of what all sets share; and descriptors that go with both."""
        assert self._arena
        stacked, shared, descriptors = {}, {}, []
        for name, buffer in (self._inputs | self._outputs).items():
            if not wanted(name):
                continue
            handle, files = self._arena.handle(buffer.whole)
            stacked[name] = (handle, buffer.tensors[0].dtype, tuple(buffer.tensors[0].shape))
            descriptors += files
        for name, (tensor, _) in self._shared.items():
            shared[name], files = self._arena.handle(tensor)
            descriptors += files
        return stacked, shared, descriptors

    def novel(self) -> None:
        """Load inputs that no call has seen, with the loads that are timed: the numbers of the base draws in other places. `load` ends it."""
        self.restore()
        names = token_rows.names({name: self.inputs[0][name] for name in self._inputs}, self._tokens)
        known = {name: (self._stacked[name], self.inputs[0][name]) for name in names}
        for name, rows in token_rows.moved(known, self._tokens).items():
            self._inputs[name].rows(0, 1).copy_(rows)
        self._versions = self._writes()

    def copied(self) -> dict[str, Tensor] | None:
        """What all outputs hold on a CPU, where a thread may still be writing them. The device of a GPU is waited for."""
        wholes = {name: output.whole for name, output in self._outputs.items()}
        on_cpu = all(whole.device.type == "cpu" for whole in wholes.values())
        return {name: whole.clone() for name, whole in wholes.items()} if on_cpu else None

    def written_since(self, copies: dict[str, Tensor] | None) -> bool:
        """Whether an output is no longer what it was when it was `copied`."""
        return copies is not None and any(not one.equal(self._outputs[name].whole) for name, one in copies.items())

    def cold(self, count: int) -> bool | None:
        """Whether what is read before a set comes round again is at least 4 times the L2 cache of a GPU; None on a CPU.

        That is the inputs of `count` sets; or, of weights that all sets share, what the calls of different draws read of them.
        """
        whole = [buffer.whole for buffer in self._inputs.values()]
        if whole[0].device.type == "cpu":
            return None
        elements = sum(t[:count].numel() for t in whole)
        known = elements + nbytes(*(tensor for tensor, _ in self._shared.values()))
        read = min(known, self.cost.read_bytes * min(count, self.draws))
        return max(elements, read) >= 4 * torch.cuda.get_device_properties(0).L2_cache_size

    @property
    def draws(self) -> int:
        """How many draws are loaded."""
        return len(self._loaded)

    def draw_of(self, i: int) -> Drawn:
        """The draw whose values set i holds."""
        return self._loaded[i % len(self._loaded)]

    def damage(self) -> str | None:
        """`harm`, which it mends."""
        harm = self.harm()
        if not harm:
            return None
        if not self._shared.keys().isdisjoint(self._changed()):
            for name, tensor in self._redrawn().items():
                self._shared[name][0].copy_(tensor)
        for guarded in (self._inputs | self._outputs).values():
            guarded.mend()
        self.load(self._loaded)
        return harm

    def harm(self) -> str | None:
        """What was written that is no output, in words: inputs, shared inputs, or the bytes next to a tensor."""
        if changed := self._changed():
            return f"inputs were changed: {', '.join(changed)}"
        if guards := [name for name, buffer in (self._inputs | self._outputs).items() if not buffer.intact()]:
            return f"bytes next to a tensor were written: {', '.join(guards)}"
        if written := [name for name, count in self._writes().items() if count != self._versions[name]]:
            return f"inputs were written, if only to restore them: {', '.join(written)}"
        return None

    def _changed(self) -> list[str]:
        """The inputs that hold other values than were loaded."""
        changed = [name for name in self._inputs if self._differs(name)]
        return changed + [name for name, (t, total) in self._shared.items() if memory.checksum(t) != total]

    def _differs(self, name: str) -> bool:
        """Whether any set's input is no longer what was loaded."""
        step, buffer = len(self._loaded), self._inputs[name]
        draws = enumerate(memory.as_bytes(drawn.inputs[name]) for drawn in self._loaded)
        return any(buffer.unlike(known, j, step).any() for j, known in draws)

    def unlike(self, i: int) -> Tensor:
        """Whether any output of the sets with the draw of set i differs from set i's in a bit: (n,) bool, for sets j, j + D, ..."""
        step = self.draws
        differences = [output.unlike(output.rows(i, len(self))[0], i % step, step) for output in self._outputs.values()]
        return torch.stack(differences).any(0)

    def extents(self) -> list[tuple[int, int]]:
        """Where the memory of all sets lies: first address, and the one after the last."""
        wholes = [buffer.whole for buffer in (self._inputs | self._outputs).values()]
        return [memory.extent(whole) for whole in (*wholes, *(tensor for tensor, _ in self._shared.values()))]

    def digest(self, tensor: Tensor) -> int:
        """A number that only equal bits have, as far as an implementation can tell."""
        return int(memory.digests(memory.as_bytes(tensor)[None], self._key))

    def digests(self, outputs: Mapping[int, dict[str, Tensor] | None]) -> dict[int, int]:
        """`digest`, summed over its outputs, of each of these sets: of the tensors that are given for one, or else of its own."""
        ran = list(outputs)
        totals = [
            torch.cat([memory.digests(part, self._key) for part in self._parts(name, ran, list(outputs.values()))])
            for name in self._outputs
        ]
        return dict(zip(ran, torch.stack(totals).sum(0).tolist(), strict=True))

    def _parts(self, name: str, ran: list[int], outputs: list[dict[str, Tensor] | None]) -> Iterator[Tensor]:
        """The bytes (n, nbytes) of one output of these sets, of a few sets at a time where they have to be copied."""
        rows = self._outputs[name].rows(0, 1)
        if not any(given and name in given for given in outputs):
            if ran == list(range(len(ran))):
                yield rows[: len(ran)]
            elif rows.device.type == "cpu":
                yield from (rows[i : i + 1] for i in ran)
            else:
                yield rows[ran]
            return
        step = max(1, _COPIED // max(1, rows.shape[1]))
        for first in range(0, len(ran), step):
            pairs = zip(ran[first : first + step], outputs[first : first + step], strict=True)
            yield torch.stack([memory.as_bytes(t[name]) if t and name in t else rows[i] for i, t in pairs])

    def _writes(self) -> dict[str, int]:
        """How often torch has written each input in place."""
        return {name: buffer.whole._version for name, buffer in self._inputs.items()} | {
            name: tensor._version for name, (tensor, _) in self._shared.items()
        }


def _least_sets(cost: Any, device: str, rotation_us: float) -> int:
    """How many sets take so long, or longer."""
    bytes_per_us, flops_per_us, call_us = (1e4, 1e5, 20.0) if device == "cpu" else (4e6, 1e9, 2.0)
    least_us = max(call_us, (cost.read_bytes + cost.write_bytes) / bytes_per_us, cost.flops / flops_per_us)
    return ceil(rotation_us / least_us)


def _rotation(own: int, shared: bool, read: int, least: int, most: int) -> int:
    """How many sets keep a GPU's L2 cache cold: at least `least`, and beyond these at most `most`.

    A call reads `read` bytes: its `own` inputs and, of weights that are shared, those of its experts. What it reads of weights is cold
    only after calls that read others. Outputs do not count: stores may be the first to leave the cache.
    """
    return max(least, min(calibration.cold_sets(max(own, read) if shared else own), most))


def _seeds(cell: Cell, count: int) -> list[int]:
    """Those of the base draws. Random loads, and with them the number of rows, differ from one seed to the next: then draws have the
    loads of the first one, of other experts."""
    if cell.get("sampler") == "plackett_luce":
        return [cell.seed, *(again(cell.seed, i) for i in range(1, count))]
    return [cell.seed + 1000 * i for i in range(count)]
