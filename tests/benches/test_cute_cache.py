"""The kernel cache: filled without a GPU, loaded by a second process, safe with several at once, healed when damaged."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytest.importorskip("cutlass")

LOAD = """
import sys, time
import cutlass.cute as cute
from moe_routing_bench.kernels.combine import cute_combine
compiled = []
original = cute.compile
cute.compile = lambda *a, **k: compiled.append(a) or original(*a, **k)
start = time.perf_counter()
kernel = cute_combine.compile_for("sm_90a", "bf16", 2, cute_combine.choose_tiling(4096, 2048, "bf16", 2), False)
print(callable(kernel), len(compiled), time.perf_counter() - start)
"""


def start(folder: Path) -> subprocess.Popen:
    """A process that asks the cache for one kernel."""
    environment = os.environ | {"MOE_ROUTING_BENCH_KERNELS": str(folder)}
    return subprocess.Popen(
        [sys.executable, "-c", LOAD], env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def load(folder: Path) -> tuple[int, float, str]:
    """Number of compilations, seconds to have the kernel, and stderr of one process."""
    process = start(folder)
    out, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    is_callable, compilations, seconds = out.split()
    assert is_callable == "True"
    return int(compilations), float(seconds), err


def test_an_object_is_named_by_what_its_kernel_is_made_of(monkeypatch) -> None:
    """Other arguments, or an edit of any file that the kernel's module imports, make it another object."""
    from moe_routing_bench.kernels.cute import cache

    pack, combine = (f"moe_routing_bench.kernels.{name}" for name in ("pack.cute_pack", "combine.cute_combine"))
    names = {cache._key(pack, (1,)), cache._key(pack, (2,)), cache._key(combine, (1,))}
    assert len(names) == 3 and cache._key(pack, (1,)) in names
    hashed = cache.fingerprint
    for edited, changes in (
        ("rows.py", {pack, combine}),
        ("cute_pack_bulk.py", {pack}),
        ("cute_combine.py", {combine}),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(
                cache,
                "fingerprint",
                lambda files, edited=edited: hashed(files) + str(edited in [f.name for f in files]),
            )
            with_edit = {module: cache._key(module, (1,)) for module in (pack, combine)}
            patch.setattr(cache, "fingerprint", lambda files: hashed(files) + "False")
            assert {module for module in with_edit if with_edit[module] != cache._key(module, (1,))} == changes


@pytest.mark.slow
def test_processes_share_one_object(tmp_path: Path) -> None:
    """Two at once compile once; a damaged object is compiled again, with a word about it; then one loads in under 0.5 s."""
    both = [start(tmp_path), start(tmp_path)]
    counts = [int(p.communicate(timeout=120)[0].split()[1]) for p in both]
    assert sorted(counts) == [0, 1]
    (found,) = tmp_path.glob("*.o")
    assert not list(tmp_path.glob("*.tmp"))
    found.write_bytes(b"damaged")
    compilations, _, err = load(tmp_path)
    assert compilations == 1 and "compiled again" in err
    compilations, seconds, _ = load(tmp_path)
    assert compilations == 0 and seconds < 0.5


@pytest.mark.slow
def test_compile_command_fills_the_cache(tmp_path: Path) -> None:
    """`moe-routing-bench compile` compiles what a config's cells launch, once; a second run finds all of it."""
    (tmp_path / "c.yaml").write_text(
        "grid:\n  - {benches: [routing], implementations: [cute], tokens: [512], hidden: [1024], experts: [8], top_k: [2]}\n"
        "  - {benches: [router], implementations: [torch, matmul_cute], tokens: [512], hidden: [1024], experts: [16], top_k: [2]}\n"
    )
    command = [sys.executable, "-m", "moe_routing_bench.cli", "compile", "--config", tmp_path / "c.yaml", "--arch"]
    environment = os.environ | {"MOE_ROUTING_BENCH_KERNELS": str(tmp_path / "kernels")}

    def run(arch: str) -> subprocess.CompletedProcess:
        return subprocess.run([*command, arch], env=environment, capture_output=True, text=True, timeout=120)

    first = run("sm_90a")
    assert first.returncode == 0, first.stderr
    names = sorted(path.name.partition("-")[0] for path in (tmp_path / "kernels").glob("*.o"))
    assert names == ["cute_combine", "cute_gate", "cute_gate", "cute_pack", "cute_permute"], "a gate for each bench"
    begin = time.perf_counter()
    assert "0 of them new" in run("sm_90a").stdout
    assert time.perf_counter() - begin < 30
    bad = run("hopper")
    assert bad.returncode == 2 and bad.stderr.startswith("error: arch: got 'hopper'"), bad.stderr
