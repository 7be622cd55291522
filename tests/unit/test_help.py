"""What `--help` says: all of it, in words, for every command."""

import re
import subprocess
import sys

import pytest
import typer

from moe_routing_bench.cli import main as cli

COMMANDS = typer.main.get_command(cli.app).commands


@pytest.fixture
def told(monkeypatch, capsys):
    """What the help of a command says, in 100 columns."""
    monkeypatch.setenv("COLUMNS", "100")

    def run(*arguments):
        monkeypatch.setattr(sys, "argv", ["moe-routing-bench", *arguments, "--help"])
        with pytest.raises(SystemExit) as caught:
            cli.main()
        assert not caught.value.code
        return capsys.readouterr().out

    return run


def test_the_first_help_has_every_command_in_a_section_with_a_whole_sentence(told):
    text = told()
    assert "..." not in text.partition("Options:")[2]
    listed = re.findall(r"^  ([a-z][a-z-]+) +(?=[A-Z])", text, re.MULTILINE)
    assert sorted(listed) == sorted(COMMANDS)
    words = " ".join(text.split())
    assert all(" ".join(re.split(r"\.\s", f"{one.help} ")[0].split()) in words for one in COMMANDS.values())
    assert (
        text.index("To begin with:") < text.index("  init ") < text.index("Your own kernels") < text.index("  watch ")
    )
    assert re.search(r"Exit status: 0 .* 1 .* 2 .* 130 ", " ".join(text.split()))


def test_a_command_is_in_the_module_of_its_name_or_with_one_that_is():
    modules = {name: one.callback.__module__.rpartition(".")[2] for name, one in COMMANDS.items()}
    of_their_own = {name.replace("-", "_") for name, module in modules.items() if module == name.replace("-", "_")}
    assert set(modules.values()) == of_their_own


@pytest.mark.parametrize("name", COMMANDS)
def test_every_option_is_explained_and_typed_in_words(name, told):
    text = told(name)
    command = COMMANDS[name]
    assert not [
        one.name for one in command.params if not re.match(r"[A-Z]", getattr(one, "help", None) or one.metavar or "x")
    ]
    assert "range>" not in text and "--config <list" not in text and "...}" not in text and "...]..." not in text
    assert command.help and command.help.partition("\n")[0].endswith(".")


@pytest.mark.parametrize(
    ("line", "found"),
    [
        ("ker", "kernel"),
        ("measure ga", "gate"),
        ("kernel comb", "combine"),
        ("watch gate --router deepseek_v3", "deepseek_v3"),
    ],
)
def test_a_shell_completes_commands_and_names(line, found, monkeypatch, capsys):
    words = f"moe-routing-bench {line}"
    monkeypatch.setenv("COMP_WORDS", words)
    monkeypatch.setenv("COMP_CWORD", str(len(words.split()) - 1))
    monkeypatch.setenv("_MOE_ROUTING_BENCH_COMPLETE", "complete_bash")
    monkeypatch.setattr(sys, "argv", ["moe-routing-bench"])
    # The name of the program has `python -m pytest` in it otherwise.
    monkeypatch.setattr(sys.modules["__main__"], "__package__", None)
    with pytest.raises(SystemExit):
        cli.main()
    assert capsys.readouterr().out.split() == [found]


@pytest.mark.parametrize(
    ("words", "forks"),
    [("list", False), ("measure --help", False), ("measure gate -h", False), ("measure gate --tokens none", True)],
)
def test_help_starts_no_worker(words, forks):
    """Nor does a command that measures nothing."""
    code = "import os; os.fork = None; from moe_routing_bench.cli.__main__ import main; main()"
    done = subprocess.run([sys.executable, "-c", code, *words.split()], capture_output=True, text=True)
    assert (done.returncode != 0) == ("'NoneType' object is not callable" in done.stderr) == forks
