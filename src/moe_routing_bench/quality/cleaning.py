"""From the text of files to documents of training and of validation that have no string of 64 bytes in common.

Prose keeps its lines of at least so many letters, each once in all the text; code keeps whole files. Files that are long are cut into documents.
Documents that are, or nearly are, one that came before are left out. Whole documents are then drawn for validation, and what they share with training is
cut out of them: the rest is documents of their own.
"""

import hashlib
import random
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

_PIECE = 2**22  # bytes of training text that are compared at once
SHARED = 64  # bytes of the strings that training and validation must not share
_DOCUMENT = 2**15  # bytes of prose, about, at which a file is cut
LEAST = 256  # bytes of a document
_MARKED = 32  # of the strings of 64 bytes, every so many is a mark, by its hash
_NEAR = 0.5  # share of a document's marks that others had before, from which on it is left out
_AT_ONCE = 2**22  # bytes that are hashed at a time
_TABLE = 2**24  # entries of a table that tells most hashes which are not in a set
_FACTOR = 0x9E3779B97F4A7C15 | 1
Hashes = NDArray[np.uint64]


@dataclass(frozen=True)
class Split:
    """The documents of a domain."""

    train: list[bytes]
    validation: list[bytes]


def prose(text: str, letters: int, seen: set[bytes]) -> Iterator[bytes]:
    """Documents of the lines of at least so many letters that `seen`, the hashes of lines so far, lacks; it gets theirs."""
    lines, size = [], 0
    for raw in text.splitlines():
        line = " ".join(raw.split())
        if sum(map(str.isalpha, line)) < letters:
            continue
        content = line.encode()
        if (digest := hashlib.blake2b(content, digest_size=8).digest()) in seen:
            continue
        seen.add(digest)
        lines.append(content)
        size += len(content) + 1
        if size >= _DOCUMENT:
            yield b"\n".join(lines) + b"\n"
            lines, size = [], 0
    if size >= LEAST:
        yield b"\n".join(lines) + b"\n"


class Distinct:
    """Tells whether a document is new: neither equal nor nearly equal to one before."""

    def __init__(self) -> None:
        self._whole: set[bytes] = set()
        self._marks: set[int] = set()

    def new(self, document: bytes) -> bool:
        """Whether it is; then it is known from now on."""
        digest = hashlib.blake2b(document, digest_size=16).digest()
        marks = hashes(document)
        own = set(marks[marks % np.uint64(_MARKED) == 0].tolist())
        if digest in self._whole or (own and len(own & self._marks) > _NEAR * len(own)):
            return False
        self._whole.add(digest)
        self._marks |= own
        return True


def hashes(document: bytes) -> Hashes:
    """A hash of each string of 64 bytes, by where it begins: a polynomial modulo 2^64 over numbers drawn for bytes."""
    count = len(document) - SHARED + 1
    if count <= 0:
        return np.empty(0, np.uint64)
    found = []
    for first in range(0, count, _AT_ONCE):
        part = np.frombuffer(document, np.uint8)[first : first + _AT_ONCE + SHARED - 1]
        powers, inverse = _powers(len(part))
        sums = np.concatenate([np.zeros(1, np.uint64), np.cumsum(_DRAWN[part] * inverse, dtype=np.uint64)])
        polynomial = (sums[SHARED:] - sums[:-SHARED]) * powers[: len(part) - SHARED + 1]
        found.append(polynomial ^ (polynomial >> np.uint64(29)))
    return np.concatenate(found)


_DRAWN = np.random.default_rng(64).integers(0, 2**64, 256, dtype=np.uint64)
_INVERSE = pow(_FACTOR, -1, 2**64)
_KNOWN: dict[int, tuple[Hashes, Hashes]] = {}


def _powers(count: int) -> tuple[Hashes, Hashes]:
    """The powers of the factor and of its inverse; the last, and longest, are kept."""
    if not _KNOWN or next(iter(_KNOWN)) < count:
        _KNOWN.clear()
        size = min(max(count, 2**16), _AT_ONCE + SHARED)
        size = max(size, count)
        factors = np.full((2, size), [[_FACTOR], [_INVERSE]], np.uint64)
        factors[:, 0] = 1
        _KNOWN[size] = tuple(np.cumprod(factors, axis=1, dtype=np.uint64))  # type: ignore[assignment]
    ((powers, inverse),) = _KNOWN.values()
    return powers[:count], inverse[:count]


def split(documents: Sequence[bytes], share: float, seed: int) -> Split:
    """Whole documents, shuffled by the seed: for validation until they have `share` of all bytes, but for the last, which stays in training."""
    order = random.Random(seed).sample(range(len(documents)), len(documents))
    most, size, aside = share * sum(map(len, documents)), 0, set()
    for number in order:
        if size + len(documents[number]) <= most:
            aside.add(number)
            size += len(documents[number])
    train = [documents[number] for number in order if number not in aside]
    return Split(train, [documents[number] for number in order if number in aside])


def apart(validation: Sequence[bytes], train: Iterable[bytes]) -> list[bytes]:
    """The validation documents, without the strings of 64 bytes that they share with training.

    What is left between two of these, if it is long enough, is a document.
    """
    own = [hashes(document) for document in validation]
    wanted = np.unique(np.concatenate([*own, np.empty(0, np.uint64)]))
    table = np.zeros(_TABLE, bool)
    table[wanted % np.uint64(_TABLE)] = True
    shared: list[Hashes] = []
    for document in train:
        found = hashes(document)
        shared.append(found[table[found % np.uint64(_TABLE)]])
    common = np.intersect1d(wanted, np.concatenate([*shared, np.empty(0, np.uint64)]))
    return [
        part
        for document, marks in zip(validation, own, strict=True)
        for part in _without(document, np.isin(marks, common, kind="sort"))
    ]


def recurring(validation: bytes, train: Iterable[bytes]) -> int:
    """How many bytes of a validation text lie in strings of 64 bytes that training documents have too, by their hashes."""
    own, table = hashes(validation), np.zeros(_TABLE, bool)
    table[own % np.uint64(_TABLE)] = True
    shared: list[Hashes] = []
    for document in train:
        for first in range(0, len(document), _PIECE):
            found = hashes(document[first : first + _PIECE + SHARED - 1])
            shared.append(found[table[found % np.uint64(_TABLE)]])
    # One comparison for all documents: each sorts all hashes of the validation text.
    common = np.isin(own, np.concatenate([*shared, np.empty(0, np.uint64)]), kind="sort")
    change = np.zeros(len(validation) + 1, np.int64)
    begins = np.flatnonzero(common)
    np.add.at(change, begins, 1)
    np.add.at(change, begins + SHARED, -1)
    return int((np.cumsum(change[:-1]) > 0).sum())


def _without(document: bytes, shared: NDArray[np.bool_]) -> Iterator[bytes]:
    """The parts of a document outside the strings that begin where `shared` says."""
    change = np.zeros(len(document) + 1, np.int64)
    begins = np.flatnonzero(shared)
    np.add.at(change, begins, 1)
    np.add.at(change, begins + SHARED, -1)
    kept = np.concatenate([[False], np.cumsum(change[:-1]) == 0, [False]])
    edges = np.flatnonzero(kept[1:] != kept[:-1])
    for first, end in edges.reshape(-1, 2):
        if end - first >= LEAST:
            yield document[first:end]
