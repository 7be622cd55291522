"""Good files with random damage: a reader takes what is left, or refuses it in one line; it neither raises anything else, nor hangs, nor ends the process.

``FILES=2000 pytest tests/faults/test_fuzz_files.py`` tries as many.
"""

import json
import os
import random
import resource
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from test_special_files import SPECIAL
from test_stored_faults import JOB, ROW

from moe_routing_bench.store import rows
from moe_routing_bench.store.parquet import write_table
from moe_routing_kernels.errors import UserError
from readers import READERS
from trace_files import completion, lines, npy, npz, parquet, saved, sglang, table

ROOT = Path(__file__).parents[2]
COUNT = int(os.environ.get("FILES", "160"))
IDS = np.argsort(np.random.default_rng(0).random((64, 8)))[:, :2]
ODD = [
    b"\x1b[2J",
    b"\0",
    b"\n",
    b"\xe2\x80\xae",
    b"\xff",
    b"9" * 400,
    b"-1",
    b"nan",
    b"1e999",
    b'"',
    b",",
    b"{",
    b"[",
    b"null",
    b"&a *a",
    b"<<: ",
    b": ",
    b"\t",
    b"\r",
    b"''",
    b"PAR1",
    b"PK\x05\x06",
    b"\x93NUMPY",
]


def cell(path: Path) -> bytes:
    """The file of a measured cell."""
    rows.write(path / "cell.parquet", [ROW], JOB.spec)
    return (path / "cell.parquet").read_bytes()


def texts(path: Path) -> bytes:
    """A table of texts and lists, with the digest of older versions and without."""
    import pyarrow as pa

    write_table(
        path / "texts.parquet",
        pa.table({"bench": ["a", None] * 20, "l": [[1.5], []] * 20, "expert_ids": [[1, 2]] * 40}),
    )
    return (path / "texts.parquet").read_bytes()


def good(path: Path) -> dict[str, list[bytes]]:
    """Good files by suffix."""
    recorded = {}
    for file in sorted((ROOT / "tests/data/traces").iterdir()):
        recorded.setdefault(file.suffix, []).append(file.read_bytes())
    rows_csv = b"bench,implementation,median_us,tokens,experts\npack,torch,1.5,64,8\npack,mine,1.0,64,8\n"
    made = {
        ".npy": [npy(IDS), npy(IDS.astype(np.float32)), npy(np.random.default_rng(1).random((16, 8)))],
        ".npz": [npz(ids=IDS), npz(a=IDS, b=IDS)],
        ".csv": [
            lines(IDS),
            lines(IDS, "expert_0,expert_1"),
            rows_csv,
            (ROOT / "config/published/aisimulate-h200.csv").read_bytes()[:4000],
        ],
        ".parquet": [parquet(IDS.tolist()), table(token=np.arange(9), expert=np.arange(9)), cell(path), texts(path)],
        ".pt": [
            saved(torch.tensor(IDS)),
            saved({"layer_0": torch.tensor(IDS), "layer_1": torch.tensor(IDS)}),
            sglang(IDS[None, :8] % 8),
        ],
        ".json": [
            completion(IDS[:, None]),
            json.dumps(
                {
                    "model_type": "mixtral",
                    "num_local_experts": 8,
                    "num_experts_per_tok": 2,
                    "hidden_size": 64,
                    "intermediate_size": 64,
                    "num_hidden_layers": 1,
                }
            ).encode(),
        ],
        ".yaml": [
            (ROOT / name).read_bytes()[:3000]
            for name in (
                "config/layers.yaml",
                "config/models.yaml",
                "config/claims.yaml",
                "results/nvidia-h200/manifest.yaml",
            )
        ],
        ".txt": [b"text\n" * 99],
        ".whl": [b"PK" * 99],
        ".ckpt": [saved({"rows": "[]", "step": 1, "model": {"w": torch.zeros(3)}})],
    }
    return {suffix: files + recorded.get(suffix, []) for suffix, files in made.items()} | {".pth": made[".pt"]}


def damaged(data: bytes, chance: random.Random) -> bytes:
    """A file with one to four changes."""
    changed = bytearray(data)
    for _ in range(chance.randrange(1, 5)):
        size = len(changed)
        at, end = sorted(chance.randrange(size + 1) for _ in range(2))
        match chance.randrange(9):
            case 0:
                del changed[at:]
            case 1:
                del changed[at : min(end, at + 20)]
            case 2 | 3:
                for _ in range(chance.choice([1, 1, 8, 64]) if size else 0):
                    changed[chance.randrange(size)] ^= 1 << chance.randrange(8)
            case 4:
                changed += changed[at:]
            case 5 | 6:
                changed[at:at] = chance.choice(ODD)
            case 7:
                changed[at : at + 8] = chance.randbytes(8)
            case 8:
                changed[at:end] = bytes(end - at)
    return bytes(changed)


@pytest.fixture(autouse=True)
def deadline(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """A working directory, and a signal that ends a reader that hangs."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MOE_ROUTING_BENCH_CORPORA", "")
    before = signal.signal(signal.SIGALRM, lambda *_: pytest.fail("it hangs"))
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


@pytest.mark.slow
@pytest.mark.fault("random damage")
def test_random_damage(tmp_path: Path) -> None:
    chance, files = random.Random(0), good(tmp_path)
    before, refused = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, 0
    for number in range(COUNT):
        reader = chance.choice(list(READERS))
        suffix, read = READERS[reader]
        folder = tmp_path / str(number)
        folder.mkdir()
        os.chdir(folder)
        path = Path(f"it{suffix}")
        kind = chance.choice(list(SPECIAL)) if chance.random() < 0.05 else ""
        data = damaged(chance.choice(files[suffix if chance.random() < 0.9 else chance.choice(list(files))]), chance)
        SPECIAL[kind](path) if kind else path.write_bytes(data)
        what = f"{number}: {kind or 'damage'}, {reader}"
        begin = time.process_time()
        signal.alarm(60)
        try:
            read(path)
        except UserError as error:
            text, refused = str(error), refused + 1
            assert "\n" not in text and len(text) <= 500 and text.isprintable(), f"{what}: {text!r}"
        except Exception as error:
            (tmp_path / "found").write_bytes(data)
            raise AssertionError(
                f"{what}: {type(error).__name__}: {ascii(str(error))[:300]}: {tmp_path}/found"
            ) from error
        signal.alarm(0)
        assert time.process_time() - begin < 5, what
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 2**20
    assert COUNT // 4 < refused < COUNT, "some are taken"
