"""What a user has is not overwritten: no command writes over a file, or into a folder of files, without `--force`."""

import sys
from pathlib import Path

import numpy as np
import pytest
import typer.main

from moe_routing_bench.cli import main as cli
from moe_routing_bench.cli import options
from moe_routing_bench.grid.run_spec import Run
from moe_routing_bench.quality import run_rows
from moe_routing_bench.store import paths
from moe_routing_kernels.errors import UserError

ROOT = Path(__file__).parents[2]
JSON = [
    "--platform",
    "cpu",
    "--config-json",
    '{"grid": [{"benches": ["gate"], "implementations": ["torch"], "tokens": [64], "experts": [8], "top_k": [2]}], "quality": [{"label": "a", "router": ["softk"], "steps": 4, "seed": [0], "lr": 0.01, "warmup": 1, "corpora": {"stdlib": 50000}}], "perft": [{"label": "b", "base": "a", "variant": ["R"], "rank": [1], "steps": 4, "lr": 0.01, "warmup": 1, "corpora": {"stdlib": 50000}}]}',
]
# (command, option) -> what else it is given. Options that name a folder are in FOLDERS.
COMMANDS = {
    ("measure", "--out"): ["gate", "--implementations", "torch"],
    ("measure", "--profile"): ["gate", "--implementations", "torch"],
    ("watch", "--profile"): ["gate", "--implementations", "torch"],
    ("profile", "--out"): ["cell.parquet"],
    ("trace", "--out"): ["ids.npy"],
    ("accuracy", "--out"): [],
    ("compare", "--html"): ["a.parquet", "b.parquet"],
    ("history", "--html"): ["a.parquet", "b.parquet"],
    ("choices", "--out"): [],
    ("scale", "--out"): ["qwen3-30b-a3b"],
    ("measure-again", "--out"): JSON,
    ("collect", "--out"): JSON,
    ("train", "--out"): ["--steps", "4"],
    ("time-training", "--out"): ["run.parquet"],
    ("adapt", "--out"): ["run.parquet"],
    ("collect-quality", "--out"): JSON,
    ("collect-perft", "--out"): JSON,
    ("site", "--out"): [],
    ("report", "--out"): ["--rows", "rows.csv"],
    ("submit", "--out"): ["--by", "Ada L."],
}
FOLDERS = {
    ("measure", "--profile"),
    ("watch", "--profile"),
    ("profile", "--out"),
    ("site", "--out"),
    ("report", "--out"),
}
SITE = ("site", "--out")  # test_site.py has it


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """The working directory, with what commands read before they look at their output."""
    (tmp_path / "config").symlink_to(ROOT / "config")
    monkeypatch.chdir(tmp_path)
    np.save("ids.npy", np.zeros((4, 2), np.int32))
    run = Run(steps=4, eval_every=4, warmup=1, lr=0.01)
    row = {"schema_version": run_rows.SCHEMA_VERSION, "run": run.name, "router": "softk", "lr": 0.01}
    run_rows.write(Path("run.parquet"), [row], run.spec)
    paths.weights_file(Path("run.parquet")).write_bytes(b"")
    return tmp_path


def call(monkeypatch, *arguments):
    """A command's error, or what it has reached after it has looked at its output."""
    monkeypatch.setattr(sys, "argv", ["moe-routing-bench", *arguments])
    with pytest.raises((SystemExit, Reached)) as caught:
        cli.main()
    return caught.value


class Reached(Exception):
    """The output may be written."""


def test_every_output_of_a_command_is_known():
    """A new option with a path for output is entered above, and has --force."""
    names = {"--out", "--html", "--profile"}
    commands = typer.main.get_command(cli.app).commands
    found = {
        (name, option)
        for name, command in commands.items()
        for parameter in command.params
        for option in names.intersection(parameter.opts)
    }
    assert found == set(COMMANDS)
    for name, _ in found:
        assert any("--force" in parameter.opts for parameter in commands[name].params), name


@pytest.mark.parametrize("kind", ["file", "link to a file", "link to nothing"])
@pytest.mark.parametrize(("command", "option"), sorted(set(COMMANDS) - FOLDERS), ids="".join)
def test_a_file_that_is_there_stays_as_it_is(folder, monkeypatch, capsys, command, option, kind):
    """It is refused before anything is done; with --force it passes."""
    path, real = folder / "there.parquet", folder / "real.parquet"
    if kind != "link to nothing":
        (path if kind == "file" else real).write_text("a user's")
    if kind != "file":
        path.symlink_to(real)
    arguments = [command, *COMMANDS[command, option], option, path.name]
    assert call(monkeypatch, *arguments).code == 2
    out, error = capsys.readouterr()
    assert out == "" and error.count("\n") == 1 and f"{option}: got 'there.parquet'; allowed: a new file" in error
    assert "--force" in error
    assert path.is_symlink() == (kind != "file") and (kind == "link to nothing" or path.read_text() == "a user's")

    def reached(path):
        raise Reached(path)

    monkeypatch.setattr(options.files, "check_writable", reached)
    assert isinstance(call(monkeypatch, *arguments, "--force"), Reached)


@pytest.mark.parametrize(("command", "option"), sorted(FOLDERS - {SITE, ("profile", "--out")}), ids="".join)
def test_a_folder_of_files_stays_as_it_is(folder, monkeypatch, capsys, command, option):
    (folder / "there").mkdir()
    (folder / "there/operators.csv").write_text("a user's")
    (folder / "rows.csv").write_text("bench,implementation,median_us,tokens\npack,mine,3.5,64\n")
    arguments = [command, *COMMANDS[command, option], option, "there"]
    assert call(monkeypatch, *arguments).code == 2
    out, error = capsys.readouterr()
    assert out == "" and error.count("\n") == 1 and f"{option}: got 'there'; allowed: a new or an empty folder" in error
    assert (folder / "there/operators.csv").read_text() == "a user's"


@pytest.mark.parametrize("command", ["collect", "collect-quality", "collect-perft", "measure-again"])
def test_the_projects_own_files_are_made_anew(folder, monkeypatch, command):
    """Where no file is named, as these are results of rows that are kept."""
    tables = {
        "collect": paths.measurements,
        "collect-quality": paths.quality,
        "collect-perft": paths.perft,
        "measure-again": paths.again,
    }
    path = tables[command]("cpu")
    path.parent.mkdir(parents=True)
    path.write_text("earlier rows")
    seen = []

    def reached(path):
        seen.append(path)
        raise Reached(path)

    monkeypatch.setattr(options.files, "check_writable", reached)
    assert isinstance(call(monkeypatch, command, *JSON), Reached) and seen == [path]


@pytest.mark.parametrize(
    ("there", "force", "refused"),
    [
        (None, False, False),
        ("empty", False, False),
        ("full", False, True),
        ("full", True, False),
        ("file", False, True),
    ],
)
def test_a_folder_is_new_or_empty(tmp_path, there, force, refused):
    path = tmp_path / "folder"
    if there == "file":
        path.write_text("a user's")
    elif there:
        path.mkdir()
        if there == "full":
            (path / "notes").touch()
    if refused:
        with pytest.raises(UserError, match="folder"):
            options.check_folder("--out", path, force)
    else:
        options.check_folder("--out", path, force)
    assert there != "full" or (path / "notes").exists()
