"""The folder that `init` makes, what is found without it, and the commit that an installed package says."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from moe_routing_bench.cli import main as cli
from moe_routing_bench.config import presets
from moe_routing_bench.measure import provenance
from moe_routing_bench.store import paths, platforms, project_files

ROOT = Path(__file__).parents[2]


@pytest.fixture
def call(monkeypatch, capsys, tmp_path):
    """Run a command in an empty folder; return (exit status, stdout, stderr)."""
    monkeypatch.chdir(tmp_path)

    def run(*arguments):
        monkeypatch.setattr(sys, "argv", ["moe-routing-bench", *arguments])
        with pytest.raises(SystemExit) as caught:
            cli.main()
        return caught.value.code or 0, *capsys.readouterr()

    return run


@pytest.fixture
def wheel(monkeypatch, tmp_path):
    """The package as if it were installed, in an environment of a repository of the user's; returns its folder `project`."""
    package = tmp_path / "site-packages/moe_routing_bench"
    (package / "project").mkdir(parents=True)
    for command in (
        ["init", "-q"],
        ["-c", "user.name=a", "-c", "user.email=a@b", "commit", "-qm", "x", "--allow-empty"],
    ):
        subprocess.run(["git", *command], cwd=tmp_path, check=True)
    monkeypatch.setattr(project_files, "_IN_WHEEL", package / "project")
    monkeypatch.setattr(project_files, "PACKAGE", package)
    monkeypatch.setattr(provenance, "PACKAGE", package)
    for name in ("GIT_CEILING_DIRECTORIES", provenance.COMMIT):
        monkeypatch.setenv(name, "")  # so that it is restored
    return package / "project"


@pytest.mark.parametrize("there", [False, True], ids=["new", "empty"])
def test_init_copies_what_a_user_edits(call, tmp_path, there):
    if there:
        (tmp_path / "my/bench").mkdir(parents=True)
    code, out, _ = call("init", "my/bench")
    assert code == 0 and "cd my/bench && snakemake" in out
    folder = tmp_path / "my/bench"
    for name in ("config", "profiles", "workflow/profiles"):
        files = [path.relative_to(ROOT) for path in (ROOT / name).rglob("*") if path.is_file()]
        assert files and all((folder / file).read_bytes() == (ROOT / file).read_bytes() for file in files)
    assert os.access(folder / "workflow/scripts/slurm.sh", os.X_OK)
    assert (folder / "Snakefile").is_file() and (folder / "README.md").is_file()
    assert not (folder / "workflow/rules").exists(), "those of the package run"


def test_init_leaves_a_folder_with_files_alone(call, tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    code, _, err = call("init", ".")
    assert (code, err) == (2, "error: folder: got '.'; allowed: a new or an empty one\n")
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]


@pytest.mark.parametrize("name", ["notes.txt", "notes.txt/bench"])
def test_init_says_why_it_cannot_write(call, tmp_path, name):
    (tmp_path / "notes.txt").write_text("mine")
    code, out, err = call("init", name)
    assert (code, out) == (2, "") and err.startswith(f"error: output: got '{name}'") and err.count("\n") == 1


def test_presets_and_claims_of_the_package_are_known_anywhere(call):
    code, out, _ = call("list", "--platform", "cpu")
    assert code == 0 and "qwen3-30b-a3b" in out
    code, _, err = call("claims", "--only", "nonsense")
    assert code == 2 and "--only: got 'nonsense'; allowed: " in err
    code, _, err = call("status", "--platform", "cpu")
    assert code == 2 and "`moe-routing-bench init FOLDER`" in err and err.count("\n") == 1


def test_presets_of_the_working_directory_come_first(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "config").mkdir()
    (tmp_path / paths.MODELS).write_text("mine: {unsupported: an example}\n")
    assert list(presets.load(project_files.own_or_shipped(paths.MODELS))) == ["mine"]


@pytest.mark.parametrize(
    ("recorded", "said"),
    [
        ("a" * 40, {"git_sha": "a" * 40, "git_dirty": False}),
        ("a" * 40 + "-dirty\n", {"git_sha": "a" * 40, "git_dirty": True}),
        (None, {}),
    ],
)
def test_an_installed_package_says_its_own_commit_and_no_other(wheel, recorded, said):
    assert provenance.git_state(list) != said, "the commit of the user's repository"
    if recorded:
        (wheel / "COMMIT").write_text(recorded)
    project_files.name_commit()
    assert provenance.git_state(list) == said


def test_a_checkout_is_asked_as_it_is(monkeypatch):
    for name in ("GIT_CEILING_DIRECTORIES", provenance.COMMIT):
        monkeypatch.delenv(name, raising=False)
    project_files.name_commit()
    assert not {"GIT_CEILING_DIRECTORIES", provenance.COMMIT} & set(os.environ)


WHEEL = "file:///home/me/dist/moe_routing_bench-0.1.0-py3-none-any.whl"


@pytest.mark.parametrize(
    ("noted", "said"),
    [
        ({"url": WHEEL, "archive_info": {}}, f"pip install 'moe-routing-bench[gpu] @ {WHEEL}'"),
        (None, "pip install 'moe-routing-bench[gpu]'"),
    ],
    ids=["a file", "an index"],
)
def test_who_has_a_wheel_is_not_told_to_install_a_checkout(wheel, call, monkeypatch, tmp_path, noted, said):
    info = tmp_path / "site/moe_routing_bench-0.1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: moe-routing-bench\nVersion: 0.1.0\n")
    if noted:
        (info / "direct_url.json").write_text(json.dumps(noted))
    monkeypatch.syspath_prepend(info.parent)
    monkeypatch.setattr(platforms, "_importable", lambda name: False)
    shutil.copytree(ROOT / "config", tmp_path / "config")
    for command in (["doctor"], ["list", "--platform", "nvidia-h200"], ["compile", "--arch", "sm_90a"]):
        _, out, error = call(*command)
        assert said in out + error and "install -e" not in out + error


def test_who_has_a_checkout_installs_it_in_place(call, monkeypatch):
    monkeypatch.setattr(platforms, "_importable", lambda name: False)
    assert "pip install -e '.[gpu]'" in call("doctor")[1]
