"""The archive of a run that `submit` makes and `verify` reads: its tables, its manifest, a name, machines and versions, and digests.

An archive may have been made by hand. It is read in memory and within limits, and nothing is extracted: only regular files with
the names below are accepted, each once. What the numbers are worth is for `comparison.submitted` to say.
"""

import gzip
import hashlib
import io
import re
import tarfile
import zlib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import yaml

from moe_routing_bench.config import load
from moe_routing_bench.store import manifest, paths, records
from moe_routing_kernels import files, guarded
from moe_routing_kernels.errors import UserError, bad, one_line

ABOUT = "submission.yaml"
FORMAT = 1
MEMBERS = (ABOUT, "manifest.yaml", *(f"{name}.parquet" for name in manifest.TABLES))
ENVIRONMENT = ("gpu_name", "cpu_model", "driver", "cuda_version", "torch_version", "triton_version", "power_limit_w")
MOST_PACKED, MOST = 2**26, 2**28  # bytes of an archive, and of what it unpacks to; the largest published run has 2**21
_BY = re.compile(r"[\w .,@+()'-]{1,80}")
_KEYS = ("format", "run", "by", "environment", "files")


def pack(run: str, by: str, out: Path) -> None:
    """Write the archive of a run with a manifest. Raises `UserError` for one that contradicts its rows, or that has none."""
    if not _BY.fullmatch(by):
        raise bad("--by", by, "a name of at most 80 letters, digits and `.,@+()'-`")
    manifest.read(run)
    places = {name: paths.results(run) / name for name in MEMBERS if name != ABOUT}
    contents = {name: guarded.content(path, MOST) for name, path in places.items() if path.is_file()}
    about = {
        "format": FORMAT,
        "run": run,
        "by": by,
        "environment": environment(run),
        "files": {name: hashlib.sha256(content).hexdigest() for name, content in contents.items()},
    }
    whole = {ABOUT: yaml.safe_dump(about, sort_keys=False).encode(), **contents}
    with files.replacing(out) as temporary, tarfile.open(temporary, "w:gz") as archive:
        for name, content in whole.items():
            entry = tarfile.TarInfo(name)
            entry.size, entry.mode = len(content), 0o644
            archive.addfile(entry, io.BytesIO(content))


def environment(run: str) -> dict[str, list[str]]:
    """What the rows of a run say of the machines and the software that measured them."""
    rows = records.read(paths.measurements(run)).select(ENVIRONMENT)
    found = {name: sorted({str(one) for one in rows[name].to_pylist() if one is not None}) for name in ENVIRONMENT}
    return {name: values for name, values in found.items() if values}


def unpacked(path: Path) -> tuple[dict[str, Any], dict[str, bytes]]:
    """What an archive says of itself, and its files by name. Raises `UserError`, with one reason, for an archive that `pack` would not write."""
    try:
        found = _members(guarded.content(path, MOST_PACKED))
    except (OSError, EOFError, zlib.error, tarfile.TarError, ValueError, OverflowError, RecursionError) as error:
        raise _refused(path, str(error) or type(error).__name__) from error
    if ABOUT not in found:
        raise _refused(path, f"it has no {ABOUT}")
    about = _about(path, found[ABOUT])
    others = {name: content for name, content in found.items() if name != ABOUT}
    if set(about["files"]) != set(others):
        raise _refused(path, f"{ABOUT} lists {_named(about['files'])}, the archive has {_named(others)}")
    wrong = [name for name, content in others.items() if hashlib.sha256(content).hexdigest() != about["files"][name]]
    if wrong:
        raise _refused(path, f"the digest of {_named(wrong)} is another one")
    if absent := {"manifest.yaml", "measurements.parquet"} - set(found):
        raise _refused(path, f"it has no {_named(absent)}")
    return about, found


def _members(packed: bytes) -> dict[str, bytes]:
    """The files of an archive. Raises ValueError, `OSError` or an error of tarfile for what is none of `MEMBERS`."""
    with gzip.GzipFile(fileobj=io.BytesIO(packed)) as stream:
        plain = stream.read(MOST + 1)  # a bomb ends here
    if len(plain) > MOST:
        raise ValueError(f"it unpacks to more than {MOST} bytes")
    found: dict[str, bytes] = {}
    with tarfile.open(fileobj=io.BytesIO(plain), mode="r:") as archive:
        for entry in archive:
            if not entry.isreg() or entry.issparse():
                raise ValueError(f"{entry.name!r} is no regular file")
            if entry.name not in MEMBERS:
                raise ValueError(f"{entry.name!r} is none of {', '.join(MEMBERS)}")
            if entry.name in found:
                raise ValueError(f"{entry.name!r} is there twice")
            member = archive.extractfile(entry)
            assert member is not None  # of a regular file
            found[entry.name] = member.read()
            if len(found[entry.name]) != entry.size:
                raise ValueError(f"{entry.name!r} is cut off")
    return found


def _about(path: Path, content: bytes) -> dict[str, Any]:
    try:
        about = load.parse_yaml(content.decode())
    except (yaml.YAMLError, UnicodeDecodeError, UserError, RecursionError) as error:
        raise _refused(path, f"{ABOUT} is no plain YAML") from error
    if not isinstance(about, dict) or set(about) != set(_KEYS):
        raise _refused(path, f"{ABOUT} has other keys than {', '.join(_KEYS)}")
    if about["format"] != FORMAT:
        raise _refused(path, f"its format is {about['format']!r}, not {FORMAT}")
    digests = about["files"]
    texts = isinstance(digests, dict) and all(isinstance(one, str) for pair in digests.items() for one in pair)
    if not texts or not isinstance(about["by"], str) or not _BY.fullmatch(about["by"]):
        raise _refused(path, f"`by` or `files` of {ABOUT} is malformed")
    if not isinstance(about["run"], str) or not isinstance(about["environment"], Mapping):
        raise _refused(path, f"`run` or `environment` of {ABOUT} is malformed")
    paths.folder(about["run"])
    return about


def _named(names: Iterable[str]) -> str:
    return ", ".join(sorted(map(str, names))) or "nothing"


def _refused(path: Path, why: str) -> UserError:
    hint = f"{one_line(why, 200)}; `moe-routing-bench submit` makes one"
    return bad("archive", str(path), "an archive of a run", hint)


def submitter(folder: Path) -> str | None:
    """The name under which the rows in a folder of results were submitted; None for rows of this project."""
    path = folder / ABOUT
    return _about(path, guarded.content(path, guarded.MOST_TEXT))["by"] if path.is_file() else None
