"""Files next to collected rows that are damaged: one line that names the file, never a traceback, and never a part of one in silence."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from moe_routing_bench import study
from moe_routing_bench.cli import report
from moe_routing_bench.comparison import anomalies
from moe_routing_bench.report import section_tables, seeds
from moe_routing_bench.store import companions, paths
from moe_routing_bench.store.parquet import write_table
from moe_routing_kernels.errors import UserError

CSV = "a,b\n1,2\n3,4\n"
AGAIN = pa.Table.from_pylist([{"cell_hash": "0"}], anomalies.SECONDS)
PROFILE = dict.fromkeys(report._PROFILE, "x")


def stored(name: str) -> Callable[[Path], Any]:
    return lambda path: companions.table(path, ("a", "b"))


READERS: dict[str, Callable[[Path], Any]] = {
    "again.parquet": lambda path: companions.rows(path, anomalies.SECONDS),
    "config.json": lambda path: study.config_or_last(None, None, "cpu", None),
    "models of config.json": lambda path: report._own_file("cpu"),
    "profile.json": lambda path: companions.mapping(path, report._PROFILE),
    "ncu.csv": lambda path: report._stored("cpu"),
    "003.csv": lambda path: seeds.figures("003"),
}


def place(name: str) -> Path:
    return paths.results("cpu") / name.split()[-1]


def write(name: str, path: Path, doubled: bool = False) -> None:
    """A whole file of its kind, or one in which a name is there twice."""
    if name.endswith("parquet"):
        write_table(path, AGAIN.append_column("status", AGAIN["status"]) if doubled else AGAIN)
    elif name.endswith("json"):
        text = json.dumps(PROFILE if "profile" in name else {"models": None})
        path.write_text(text[:-1] + ", " + text[1:] if doubled else text)
    else:
        columns = ["a", *section_tables.COLUMNS["ncu"]]
        columns += ["a"] * doubled
        path.write_text(f"{','.join(columns)}\n{','.join('1' for _ in columns)}\n")


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-2])


def empty(path: Path) -> None:
    path.write_bytes(b"")


def binary(path: Path) -> None:
    path.write_bytes(bytes(range(128, 256)) * 4)


def folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


def dangling(path: Path) -> None:
    path.unlink()
    path.symlink_to("nowhere")


DAMAGE = (cut, empty, binary, folder, dangling, "doubled")


@pytest.fixture
def here(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(seeds, "folder", lambda: paths.results("cpu"))
    paths.results("cpu").mkdir(parents=True)
    paths.CONFIG.parent.mkdir()
    paths.CONFIG.write_text(
        "grid:\n  - benches: [combine]\n    tokens: [64]\n    hidden: [64]\n    experts: [8]\n    top_k: [2]\n    dtype: [fp32]\n"
    )


@pytest.mark.fault("damaged companion")
@pytest.mark.parametrize("damage", DAMAGE)
@pytest.mark.parametrize("name", READERS)
def test_a_damaged_companion(name: str, damage: Callable[[Path], None] | str, here) -> None:
    path = place(name)
    write(name, path)
    if name != "config.json":  # which would have to ask for cells
        READERS[name](path)
    if isinstance(damage, str):
        write(name, path, doubled=True)
    else:
        damage(path)
    with pytest.raises(UserError) as error:
        READERS[name](path)
    text = str(error.value)
    assert str(path) in text and "\n" not in text and len(text) <= 500 and "`mv " in text


@pytest.mark.fault("damaged companion")
def test_second_measurements_of_another_version(here) -> None:
    path = place("again.parquet")
    write_table(path, AGAIN.append_column("new", pa.array(["1"])))
    with pytest.raises(UserError, match="other columns"):
        READERS["again.parquet"](path)


@pytest.mark.parametrize("line", ["1", "1,2,3"])
@pytest.mark.parametrize("place", [0, 1, 2])
def test_a_table_with_a_line_of_another_length_is_refused(line: str, place: int, tmp_path: Path) -> None:
    """Wherever it stands."""
    lines = ["1,2"] * 2
    lines.insert(place, line)
    path = tmp_path / "table.csv"
    path.write_text("\n".join(["a,b", *lines]) + "\n")
    with pytest.raises(UserError, match="a line of it is cut"):
        companions.table(path, ("a", "b"))
