"""What is stored beside the rows: profiled kernels and backward times, as tables of the page."""

import pandas as pd
import pytest
from rows import frame, one

from moe_routing_bench.cli import report as reporting
from moe_routing_bench.report.render import render
from moe_routing_bench.report.section_tables import evidence
from moe_routing_bench.store import paths

pytestmark = pytest.mark.slow

MACHINE = {"gpu_name": "NVIDIA H200", "torch_version": "2.11"}
SIZES = {"tokens": 16384, "hidden": 4096, "experts": 64, "top_k": 8}
NCU = pd.DataFrame(
    [
        MACHINE
        | SIZES
        | {
            "bench": "pack",
            "implementation": "cute",
            "form": "bulk copies",
            "dtype": "bf16",
            "duration_us": 312.13,
            "dram_read_mb": 134.7,
            "dram_write_mb": 1046.9,
            "dram_percent_of_peak": 78.7,
            "l2_percent_of_peak": 83.2,
        },
        MACHINE
        | SIZES
        | {
            "bench": "gate",
            "implementation": "<b>",
            "form": None,
            "hidden": None,
            "dtype": "fp32",
            "duration_us": 2.59,
            "dram_read_mb": 0.5,
            "dram_write_mb": 0.0,
            "dram_percent_of_peak": None,
            "l2_percent_of_peak": 17.6,
        },
    ]
)
BACKWARD = pd.DataFrame(
    [
        MACHINE
        | SIZES
        | {
            "layout": "compact",
            "capacity_factor": 1.25,
            "direction": "pack_backward",
            "implementation": "triton",
            "us": 275.41,
            "share_of_copy": 1.038,
        }
    ]
)


def test_tables():
    """Numbers with units and shapes in words; a dash where a value is missing; nothing of what is not stored."""
    profiled, backward = evidence({"backward": BACKWARD, "ncu": NCU})
    assert profiled.lines == [
        [
            "pack",
            "cute",
            "bulk copies",
            "T=16384 H=4096 E=64 k=8 bf16",
            "312.13 µs",
            "134.7 MB",
            "1,046.9 MB",
            "78.7 %",
            "83.2 %",
        ],
        ["gate", "<b>", "–", "T=16384 E=64 k=8 fp32", "2.59 µs", "0.5 MB", "0.0 MB", "–", "17.6 %"],
    ]
    assert backward.lines == [
        ["pack backward", "triton", "T=16384 H=4096 E=64 k=8 compact cf1.25", "275.41 µs", "104%"]
    ]
    assert profiled.about.endswith("NVIDIA H200, torch 2.11, n = 2.") and len(profiled.heads) == len(profiled.lines[0])
    assert evidence({}) == evidence({"ncu": NCU.iloc[:0]}) == []


def test_the_page(tmp_path, monkeypatch):
    """With what the platform's folder has; a platform without any has no such section."""
    monkeypatch.chdir(tmp_path)
    paths.results("nvidia-h200").mkdir(parents=True)
    NCU.to_csv(paths.results("nvidia-h200") / "ncu.csv", index=False)
    rows = frame(one("gate", "cute", median_us=1.0, gpu_uuid="GPU-1", compulsory_bytes=4e6, copy_gb_per_s=4000.0))
    for platform, there in (("nvidia-h200", True), ("cpu", False)):
        render(rows, {}, tmp_path / "index.html", stored=reporting._stored(platform))
        page = (tmp_path / "index.html").read_text()
        assert ('id="evidence"' in page, 'id="evidence-ncu"' in page, "evidence-backward" in page) == (
            there,
            there,
            False,
        )
        assert ("&lt;b&gt;" in page) == there and "<td><b></td>" not in page
