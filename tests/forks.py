"""Programs of this environment as forks of one process that has imported torch and Snakemake, for tests that start many of them.

Starting each anew takes two seconds, most of them for imports. It is the warm server of measurements with other requests; its
children import the package afresh, from where PYTHONPATH says.
"""

import contextlib
import functools
import os
import runpy
import shlex
import signal
import socket
import struct
import subprocess
import sys
import tempfile
from pathlib import Path

MEASURE = Path(__file__).parents[1] / "src/moe_routing_bench/measure"
MODULES = {"moe-routing-bench": "moe_routing_bench.cli", "snakemake": "snakemake"}
CALL = """
import sys
sys.path.insert(0, {measure!r})
import client
client.SERVER, client.SILENT_SECONDS = {server!r}, 600
sys.exit(client.asked(client.connected({path!r}), ["--cli", {module!r}, *sys.argv[1:]]))
"""
SOCKET = "forks.sock"
SHARED = "MOE_ROUTING_BENCH_TEST_PROGRAMS"  # the variable that names the folder to workers of pytest


@functools.cache
def programs() -> Path:
    """A folder for PATH with the programs; the first call of one starts the process, which `stop` ends."""
    if shared := os.environ.get(SHARED):
        return Path(shared)
    folder = Path(tempfile.mkdtemp(prefix="mrb-", dir="/tmp"))  # a socket's path must be short
    for name, module in MODULES.items():
        call = CALL.format(measure=str(MEASURE), server=__file__, path=str(folder / SOCKET), module=module)
        command = shlex.join([sys.executable, "-I", "-S", "-c", call])
        (folder / name).write_text(f'#!/bin/sh\nexec {command} "$@"\n')
        (folder / name).chmod(0o755)
    return folder


def environment(*sources: Path, forked: bool = True) -> dict[str, str]:
    """Variables with which a command finds modules in `sources`, and programs of this environment: as forks, or as they are."""
    programs_of = [str(programs())] * forked + [os.path.dirname(sys.executable)]
    path = os.pathsep.join([*programs_of, os.environ["PATH"]])
    return os.environ | {"PYTHONPATH": os.pathsep.join(map(str, sources)), "PATH": path}


def share() -> None:
    """Start the process, which workers of pytest that this one starts then use, too."""
    program = programs() / "moe-routing-bench"
    os.environ[SHARED] = str(program.parent)
    # Silent: where pytest ends at once, its folder is gone before it is ready. Whoever needs it says so where it is not there.
    subprocess.Popen([program, "--version"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


def stop() -> None:
    """End the process, if there is one."""
    os.environ.pop(SHARED, None)
    if programs.cache_info().currsize:
        with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX) as connection:
            connection.connect(str(programs() / SOCKET))
            pid, *_ = struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
            os.kill(pid, signal.SIGTERM)
        for left in programs().iterdir():
            left.unlink()
        programs().rmdir()
        programs.cache_clear()


def main(path: str) -> None:
    """Serve requests at the socket `path`."""
    sys.path.insert(0, str(MEASURE))
    import server  # pyright: ignore[reportMissingImports]

    del sys.path[0]  # it has a module `statistics`
    import smart_open  # noqa: F401 - Snakemake imports it when it reads its first file
    from snakemake.cli import get_argument_parser

    get_argument_parser()  # imports Snakemake's plugins
    own = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    elsewhere = [folder for folder in sys.path if folder not in own]

    def command(arguments: list[str], _: socket.socket) -> int:
        """In the child: run a module as a program."""
        sys.path[:] = [*filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep)), *elsewhere]
        sys.argv = arguments
        runpy.run_module(arguments[0], run_name="__main__", alter_sys=True)
        return 0

    def reap(children: set[int], _: set[int]) -> None:
        """Collect children that have ended; warm servers that they started live on."""
        with contextlib.suppress(ChildProcessError):
            while ended := os.waitpid(-1, os.WNOHANG)[0]:
                children.discard(ended)

    server.command, server.reap, server.IDLE_SECONDS = command, reap, 600  # `stop` ends it
    server.main(path)


if __name__ == "__main__":
    main(sys.argv[1])
