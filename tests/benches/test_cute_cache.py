"""The kernel cache: what names an object, and the command that fills it without a GPU. How fast one loads is in tests/timing."""

import subprocess
from pathlib import Path

import pytest

import forks
from moe_routing_kernels.closure import PACKAGE

pytest.importorskip("cutlass")


def test_an_object_is_named_by_what_its_kernel_is_made_of(monkeypatch) -> None:
    """Other arguments, or an edit of any file that the kernel's module imports, make it another object."""
    from moe_routing_kernels.cute import cache

    pack, combine = (f"moe_routing_kernels.{name}" for name in ("pack.cute_pack", "combine.cute_combine"))
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


@pytest.mark.parametrize("name", ["nvidia-cutlass-dsl", "apache-tvm-ffi", "machine"])
def test_an_object_is_of_the_compiler_its_convention_and_the_host(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder that machines share has an object of each kind; the code of a host function runs on one."""
    from moe_routing_kernels.cute import cache

    pack, version = "moe_routing_kernels.pack.cute_pack", cache.version
    before = cache._key(pack, (1,))
    monkeypatch.setattr(cache, "version", lambda package: "9" if package == name else version(package))
    if name == "machine":
        monkeypatch.setattr(cache.platform, "machine", lambda: "another")
    assert cache._key(pack, (1,)) != before
    monkeypatch.undo()
    assert cache._key(pack, (1,)) == before


@pytest.mark.slow
def test_compile_command_fills_the_cache(tmp_path: Path) -> None:
    """`moe-routing-bench compile` compiles what a config's cells launch, once; a second run finds all of it."""
    (tmp_path / "c.yaml").write_text(
        "grid:\n  - {benches: [routing], implementations: [cute], tokens: [512], hidden: [1024], experts: [8], top_k: [2]}\n"
        "  - {benches: [router], implementations: [torch, matmul_cute], tokens: [512], hidden: [1024], experts: [16], top_k: [2]}\n"
    )
    command = ["moe-routing-bench", "compile", "--config", tmp_path / "c.yaml", "--arch"]
    environment = forks.environment(PACKAGE.parent) | {"MOE_ROUTING_KERNELS_CACHE": str(tmp_path / "kernels")}

    def run(arch: str) -> subprocess.CompletedProcess:
        return subprocess.run([*command, arch], env=environment, capture_output=True, text=True, timeout=120)

    first = run("sm_90a")
    assert first.returncode == 0, first.stderr
    names = sorted(path.name.partition("-")[0] for path in (tmp_path / "kernels").glob("*.o"))
    assert names == ["cute_combine", "cute_gate", "cute_gate", "cute_pack", "cute_permute"], "a gate for each bench"
    assert "0 of them new" in run("sm_90a").stdout
    (tmp_path / "c.yaml").write_text(
        "grid:\n  - {benches: [layer], implementations: [torch_grouped_mm, cute, cute_gather], tokens: [64], hidden: [256], intermediate: [128], experts: [8], top_k: [2]}\n"
        "  - {benches: [gate, permute], implementations: [cute], tokens: [64], experts: [8], top_k: [2]}\n"
    )
    other = run("sm_120a")
    assert other.returncode == 0 and "Traceback" not in other.stderr, other.stderr
    assert other.stdout.splitlines()[-1] == "no form for sm_120a: layer: cute, cute_gather"
    assert not other.stdout.startswith("0 kernels") and ", 0 of them new" not in other.stdout
    bad = run("hopper")
    assert bad.returncode == 2 and bad.stderr.startswith("error: --arch: got 'hopper'"), bad.stderr


@pytest.mark.parametrize(
    ("own", "caches", "found"),
    [
        ("/a/kernels", "/b", "/a/kernels"),
        (None, "/b", "/b/moe-routing-kernels"),
        (None, " ", "~/.cache/moe-routing-kernels"),
        (None, None, "~/.cache/moe-routing-kernels"),
    ],
)
def test_where_objects_are_kept(own, caches, found, monkeypatch) -> None:
    """In the folder that is named, else in that of caches, as other programs know it."""
    cache = pytest.importorskip("moe_routing_kernels.cute.cache")
    monkeypatch.setenv("HOME", "/home/user")
    for name, value in ((cache.FOLDER, own), ("XDG_CACHE_HOME", caches)):
        monkeypatch.delenv(name, raising=False) if value is None else monkeypatch.setenv(name, value)
    assert str(cache.folder()) == found.replace("~", "/home/user")
