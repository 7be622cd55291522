"""What timed rows: the GPU, whatever CPU is beside it, or the CPU."""

import pytest
from rows import frame, one

from moe_routing_bench.comparison import origins
from moe_routing_bench.figures import footer
from moe_routing_bench.report import words
from moe_routing_bench.report.seeds.section import section
from moe_routing_bench.report.site import listed

EPYC, BOTH = {"cpu_model": "AMD EPYC"}, {"cpu_model": "Intel Xeon", "gpu_name": "NVIDIA H200"}


@pytest.mark.parametrize(
    ("rows", "column", "names"),
    [
        ([EPYC, EPYC], origins.CPU, ["AMD EPYC"]),
        ([BOTH], origins.GPU, ["NVIDIA H200"]),
        ([EPYC, BOTH, {"gpu_name": "NVIDIA H100"}], origins.GPU, ["NVIDIA H200", "NVIDIA H100"]),
        ([{}], origins.CPU, []),
        ([], origins.CPU, []),
    ],
)
def test_what_timed_rows(rows, column, names):
    table = frame(*(one("gate", **values) for values in rows))
    assert (origins.column(table), origins.names(table)) == (column, names)


@pytest.mark.parametrize(
    ("values", "device", "clock"), [(EPYC, "AMD EPYC", "wall time"), (BOTH, "NVIDIA H200", "device time")]
)
def test_whoever_names_the_machine_names_what_timed_it(values, device, clock, tmp_path):
    """Under figures, above a report, on the first page of the site, and beside a seed's figures."""
    table = frame(
        one(
            "layer",
            "torch_loop",
            tokens=8,
            median_us=1.0,
            started_at="2026-11-24",
            git_sha="a" * 40,
            samples=1,
            **values,
        )
    )
    assert footer.measured(table).startswith(f"{device} |") and clock in footer.measured(table)
    assert f", on {device}" in words.measured(table)
    assert listed(tmp_path, table, None, []).machine == device
    assert any(f"({device}" in group.title for one in section(table, "seed-000").tables for group in one.groups)
