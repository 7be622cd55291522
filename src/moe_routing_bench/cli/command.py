"""What all commands do with their options."""

from typing import Any

from typer.core import TyperCommand

from moe_routing_bench.errors import bad


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
