"""What all commands do with their options, and how the list of them is shown."""

import re
from typing import Any

from typer.core import TyperCommand, TyperGroup

from moe_routing_kernels.errors import bad


class Command(TyperCommand):
    """A command that refuses an option of one value given twice, of which the first would be ignored."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse the command line. Raises `UserError`."""
        _, _, order = self.make_parser(ctx).parse_args(list(args))
        for one in order:
            once = one.param_type_name == "option" and not one.multiple  # type: ignore
            if once and order.count(one) > 1:
                raise bad(one.opts[0], f"{order.count(one)} times", "once")
        return super().parse_args(ctx, args)


class Commands(TyperGroup):
    """All commands: their list has sections, and of each the first sentence of its help, whole."""

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """Write the list. A command's section is what Typer calls its panel."""
        sections: dict[str, list[tuple[str, str]]] = {}
        for name, command in self.commands.items():
            sentence = re.split(r"(?<=\.)\s", f"{command.help} ")[0].rstrip(".")
            sections.setdefault(str(getattr(command, "rich_help_panel", "")), []).append(
                (name, " ".join(sentence.split()))
            )
        for title, lines in sections.items():
            with formatter.section(title):
                formatter.write_dl(lines)
