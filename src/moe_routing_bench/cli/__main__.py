"""The command ``moe-routing-bench``. The worker of `measure` imports torch while this process imports, reads and checks all else."""

import contextlib
import importlib
import sys

from moe_routing_bench import streams


def main() -> None:
    """Entry point: run the command line, for `measure` with its first worker started beforehand."""
    streams.guard()  # before there are pipes, which would take the numbers of closed streams
    with _first_worker():
        importlib.import_module("moe_routing_bench.cli.main").main()


def _first_worker() -> contextlib.AbstractContextManager[None]:
    """Nothing for another command, for help, or where a fork has torch at once."""
    if sys.argv[1:2] != ["measure"] or {"-h", "--help"} & set(sys.argv) or "torch" in sys.modules:
        return contextlib.nullcontext()
    return importlib.import_module("moe_routing_bench.measure.worker_process").beforehand()


if __name__ == "__main__":
    main()
