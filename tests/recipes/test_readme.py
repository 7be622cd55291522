"""The commands of README.md and docs/usage.md can be pasted: every block parses as shell, and every command, option, target and config exists."""

import re
import runpy
import shlex
import subprocess
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from typer import Context
from typer.main import get_command

from moe_routing_bench.cli.main import app

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
TEXT = README + (ROOT / "docs/usage.md").read_text()
BLOCKS = re.findall(r"^```sh\n(.*?)^```$", TEXT, re.M | re.S)
LINES = [line for block in BLOCKS for line in block.splitlines()] + re.findall(r"^\| `([^`]+)` \|", TEXT, re.M)
COMMANDS = [shlex.split(part, comments=True) for line in LINES for part in line.split(" && ")]


def test_readme_is_short_and_begins_with_a_picture_a_result_and_the_first_command() -> None:
    assert len(README) <= 9000 and "make report" in BLOCKS[0]
    order = [README.index(part) for part in ("\n![", "<!-- generated: headline", BLOCKS[0])]
    assert order == sorted(order) and order[-1] < 3000
    block = README.partition("<!-- generated: headline -->")[2].partition("<!-- end -->")[0]
    assert block.count("\n|") - 2 == 4 and len(BLOCKS[0].splitlines()) == 3, "a table of four rows, three commands"


def test_the_picture_is_that_of_the_stored_rows(tmp_path: Path) -> None:
    """`make pictures` draws it again. Ours and five others at most, of the model of the table; letters may differ with the versions of libraries."""
    picture = runpy.run_path(str(ROOT / "docs/img/layers.py"))
    chart = picture["chart"]()
    assert next(iter(chart.colors)) == "ours" and 4 <= len(chart.colors) <= 6 and {1, 64, 4096} <= set(chart.marks["x"])
    assert f"| {picture['MODEL']}, bf16, T=64 |" in README and f"docs/img/{picture['PICTURE'].name}" in README
    picture["main"](tmp_path / "now.png")
    stored, now = (
        np.asarray(Image.open(path).convert("L"), int) for path in (picture["PICTURE"], tmp_path / "now.png")
    )
    assert stored.shape == now.shape == (630, 1200) and np.abs(stored - now).mean() < 1
    pixels = np.asarray(Image.open(picture["PICTURE"]).convert("RGB"), int)
    for name, tint in chart.colors.items():  # a picture of other colours is as grey
        assert (np.abs(pixels - [int(tint[at : at + 2], 16) for at in (1, 3, 5)]).max(-1) <= 8).sum() > 100, name


@pytest.mark.parametrize("block", BLOCKS)
def test_a_block_is_a_shells_without_places_to_fill_in(block: str) -> None:
    done = subprocess.run(["bash", "-n"], input=block, capture_output=True, text=True)
    assert not done.stderr
    code = "\n".join(" ".join(shlex.split(line, comments=True)) for line in block.splitlines())
    assert not re.search(r" \| |<|\.\.\.|[A-Z]{4,}\b(?!=)", code), "a pipe between alternatives, or a name that is none"


@pytest.mark.parametrize("words", [one for one in COMMANDS if one[0] == "moe-routing-bench"], ids=" ".join)
def test_a_command_and_its_options_are_there(words: list[str]) -> None:
    commands = get_command(app).commands  # type: ignore[attr-defined]
    command = commands[words[1]]
    command.make_parser(Context(command)).parse_args(words[2:])  # raises for an option that is not


@pytest.mark.parametrize("words", [one for one in COMMANDS if one[0] in ("make", "snakemake")], ids=" ".join)
def test_targets_and_configs_are_there(words: list[str]) -> None:
    if words[0] == "make":
        assert re.search(rf"^{words[1]}:", (ROOT / "Makefile").read_text(), re.M)
    assert all((ROOT / words[i + 1]).is_file() for i, word in enumerate(words) if word == "--configfile")
