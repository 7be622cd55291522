"""The kernel cache: filled without a GPU, loaded by a second process, safe with several at once, healed when damaged."""

import itertools
import subprocess
import time
from pathlib import Path

import pytest

import forks
from moe_routing_bench.closure import PACKAGE

pytest.importorskip("cutlass")

# For each line, so many processes at once that ask the cache for one kernel: forks, as those of a warm server are.
LOAD = """
import os, sys, time
import cutlass.cute as cute
from moe_routing_bench.kernels.combine import cute_combine
compiled = []
original = cute.compile
cute.compile = lambda *a, **k: compiled.append(a) or original(*a, **k)
for line in sys.stdin:
    for _ in range(int(line)):
        if not os.fork():
            start = time.perf_counter()
            tiling = cute_combine.choose_tiling(4096, 2048, "bf16", 2)
            kernel = cute_combine.compile_for("sm_90a", "bf16", 2, tiling, False)
            print(callable(kernel), len(compiled), time.perf_counter() - start, flush=True)
            os._exit(0)
    for _ in range(int(line)):
        os.wait()
    print("end", flush=True)
"""


def load(program: subprocess.Popen, count: int) -> tuple[list[int], list[float], str]:
    """Numbers of compilations, and seconds to have the kernel, of so many processes at once; and all that they print."""
    assert program.stdin and program.stdout
    program.stdin.write(f"{count}\n")
    program.stdin.flush()
    lines = list(itertools.takewhile("end\n".__ne__, program.stdout))
    found = [line.split() for line in lines if line.startswith("True ")]
    assert len(found) == count, lines
    return [int(compilations) for _, compilations, _ in found], [float(last) for *_, last in found], "".join(lines)


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
    environment = forks.environment(PACKAGE.parent) | {"MOE_ROUTING_BENCH_KERNELS": str(tmp_path)}
    with subprocess.Popen(
        [forks.programs() / forks.PYTHON, "-c", LOAD],
        env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    ) as program:  # fmt: skip
        counts, *_ = load(program, 2)
        assert sorted(counts) == [0, 1]
        (found,) = tmp_path.glob("*.o")
        assert not list(tmp_path.glob("*.tmp"))
        found.write_bytes(b"damaged")
        counts, _, said = load(program, 1)
        assert counts == [1] and "compiled again" in said
        counts, seconds, _ = load(program, 1)
        assert counts == [0] and seconds[0] < 0.5


@pytest.mark.slow
def test_compile_command_fills_the_cache(tmp_path: Path) -> None:
    """`moe-routing-bench compile` compiles what a config's cells launch, once; a second run finds all of it."""
    (tmp_path / "c.yaml").write_text(
        "grid:\n  - {benches: [routing], implementations: [cute], tokens: [512], hidden: [1024], experts: [8], top_k: [2]}\n"
        "  - {benches: [router], implementations: [torch, matmul_cute], tokens: [512], hidden: [1024], experts: [16], top_k: [2]}\n"
    )
    command = ["moe-routing-bench", "compile", "--config", tmp_path / "c.yaml", "--arch"]
    environment = forks.environment(PACKAGE.parent) | {"MOE_ROUTING_BENCH_KERNELS": str(tmp_path / "kernels")}

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
    assert bad.returncode == 2 and bad.stderr.startswith("error: --arch: got 'hopper'"), bad.stderr
