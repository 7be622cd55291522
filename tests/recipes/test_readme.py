"""The commands of README.md and docs/usage.md can be pasted: every block parses as shell, and every command, option, target and config exists."""

import re
import shlex
import subprocess
from pathlib import Path

import pytest
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
