"""The command line. Each command prints what it did; a user's mistake is one line on stderr and exit status 2.

A command is in the module of its name; a small one in that of the command that it goes with, such as `history` in `compare`.
"""

import sys
from typing import Annotated

import typer

from moe_routing_bench import streams
from moe_routing_bench.cli.commands import Commands
from moe_routing_bench.packages import lacking
from moe_routing_bench.store.project_files import check_extra, name_commit
from moe_routing_kernels.errors import UserError, bad

_HELP = """Measure the steps of Mixture-of-Experts layers (gate, router, permute, pack, experts, combine), whole layers and models:
our kernels, those of other packages and yours; and train small models, to see what a routing rule does to their quality.

A first command is `moe-routing-bench measure gate`. A whole grid, to a report, is the work of `snakemake --cores 1 --resources gpu=1`, in a
checkout or in a folder that `init` makes.
"""
_EXIT = """Exit status: 0 done; 1 an implementation or a check has failed; 2 a mistake in options, a config or a file, which one line on
stderr explains, or nothing takes what it prints; 130 interrupted; 143 terminated."""

app = typer.Typer(
    cls=Commands,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
    help=_HELP,
    epilog=_EXIT,
)


def _print_version(wanted: bool) -> None:
    if wanted:
        from importlib import metadata  # takes 30 ms, which other commands need not wait for

        print(f"moe-routing-bench {metadata.version('moe-routing-bench')}")
        raise typer.Exit


@app.callback()
def _common(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit")
    ] = False,
) -> None:
    """Options before a command's name."""


def main() -> None:
    """Entry point: run a command; report a `UserError` on stderr without a traceback."""
    streams.guard()
    streams.never_raise()
    name_commit()
    try:
        try:
            app(prog_name="moe-routing-bench")
        except ModuleNotFoundError as error:  # what a command needs in some folders only, as `ask` for rows in Parquet
            if (error.name or "").partition(".")[0] in lacking():
                check_extra(f"{sys.argv[1]} here")
            raise
        finally:
            sys.stdout.flush()
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    except streams.Unwritable as error:
        streams.to_nowhere()
        print(
            f"error: {bad('output', 'stdout', 'one that can be written', error.strerror or str(error))}",
            file=sys.stderr,
        )
        sys.exit(2)
    except BrokenPipeError:  # `moe-routing-bench list | head`
        streams.to_nowhere()
        sys.exit(1)


if __name__ == "__main__":
    main()
