"""Small files that unpack to gigabytes are refused before they are unpacked: one process reads all of them in less than 1 GB."""

import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from moe_routing_bench import parquet_sizes
from moe_routing_bench.store import parquet
from moe_routing_kernels import guarded

READ = """
import re, resource, sys
from pathlib import Path
from moe_routing_bench.config import huggingface, load
from moe_routing_bench.figures import foreign
from moe_routing_bench.store import records
from moe_routing_bench.traces import reading
from moe_routing_bench.workload import trace
from moe_routing_kernels.errors import UserError

resource.setrlimit(resource.RLIMIT_DATA, (5 << 30, 5 << 30))  # ends what unpacks, before it takes the machine's memory
for name in sys.argv[1:]:
    path = Path(name)
    for read in {
        ".parquet": (reading.read, records.read, lambda path: trace.read(path, 8, 8, 2)),
        ".csv": (reading.read, foreign.read_csv),
        ".json": (reading.read, huggingface.preset),
        ".yaml": (load.read_mapping,),
    }.get(path.suffix, (reading.read,)):
        try:
            read(path)
            print(name, "accepted")
        except UserError as error:
            print(error)
# Not `ru_maxrss`, which also has the peak of the process that started this one: subprocess shares its memory until the program begins.
print(*re.findall(r"VmHWM:\\s*(\\d+) kB", Path("/proc/self/status").read_text()))
"""


def equal_ids(path: Path) -> None:
    """2**25 equal ids in 100 kB, and a digest, for which each would become a Python object."""
    ids = pa.ListArray.from_arrays(
        pa.array(np.arange(0, 2**25 + 1, 2, dtype=np.int32)), pa.array(np.zeros(2**25, np.int32))
    )
    table = pa.table({"expert_ids": ids}).replace_schema_metadata({parquet.DIGEST: b"0" * 64})
    pq.write_table(table, path, compression="zstd")


def equal_texts(path: Path) -> None:
    """A text of 8 kB, a million times."""
    texts = pa.DictionaryArray.from_arrays(pa.array(np.zeros(2**20, np.int32)), ["x" * 2**13])
    pq.write_table(pa.table({"expert_ids": texts}), path, store_schema=False)


def zeros(path: Path) -> None:
    """A GB of zeros in 1 MB."""
    with (
        zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as archive,
        archive.open("ids.npy", "w") as file,
    ):
        np.lib.format.write_array_header_1_0(file, {"descr": "<i8", "fortran_order": False, "shape": (2**26, 2)})
        for _ in range(2**10):
            file.write(bytes(2**20))


FILES = {
    "ids.parquet": equal_ids,
    "texts.parquet": equal_texts,
    "zeros.npz": zeros,
    "zeros.pt": lambda path: shutil.copy(path.with_suffix(".npz"), path),
    "wide.csv": lambda path: path.write_text("1," * 200_000 + "1\n"),
    "ragged.csv": lambda path: path.write_text(f"bench,implementation,median_us{',x' * 997}\n" + "a\n" * 190_000),
    "objects.json": lambda path: path.write_text(f"[{'{},' * 2**22}1]"),
    "lists.yaml": lambda path: path.write_text(
        "a: &a [1, 1, 1, 1, 1, 1, 1, 1, 1, 1]\n"
        + "".join(f"{b}: &{b} [{', '.join([f'*{a}'] * 10)}]\n" for a, b in zip("abcdefgh", "bcdefghi", strict=True))
    ),
}


@pytest.mark.slow
@pytest.mark.fault("memory bomb", len(FILES))
def test_bombs(tmp_path: Path) -> None:
    paths = [tmp_path / name for name in FILES]
    for path in paths:
        FILES[path.name](path)
        assert path.stat().st_size < 2**24
    done = subprocess.run([sys.executable, "-c", READ, *map(str, paths)], capture_output=True, text=True, check=True)
    *lines, peak = done.stdout.splitlines()
    assert len(lines) == 15 and not [line for line in lines if "accepted" in line or len(line) > 500], lines
    assert int(peak) < 2**20, f"{peak} kB"


@pytest.mark.parametrize("end", ["\n", "\r", "\r\n"])
def test_cells_of_a_csv_count_whatever_ends_its_lines(tmp_path: Path, end: str) -> None:
    path = tmp_path / "rows.csv"
    path.write_bytes(f"a,b,c{end}".encode() * 10)
    assert guarded.csv_of(path, cells=30).read() == path.read_bytes()
    with pytest.raises(guarded.Refused, match="30 cells, at most 29"):
        guarded.csv_of(path, cells=29)


def test_texts_that_are_repeated_and_small_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Which takes another way through the reader: the size of such texts is only known from their dictionary."""
    path = tmp_path / "rows.parquet"
    table = pa.table({"a": ["x" * 9, None, "yy"] * 50, "n": range(150), "l": [["x"]] * 150})
    parquet.write_table(path, table)
    monkeypatch.setattr(parquet.guarded, "MOST_TABLE", 20_000)
    with path.open("rb") as file:
        assert parquet_sizes.check(file, 20_000) == (["a", "l.list.element"], 450)
        most = 8 * 150 * pq.ParquetFile(path).metadata.row_group(0).column(0).total_uncompressed_size
        assert "a" in parquet_sizes.check(file, most - 8)[0] and "a" not in parquet_sizes.check(file, most)[0]
    assert parquet.read_table(path).equals(table)


def test_the_digest_is_that_of_all_rows_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows are made Python objects in parts, which must not show in the digest of a file."""
    table = pa.table({"b": [[1, 2], None, [3]] * 700, "a": ["x", "é", None] * 700})
    whole = parquet.digest(table)
    assert whole == parquet.digest(pa.concat_tables([table.slice(0, 7), table.slice(7)]))
    monkeypatch.setattr(parquet, "_MOST_BYTES", 100)
    assert whole == parquet.digest(table)
    assert parquet.digest(table.slice(0, 0)) == parquet.digest(pa.table({"a": pa.array([], pa.int8())}))
    with pytest.raises(OSError, match="bytes in a row"):
        parquet.digest(pa.table({"a": [[1] * 1000]}))
