"""The cleaned text of packages as files: bytes or tokens of each domain, and what they were made of.

A folder has a `manifest.json`, and for each domain and vocabulary an array of training and one of validation tokens.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from moe_routing_kernels import files
from moe_routing_kernels.errors import bad

MANIFEST = "manifest.json"
BYTES = 256
SPLITS = ("train", "validation")


@dataclass(frozen=True)
class Domain:
    """The tokens of a domain, the hash of its text, the bytes of each token of the vocabulary, and how many bytes of validation recur in
    the training text of any domain (None where the text was prepared before they were counted)."""

    name: str
    train: NDArray[Any]  # uint8 where tokens are bytes, else uint16
    validation: NDArray[Any]
    sha256: str
    tokens: Sequence[bytes]
    recurring: int | None = None


def write(
    folder: Path,
    texts: Mapping[str, Mapping[str, NDArray[Any]]],
    hashes: Mapping[str, str],
    tokens: Mapping[int, Sequence[bytes]],
    about: Mapping[str, Any],
) -> None:
    """Write domains.

    `texts` maps the name of an array, such as ``prose.256.train``, to tokens; `hashes` maps each domain to the hash of its
    text, and `tokens` each vocabulary to its tokens. The manifest, which is written last, has `about` too.
    """
    for name, splits in texts.items():
        for split, array in splits.items():
            with files.replacing(folder / f"{name}.{split}.npy") as temporary, temporary.open("wb") as file:
                np.save(file, array)
    manifest = {
        **about,
        "domains": dict(hashes),
        "vocabularies": {str(size): [token.hex() for token in one] for size, one in tokens.items()},
    }
    with files.replacing(folder / MANIFEST) as temporary:
        temporary.write_text(json.dumps(manifest, indent=1) + "\n", encoding="utf-8")


def domains(folder: Path, limit: int | None, vocabulary: int) -> list[Domain]:
    """The domains of a folder, each with the same share of its training tokens: about `limit` bytes in all, or all.

    Raises `UserError` where the folder, or the vocabulary, was not prepared, and for a text that is no longer what it was.
    """
    hint = "`moe-routing-bench prepare-texts` fetches and cleans it"
    try:
        manifest = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise bad("corpus packages", f"no {folder / MANIFEST}", "the prepared text", hint) from error
    if str(vocabulary) not in manifest["vocabularies"]:
        raise bad("vocabulary of corpus packages", vocabulary, ", ".join(manifest["vocabularies"]), hint)
    tokens = [bytes.fromhex(token) for token in manifest["vocabularies"][str(vocabulary)]]
    share = 1.0 if limit is None else min(1.0, limit / manifest["train_bytes"])
    found = [_domain(folder, name, sha256, share, tokens) for name, sha256 in manifest["domains"].items()]
    return [replace(one, recurring=manifest.get("recurring", {}).get(one.name)) for one in found]


def _domain(folder: Path, name: str, sha256: str, share: float, tokens: Sequence[bytes]) -> Domain:
    paths = [folder / f"{name}.{len(tokens)}.{split}.npy" for split in SPLITS]
    try:
        train, validation = (np.load(path, allow_pickle=False) for path in paths)
    except (OSError, ValueError, EOFError) as error:
        raise bad("corpus packages", f"no array in {paths[0].parent}", "the prepared text", str(error)) from error
    if len(tokens) == BYTES and (got := text_hash(train, validation)) != sha256:
        raise bad(f"corpus packages, domain {name}", got, sha256, f"delete {folder} and prepare it again")
    return Domain(name, train[: max(2, round(share * len(train)))], validation, sha256, tokens)


def text_hash(train: NDArray[Any], validation: NDArray[Any]) -> str:
    """The hash of a domain's bytes."""
    return hashlib.sha256(train.tobytes() + b"\0" + validation.tobytes()).hexdigest()
