"""The command line. Each command prints what it did; a user's mistake is one line on stderr and exit status 2."""

import os
import sys
from importlib import metadata
from typing import Annotated

import typer

from moe_routing_bench.cli import (
    choosing,
    claiming,
    comparing,
    compilation,
    inspection,
    measuring,
    presetting,
    profiling,
    publishing,
    quantising,
    repeating,
    reporting,
    results,
    starting,
    tracing,
    training,
    training_results,
    watching,
)
from moe_routing_bench.cli.command import Command
from moe_routing_bench.cli.commit import name_commit
from moe_routing_bench.errors import UserError

app = typer.Typer(
    no_args_is_help=True, pretty_exceptions_enable=False, rich_markup_mode=None, context_settings={"help_option_names": ["-h", "--help"]},
    help="Benchmark Mixture-of-Experts routing: gate, permute, pack, experts, combine.",
)  # fmt: skip
for _name, _command in {
    "init": starting.init,
    "list": inspection.list_,
    "measure": measuring.measure,
    "watch": watching.watch,
    "profile": profiling.profile,
    "measure-again": repeating.measure_again,
    "collect": results.collect,
    "figure": reporting.figure,
    "report": reporting.report,
    "site": publishing.site,
    "status": results.status,
    "prune": results.prune,
    "compile": compilation.compile_,
    "doctor": inspection.doctor,
    "preset": presetting.preset,
    "trace": tracing.trace,
    "train": training.train,
    "time-training": training.time_training,
    "collect-quality": training_results.collect,
    "compare": comparing.compare,
    "history": comparing.history,
    "claims": claiming.claims,
    "choices": choosing.choices,
    "accuracy": quantising.accuracy,
    "rank": training_results.rank,
    "adapt": training.adapt,
    "collect-perft": training_results.collect_perft,
    "specialisation": training_results.specialisation,
}.items():
    app.command(_name, cls=Command)(_command)


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"moe-routing-bench {metadata.version('moe-routing-bench')}")
        raise typer.Exit


@app.callback()
def _common(
    version: Annotated[bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit")] = False,
) -> None:  # fmt: skip
    """Options before a command's name."""


def main() -> None:
    """Entry point: run a command; report a `UserError` on stderr without a traceback."""
    name_commit()
    try:
        app()
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    except BrokenPipeError:  # `moe-routing-bench list | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)


if __name__ == "__main__":
    main()
