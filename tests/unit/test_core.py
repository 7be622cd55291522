"""An installation without extras: which commands work, and what the others say."""

import json
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import core_commands
from moe_routing_bench import packages
from moe_routing_bench.cli.commands import LIGHT, SECTIONS
from moe_routing_bench.packages import PACKAGE
from moe_routing_bench.store import platforms, project_files

ROOT = PACKAGE.parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS = PROJECT["optional-dependencies"]
MODULES = {"pillow": "PIL", "moe-routing-kernels": "moe_routing_kernels"}  # where the name is another
NAMES = [name for section in SECTIONS.values() for name in section]
IN_PLACE = "pip install -e src/moe_routing_kernels -e '.[bench]'"


def names(lines: list[str]) -> set[str]:
    return {canonicalize_name(Requirement(line).name) for line in lines}


def outcomes(folder: Path) -> dict[str, list]:
    """What becomes of each command in a folder where no package of the extra `bench` is found."""
    command = [sys.executable, str(ROOT / "tests/core_commands.py"), *packages.OF_EXTRA]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=True)
    return json.loads(done.stdout)


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list]:
    """In a folder with the rows that a wheel has."""
    folder = tmp_path_factory.mktemp("core")
    (folder / "results").mkdir()
    shutil.copy(ROOT / "results" / project_files.ROWS, folder / "results")
    return outcomes(folder)


@pytest.mark.parametrize("name", NAMES)
def test_a_command_works_or_says_in_one_line_what_to_install(name: str, found: dict[str, list]) -> None:
    status, out, error = found[name]
    if name in core_commands.LIGHT:
        assert (status, error) == (core_commands.LIGHT[name][1], "") and out
        return
    (line,) = error.splitlines()
    assert status == 2 and not out
    assert line.startswith(f"error: packages for {name}: got 'no torch, pyarrow, pandas and ")
    assert line.endswith(f"hint: {IN_PLACE}")


def test_what_works_loads_no_package_of_the_extra(found: dict[str, list]) -> None:
    assert set(core_commands.LIGHT) == set(LIGHT) and found["loaded"][1] == ""
    assert "cute_dependent" in found["ask"][1]
    assert f"torch is not installed; {IN_PLACE}" in " ".join(found["list"][1].split())


def test_the_library_says_what_to_install(found: dict[str, list]) -> None:
    status, kind, text = found["api"]
    assert (status, kind) == (1, "UserError") and "\n" not in text
    assert text.startswith("packages for moe_routing_bench.api: got 'no torch, pyarrow, pandas and ")
    assert text.endswith(f"hint: {IN_PLACE}")


@pytest.mark.parametrize("shipped", [False, True])
def test_other_rows_in_parquet_need_the_extra(shipped: bool, tmp_path: Path) -> None:
    """A folder with a run, and one with the file that a wheel has, which was made of more runs."""
    (tmp_path / "results/nvidia-h200").mkdir(parents=True)
    for name in ("measurements.parquet", "manifest.yaml"):
        shutil.copy(ROOT / "results/nvidia-h200" / name, tmp_path / "results/nvidia-h200")
    if shipped:
        shutil.copy(ROOT / "results" / project_files.ROWS, tmp_path / "results")
    status, out, error = outcomes(tmp_path)["ask"]
    assert (status, out) == (2, "") and error.count("\n") == 1
    assert error.startswith("error: packages for ask here: got 'no torch, ") and IN_PLACE in error


@pytest.mark.parametrize("altered", [False, True])
def test_a_checkout_answers_from_the_file_that_is_of_its_rows(
    altered: bool, found: dict[str, list], tmp_path: Path
) -> None:
    shutil.copytree(ROOT / "results", tmp_path / "results")
    if altered:
        with (tmp_path / "results/nvidia-h200.seed-004/measurements.parquet").open("ab") as file:
            file.write(b"\0")
    status, out, error = outcomes(tmp_path)["ask"]
    if altered:
        assert status == 2 and error.startswith("error: packages for ask here: got 'no torch, ")
    else:
        assert (status, out, error) == tuple(found["ask"])


def test_the_modules_asked_for_are_those_of_the_extra() -> None:
    wanted = {MODULES.get(name, name) for name in names(EXTRAS["bench"])}
    assert {*packages.OF_EXTRA, "moe_routing_kernels"} == wanted
    assert not packages.lacking() and not packages.copied()


def test_a_copy_of_the_kernels_is_not_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packages, "KERNELS", PACKAGE / "project/kernels/moe_routing_kernels")
    assert packages.copied() and packages.lacking() == ["moe_routing_kernels"]


def test_every_implementation_needs_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platforms, "_importable", lambda name: name != "torch")
    assert platforms.missing((), "cpu") == f"torch is not installed; {IN_PLACE}"
    assert platforms.missing(("gpu",), "cpu") == "needs a GPU, this platform is cpu"


URL = "https://example.org/moe.git"


@pytest.mark.parametrize(
    ("noted", "said"),
    [
        (
            {"url": "file:///d/a b/x.whl", "archive_info": {}},
            "--find-links 'file:///d/a b' 'moe-routing-bench[bench] @ file:///d/a b/x.whl'",
        ),
        (
            {"url": "file:///repo", "dir_info": {}},
            "'moe-routing-kernels @ file:///repo/src/moe_routing_kernels' 'moe-routing-bench[bench] @ file:///repo'",
        ),
        (
            {"url": URL, "vcs_info": {"vcs": "git", "commit_id": "abc"}},
            f"'moe-routing-kernels @ git+{URL}@abc#subdirectory=src/moe_routing_kernels' 'moe-routing-bench[bench] @ git+{URL}@abc'",
        ),
        (None, "'moe-routing-bench[bench]'"),
    ],
    ids=["a wheel", "a folder", "a repository", "an index"],
)
def test_pip_is_told_where_the_kernels_are(noted: dict | None, said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    kept = type("Distribution", (), {"read_text": lambda self, _: noted and json.dumps(noted)})()
    monkeypatch.setattr(project_files, "installed", lambda: True)
    monkeypatch.setattr(project_files, "copied", lambda: True)
    monkeypatch.setattr("importlib.metadata.distributions", lambda **_: [kept])
    assert project_files.to_install(packages.INSTALL) == f"pip install {said}"


# What `make install` and `make report` asked pip for before the dependencies were divided.
BEFORE = {
    *("annotated-types", "filelock", "jinja2", "matplotlib", "moe-routing-kernels", "numpy", "nvidia-ml-py", "nvtx"),
    *("pandas", "pillow", "platformdirs", "pyarrow", "pydantic", "pyyaml", "rich", "scipy", "seaborn", "snakemake"),
    *("torch", "typer"),
}


def test_each_extra_has_what_every_installation_had() -> None:
    core, bench = names(PROJECT["dependencies"]), names(EXTRAS["bench"])
    assert core | bench == BEFORE and not core & bench
    for extra in ("gpu", "peers", "slurm", "dev"):
        assert "moe-routing-bench[bench]" in EXTRAS[extra]


def test_the_core_resolves_to_few_packages() -> None:
    """By the lock: what its packages bring counts, too."""
    lock = {one["name"]: one for one in tomllib.loads((ROOT / "uv.lock").read_text())["package"]}
    waiting, found = sorted(names(PROJECT["dependencies"])), set()
    while waiting:
        if (name := waiting.pop()) not in found:
            found.add(name)
            waiting += [one["name"] for one in lock[name].get("dependencies", ())]
    assert not found & {"numpy", "pyarrow", "pandas", "torch", "moe-routing-kernels"} and len(found) < 20
