"""The CuTe DSL kernels compile for every supported architecture without a GPU, and to the instructions intended."""

import itertools
import json
import subprocess
from pathlib import Path

import pytest

import forks
from campaign import sampled
from moe_routing_kernels.closure import PACKAGE

pytest.importorskip("cutlass")
CASES = Path(__file__).with_name("cute_cases.py")


def facts_of(arch: str, step: int, folder: Path) -> list[dict]:
    """Facts of every `step`-th case, from a subprocess: DSL mistakes abort, and kept files land in the working directory."""
    command = [forks.programs() / forks.PYTHON, CASES, arch, str(step)]
    done = subprocess.run(
        command, cwd=folder, env=forks.environment(PACKAGE.parent), capture_output=True, text=True, timeout=900
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


# Of step 13 there are a pack and a combine; 1 is all.
@pytest.mark.slow
@pytest.mark.parametrize(
    ("arch", "step"),
    sampled(itertools.product(["sm_80", "sm_90a", "sm_100a"], [13, 1]), [("sm_80", 13), ("sm_90a", 13)], unpack=True),
)
def test_wide_accesses_and_no_spills(arch: str, step: int, tmp_path: Path) -> None:
    """Rows of whole 16-byte vectors move in 128-bit accesses, all loads unrolled; nothing goes to local memory."""
    cases = facts_of(arch, step, tmp_path)
    assert len(cases) >= (14 if arch == "sm_90a" else 5)
    for facts in cases:
        if facts["vector_bytes"] == 16:
            rows = 1 if facts["operation"] == "pack" else facts["top_k"]
            copies = facts["top_k"] if facts["operation"] == "pack" else 1
            for kind in ("ptx_wide", "wide"):
                if facts[f"{kind}_loads"] is not None:
                    assert facts[f"{kind}_loads"] >= rows * facts["vectors"], facts
                    assert facts[f"{kind}_stores"] >= copies * facts["vectors"], facts
            if facts["ahead"] is not None:  # all rows of a sum are under way before the first is used
                assert facts["ahead"] >= facts["least_ahead"], facts
        if facts.get("ring"):  # every load is asynchronous and 16 bytes wide
            assert facts["async_copies"] == facts["ring"] * facts["rounds"] + facts.get("looped", 0), facts
        if facts.get("whole_vectors"):  # loaded 16 bytes at a time, and converted once, not once for each copy
            assert facts["wide_loads"] == facts["vectors"] and facts["conversions"] == 4 * facts["vectors"], facts
        assert facts.get("counted") == facts.get("counted_expected"), facts
        assert facts.get("bulk") == facts.get("bulk_expected"), facts
        if facts["local"] is not None:
            assert facts["local"] == 0, facts
            limit = facts.get("most_registers", 168)  # 3 blocks of 128 threads per SM, at least 96 KB in flight
            assert facts["registers"] <= limit, facts
