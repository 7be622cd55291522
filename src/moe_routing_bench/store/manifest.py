"""The manifest of a published run: which versions, commits and cards measured the rows below `results/<run>/`.

A manifest is computed from the rows by `moe-routing-bench manifest` and is never written by hand. `read` computes it again and
refuses one that contradicts the rows.
"""

import importlib.metadata
import re
import shlex
import subprocess
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import yaml

from moe_routing_bench.benches.registry import BENCHES
from moe_routing_bench.config import load, presets
from moe_routing_bench.config.expand import expand
from moe_routing_bench.packages import PACKAGE
from moe_routing_bench.store import companions, paths, records
from moe_routing_bench.store.parquet import read_table
from moe_routing_bench.store.project_files import installed, own_or_shipped, shipped
from moe_routing_kernels import files, guarded
from moe_routing_kernels.errors import UserError, bad

COLUMNS = ("git_sha", "git_dirty", "gpu_name", "gpu_uuid", "cpu_model", "device", "started_at", "ended_at")
TABLES = ("measurements", "quality", "perft", "accuracy")
_HEAD = "# Written by `moe-routing-bench manifest`, from the rows. Do not edit.\n"
_SHA = re.compile("[0-9a-f]{40}")


def write(run: str) -> Path:
    """Compute the manifest of a run and store it. Raises `UserError` for rows that cannot be published."""
    facts, path = _facts(run), paths.manifest(run)
    _check_commits(run, facts)
    whole = {"run": run, "config": _config(run), "tables": facts}
    files.keep(path, _HEAD + yaml.safe_dump(whole, sort_keys=False, width=120))
    return path


def read(run: str) -> dict[str, Any]:
    """The manifest of a run. Raises `UserError` where it is missing, or contradicts the rows, or a commit is unknown."""
    path, facts = paths.manifest(run), _facts(run)
    content = _load(run)
    expected = dict(_leaves({"run": run, "tables": facts}))
    got = {name: value for name, value in _leaves(content) if name[0] != "config"}
    for name in dict.fromkeys((*expected, *got)):
        if name[-1] == "version" and name in got and expected.get(name) is None:
            continue  # this machine does not have the history
        if name not in got or name not in expected or got[name] != expected[name]:
            what, allowed = ".".join(map(str, name)), expected.get(name, "no such key")
            raise bad(f"{what} of {path}", got.get(name, "nothing"), f"{allowed}, as the rows say", _hint(run))
    if not isinstance(content.get("config"), str | dict | None):
        raise bad(f"config of {path}", content["config"], "the name of a config, or a config", _hint(run))
    _check_commits(run, facts)
    return content


def versions(run: str, commits: Iterable[str | None]) -> dict[str, str]:
    """The package version of each commit, by the run's manifest or this repository's history; unknown ones are left out."""
    known = {}
    if paths.manifest(run).is_file():
        leaves = dict(_leaves(_load(run).get("tables") or {}))
        known = {value: leaves.get((*name[:-1], "version")) for name, value in leaves.items() if name[-1] == "commit"}
    by_commit = {commit: known.get(commit) or _version(commit) for commit in set(commits) if commit}
    return {commit: version for commit, version in by_commit.items() if version}


def groups(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """One entry per commit and state of the tree: the cards, the first and the last time, and the number of rows."""
    by_gpu = any(row.get("gpu_name") for row in rows)
    by_origin: dict[tuple[Any, Any], list[Mapping[str, Any]]] = {}
    for row in rows:
        by_origin.setdefault((row.get("git_sha"), row.get("git_dirty")), []).append(row)
    entries = []
    for (commit, dirty), those in by_origin.items():
        times = sorted(str(row[name]) for row in those for name in ("started_at", "ended_at") if row.get(name))
        cards = sorted({card for row in those if (card := _card(row, by_gpu))})
        span = {"first": times[0] if times else None, "last": times[-1] if times else None}
        entries.append({"commit": commit, "dirty": dirty, "cards": cards, **span, "rows": len(those)})
    return sorted(entries, key=lambda group: (str(group["first"]), str(group["commit"])))


def short(card: str) -> str:
    """The name of a card with the first digits of its UUID."""
    return re.sub(r"(\(GPU-[0-9a-f]{8})[^)]*", r"\1", card)


def changed(rows: Iterable[tuple[str, str | None]]) -> list[str]:
    """The benches whose code differs today from the code of some row; rows are pairs of a bench and a code fingerprint."""
    codes: dict[str, set[str | None]] = {}
    for bench, code in rows:
        codes.setdefault(bench, set()).add(code)
    return sorted(
        name
        for name, fingerprints in codes.items()
        if name not in BENCHES or fingerprints != {BENCHES[name].code_fingerprint()}
    )


def _card(row: Mapping[str, Any], by_gpu: bool) -> str | None:
    if by_gpu:
        uuid = row.get("gpu_uuid")
        return f"{row['gpu_name']} ({uuid})" if row.get("gpu_name") and uuid else row.get("gpu_name")
    return row.get("cpu_model") or row.get("device")


def _facts(run: str) -> dict[str, Any]:
    """What the rows of every table of a run say."""
    places = {name: paths.results(run) / f"{name}.parquet" for name in TABLES}
    there = {name: path for name, path in places.items() if name == "measurements" or path.is_file()}
    return {name: _of_table(run, path) for name, path in there.items()}


def _of_table(run: str, path: Path) -> dict[str, Any]:
    measured = path == paths.measurements(run)
    table = records.read(path) if measured else _read(path)
    records.of_platform(table, run, str(path))
    schemas = set(table["schema_version"].to_pylist()) if "schema_version" in table.column_names else {None}
    if len(schemas) > 1:
        raise bad(f"schema versions of {path}", sorted(map(str, schemas)), "one", "collect the rows again")
    rows = table.select([name for name in COLUMNS if name in table.column_names]).to_pylist()
    entries = [{"version": _version(group["commit"]), **group} for group in groups(rows)]
    cells = {"cells": len(_cells(table))} if measured else {}
    return {"schema_version": schemas.pop(), **cells, "rows": len(table), "measured": entries}


def _read(path: Path) -> pa.Table:
    try:
        return read_table(path)
    except (OSError, pa.ArrowException) as error:
        raise bad("rows", str(path), "a readable Parquet file of rows", str(error)[:80]) from error


def _cells(table: pa.Table) -> set[tuple[str, str]]:
    return set(zip(table["bench"].to_pylist(), table["cell"].to_pylist(), strict=True))


def _config(run: str) -> str | dict[str, Any] | None:
    """The config that asks for exactly the cells of a run: its file, else what the workflow kept, else None."""
    cells = _cells(records.read(paths.measurements(run)))
    platform, _, name = run.partition(".")
    folder = Path("config") if Path("config").is_dir() else shipped("config")
    known = presets.load(own_or_shipped(paths.MODELS))
    for path in sorted(folder.rglob("*.yaml")):
        try:
            config = load.on(load.load(path), platform)
            asked = (
                {(job.cell.bench, job.cell.key) for job in expand(config, known)}
                if config.get("run", "") == name
                else None
            )
        except UserError:
            continue  # presets, claims, and configs whose traces are not here
        if asked == cells:
            return f"config/{path.relative_to(folder).as_posix()}"
    kept = paths.results(run) / "config.json"
    return companions.mapping(kept) if companions.is_there(kept) else None


def _load(run: str) -> dict[str, Any]:
    path = paths.manifest(run)
    try:
        content = load.parse_yaml(guarded.text(path))
    except OSError as error:
        raise bad("manifest", str(path), "a file", f"{error.strerror}; {_hint(run)}") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise bad("manifest", str(path), "a YAML file", _hint(run)) from error
    if not isinstance(content, dict):
        raise bad(f"manifest {path}", content, "a mapping", _hint(run))
    return content


def _leaves(value: Any, name: tuple[Any, ...] = ()) -> Iterator[tuple[tuple[Any, ...], Any]]:
    """Every value of nested mappings and lists with the keys that lead to it."""
    if isinstance(value, dict | list) and value:
        for key, part in value.items() if isinstance(value, dict) else enumerate(value):
            yield from _leaves(part, (*name, key))
    else:
        yield name, value


def _hint(run: str) -> str:
    return f"`moe-routing-bench manifest --platform {shlex.quote(run)}` writes it from the rows"


def _check_commits(run: str, facts: Mapping[str, Any]) -> None:
    """Raise `UserError` unless every commit is one of this repository's history, or, without the history, a full sha."""
    whole = _git("rev-parse", "--is-shallow-repository") == "false"
    for name, commit in ((name, group["commit"]) for name, table in facts.items() for group in table["measured"]):
        what = f"commit of rows in {paths.results(run) / name}.parquet"
        if not _SHA.fullmatch(commit or ""):
            hint = "measure in a checkout, or name the commit in MOE_ROUTING_BENCH_COMMIT"
            raise bad(what, commit, "40 hexadecimal digits", hint)
        if whole and _git("cat-file", "-e", f"{commit}^{{commit}}") is None:
            raise bad(what, commit, "a commit of this repository", "fetch the branch that measured them")


def _version(commit: str | None) -> str | None:
    """The package version at a commit: that of the history, or that of the wheel that was built from the commit."""
    if not _SHA.fullmatch(commit or ""):
        return None
    project = _git("show", f"{commit}:pyproject.toml")
    if project and (match := re.search(r'^version = "(.+)"', project, re.MULTILINE)):
        return match[1]
    built = shipped("COMMIT")
    if installed() and built.is_file() and built.read_text(encoding="utf-8").strip() == commit:
        return importlib.metadata.version("moe-routing-bench")
    return None


def _git(*words: str) -> str | None:
    """What git prints in the checkout of this package; None outside a checkout and after an error."""
    root = PACKAGE.resolve().parents[1]
    if installed() or not (root / ".git").exists():
        return None
    try:
        done = subprocess.run(
            ["git", "-C", root, *words], capture_output=True, text=True, encoding="utf-8", timeout=10, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None
