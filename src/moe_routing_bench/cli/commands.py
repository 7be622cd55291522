"""All commands by name, and which texts a command line may hold: numbers in decimal digits, names without control characters, nothing empty.

A command's module is imported when it is called: pandas, torch and Arrow take a second, `--help` does not need them.
"""

import contextlib
import functools
import importlib
import inspect
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, get_args, get_origin

import typer
from typer.core import TyperCommand, TyperGroup
from typer.main import get_command_from_info
from typer.models import CommandInfo

from moe_routing_bench.fields import decimal
from moe_routing_bench.store.project_files import check_extra
from moe_routing_bench.streams import holds_controls
from moe_routing_kernels.errors import MOST_LETTERS, UserError, bad, one_line

# The function of each command, in a module of `cli`, below the heading that it has in the help.
SECTIONS = {
    "To begin with": {
        "ask": "ask.ask_",
        "list": "list.list_",
        "doctor": "doctor.doctor",
        "measure": "measure.measure",
        "init": "init.init",
        "status": "status.status",
        "plan": "status.plan",
    },
    "Your own kernels, models and routing": {
        "kernel": "init.kernel",
        "watch": "watch.watch",
        "profile": "profile.profile",
        "compile": "compile.compile_",
        "preset": "init.preset",
        "trace": "trace.trace",
        "accuracy": "accuracy.accuracy",
    },
    "Results that are there": {
        "report": "report.report",
        "figure": "report.figure",
        "manifest": "published.manifest",
        "published": "published.published",
        "submit": "published.submit",
        "verify": "published.verify",
        "columns": "list.columns",
        "site": "published.site",
        "compare": "compare.compare",
        "history": "compare.history",
        "claims": "claims.claims",
        "choices": "choices.choices",
        "targets": "choices.targets",
        "rank": "collect.rank",
        "specialisation": "collect.specialisation",
        "scale": "scale.scale",
        "prune": "status.prune",
    },
    "Steps of the workflow, which runs them itself": {
        "measure-again": "measure.measure_again",
        "collect": "collect.collect",
        "prepare-texts": "train.prepare_texts",
        "train": "train.train",
        "time-training": "train.time_training",
        "adapt": "train.adapt",
        "collect-quality": "collect.collect_quality",
        "collect-perft": "collect.collect_perft",
    },
}
# The commands that need no package of the extra `bench`.
LIGHT = ("ask", "list", "doctor", "init", "preset")
_FUNCTIONS = {name: function for section in SECTIONS.values() for name, function in section.items()}


_UsageError: Any = typer.BadParameter.__base__  # a mistake in a command line, as the parser calls it


class Command(TyperCommand):
    """A command that refuses an option of one value given twice, of which the first would be ignored, and odd texts."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse the command line. Raises `UserError`."""
        with _one_line(ctx):
            values, _, order = self.make_parser(ctx).parse_args(list(args))
        for option in order:
            once = option.param_type_name == "option" and not option.multiple  # type: ignore
            if once and order.count(option) > 1:
                raise bad(option.opts[0], f"{order.count(option)} times", "once")
            check_text(self.callback, option, values[option.name])  # type: ignore
        with _one_line(ctx):
            return super().parse_args(ctx, args)


@contextlib.contextmanager
def _one_line(ctx: Any) -> Iterator[None]:
    """Raise `UserError` in place of a mistake that the parser would print with the usage, and with what it got as it is."""
    try:
        yield
    except _UsageError as error:
        if type(error).__name__.startswith("NoArgs"):  # which prints the help
            raise
        hint = f"hint: {ctx.command_path} --help"
        raise UserError(
            f"{one_line(error.format_message().rstrip('.'), MOST_LETTERS - len(hint) - 2)}; {hint}"
        ) from error


class Loaded(Mapping[str, Command]):
    """The commands by name; looking one up imports its module."""

    def __init__(self) -> None:
        """None is imported."""
        self._made: dict[str, Command] = {}

    def __getitem__(self, name: str) -> Command:
        """The command. Raises KeyError for a name that is none, and `UserError` where packages that it needs are not installed."""
        module, function = _FUNCTIONS[name].split(".")
        if name not in self._made:
            if name not in LIGHT:
                check_extra(name)
            info = CommandInfo(
                name, cls=Command, callback=getattr(importlib.import_module(f"{__package__}.{module}"), function)
            )
            self._made[name] = get_command_from_info(info, pretty_exceptions_short=False, rich_markup_mode=None)  # type: ignore
        return self._made[name]

    def __iter__(self) -> Iterator[str]:
        """The names, in the order of the help."""
        return iter(_FUNCTIONS)

    def __len__(self) -> int:
        """How many commands there are."""
        return len(_FUNCTIONS)


class Commands(TyperGroup):
    """All commands: their list has sections, and of each the first sentence of its help, whole."""

    def __init__(self, **attributes: Any) -> None:
        """The commands are those of `SECTIONS`."""
        super().__init__(**attributes)
        self.commands = Loaded()  # type: ignore

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse what comes before a command's name. Raises `UserError`."""
        with _one_line(ctx):
            return super().parse_args(ctx, args)

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """The command and its arguments. Raises `UserError`."""
        with _one_line(ctx):
            return super().resolve_command(ctx, args)

    def invoke(self, ctx: Any) -> Any:
        """Run the command. Raises `UserError` where none is named, as after `--`."""
        with _one_line(ctx):
            return super().invoke(ctx)

    def list_commands(self, ctx: Any) -> list[str]:
        """The names, in the order of the help."""
        return list(self.commands)

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """Write the list."""
        for title, functions in SECTIONS.items():
            with formatter.section(title):
                formatter.write_dl([(name, summary(function)) for name, function in functions.items()])


@functools.cache
def _source(module: str) -> str:
    return Path(__file__).with_name(f"{module}.py").read_text(encoding="utf-8")


def summary(function: str) -> str:
    """The first sentence of a command's help, as its source has it: nothing is imported, nor parsed, which takes a tenth of a second."""
    module, name = function.split(".")
    docstring = _source(module).partition(f"\ndef {name}(")[2].split('"""')[1]
    sentence = re.split(r"(?<=\.)\s", f"{docstring.strip()} ")[0].rstrip(".")
    return " ".join(sentence.split())


_JSON = ("config_json", "spec")  # texts of many lines
_MOST_LETTERS = 4096


def check_text(callback: Callable, parameter: Any, value: Any) -> None:
    """Raise `UserError` where a parameter of a command got a text, or a list with one, that is no value of it."""
    texts = [value] if isinstance(value, str) else value if isinstance(value, list | tuple) else []
    known = inspect.signature(callback).parameters
    if parameter.name not in known:  # --help
        return
    kinds = _kinds(known[parameter.name].annotation)
    name = parameter.opts[0] if parameter.param_type_name == "option" else parameter.name.upper()
    for text in texts:
        if isinstance(text, str):
            _check_text(name, text, kinds, parameter.name)


def _kinds(annotation: Any) -> set[Any]:
    """The types that an annotation names."""
    if get_origin(annotation) is Annotated:
        return _kinds(get_args(annotation)[0])
    inner = get_args(annotation)
    return set().union(*map(_kinds, inner)) if inner else {annotation}


def _check_text(name: str, text: str, kinds: set[Any], parameter: str) -> None:
    for kind, allowed in ((int, "a whole number"), (float, "a number")):
        if kind in kinds and decimal(kind, text) is None:
            raise bad(name, text, f"{allowed}, in decimal digits")
    if parameter in _JSON:
        return
    if not text.strip():
        raise bad(name, text, "a text that is not empty")
    if holds_controls(text):
        raise bad(name, text, "a text without control characters")
    if Path in kinds and set(text) & set("*?"):
        raise bad(name, text, "a path without * and ?", "no file has matched this pattern of the shell")
    if len(text) > _MOST_LETTERS:
        raise bad(name, text, f"at most {_MOST_LETTERS} letters")
