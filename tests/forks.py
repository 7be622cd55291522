"""Programs of this environment as forks of one process that has imported torch and Snakemake, for tests that start many of them.

Starting each anew takes two seconds, most of them for imports. It is the warm server of measurements with other requests; its
children import the package afresh, from where PYTHONPATH says. Workers of pytest are such forks, too, which else import for longer
than they collect, and so are the warm servers that programs start, which else import for six seconds.
"""

import atexit
import contextlib
import functools
import importlib
import os
import runpy
import select
import shlex
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
from pathlib import Path
from types import ModuleType

MEASURE = Path(__file__).parents[1] / "src/moe_routing_bench/measure"
PYTHON, SERVER = "forked-python", "warm-server"
MODULES = {"moe-routing-bench": "moe_routing_bench.cli", "snakemake": "snakemake", PYTHON: PYTHON, SERVER: SERVER}
CALL = """
import os, sys
sys.path.insert(0, {measure!r})
import client
client.SERVER, client.SILENT_SECONDS = {server!r}, 600
sys.exit(client.asked(client.connected({path!r}), ["--module", {module!r}, str(os.getpid()), *sys.argv[1:]]))
"""
# The interpreter of forked programs, and of the rules of a forked Snakemake: of it a client asks for a server of its own source tree.
# Processes that compile kernels are forks as well, which have imported the compiler.
INTERPRETER = """#!/bin/sh
case "$1 $2 $3" in
  "-P "*"/measure/server.py "*) shift; exec {server} "$@" ;;
  "-I -S "*/measure/client.py) shift 2; exec {python} -I -S -c {client} "$@" ;;
esac
case "$1 $5" in
  "-c moe_routing_kernels.cute.ahead") exec {forked} "$@" ;;
esac
exec {python} "$@"
"""
CLIENT = """
import sys
sys.executable, sys.argv = {here!r}, sys.argv[1:]
with open(sys.argv[0]) as file:
    exec(compile(file.read(), sys.argv[0], "exec"), {{"__name__": "__main__", "__file__": sys.argv[0]}})
"""
SIGN_SECONDS = 60  # after which a worker says that it is alive
COLLECTED = (
    "matplotlib.pyplot",
    "transformers.models",
    "cutlass.cute",
    "torch._dynamo.testing",
)  # what our tests import
SOCKET, STARTER = "forks.sock", "starter"  # files of the folder: the socket, and the pid of the process that made it
SHARED = "MOE_ROUTING_BENCH_TEST_PROGRAMS"  # the variable that names the folder to workers of pytest


@functools.cache
def programs() -> Path:
    """A folder for PATH with the programs; the first call of one starts the process, which `stop` ends. One that a pytest above has
    started serves the pytest that a test starts, too."""
    if shared := os.environ.get(SHARED):
        return Path(shared)
    folder = Path(tempfile.mkdtemp(prefix="mrb-", dir="/tmp"))  # a socket's path must be short
    for name, module in MODULES.items():
        told = {"measure": str(MEASURE), "server": __file__, "path": str(folder / SOCKET)}
        call = CALL.format(**told, module=module)
        command = shlex.join([sys.executable, "-I", "-S", "-c", call])
        (folder / name).write_text(f'#!/bin/sh\nexec {command} "$@"\n')
    asked = CLIENT.format(here=str(folder / "python"))
    words = {"server": folder / SERVER, "python": sys.executable, "client": asked, "forked": folder / PYTHON}
    (folder / "python").write_text(INTERPRETER.format(**{name: shlex.quote(str(word)) for name, word in words.items()}))
    for program in folder.iterdir():
        program.chmod(0o755)
    (folder / STARTER).write_text(str(os.getpid()))
    return folder


def environment(*sources: Path, forked: bool = True) -> dict[str, str]:
    """Variables with which a command finds modules in `sources`, and programs of this environment: as forks, or as they are."""
    programs_of = [str(programs())] * forked + [os.path.dirname(sys.executable)]
    path = os.pathsep.join([*programs_of, os.environ["PATH"]])
    return os.environ | {"PYTHONPATH": os.pathsep.join(map(str, sources)), "PATH": path}


def share() -> None:
    """Start the process, which workers of pytest that this one starts then use, too."""
    if SHARED in os.environ:
        return
    program = programs() / "moe-routing-bench"
    os.environ[SHARED] = str(program.parent)
    # Silent: where pytest ends at once, its folder is gone before it is ready. Whoever needs it says so where it is not there.
    subprocess.Popen([program, "--version"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


def stop() -> None:
    """End the process, if this one has started it."""
    if programs.cache_info().currsize and (programs() / STARTER).read_text() == str(os.getpid()):
        os.environ.pop(SHARED, None)
        with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX) as connection:
            connection.connect(str(programs() / SOCKET))
            pid, *_ = struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
            os.kill(pid, signal.SIGTERM)
        for left in programs().iterdir():
            left.unlink()
        programs().rmdir()
        programs.cache_clear()


def interpret(caller: str, words: list[str], connection: socket.socket) -> None:
    """In the child: run what a Python of these words would, such as a worker of pytest, with the caller's stdin; it ends with the caller."""

    def watch() -> None:
        with contextlib.suppress(OSError):
            while not select.select([connection], [], [], SIGN_SECONDS)[0]:
                connection.sendall(b".")
        os._exit(1)

    with open(f"/proc/{caller}/fd/0") as stdin:
        os.dup2(stdin.fileno(), 0)
    os.setsid()
    sys.stdin = open(0, closefd=False)  # noqa: SIM115 - execnet closes it
    threading.Thread(target=watch, daemon=True).start()
    words = words[words[0] == "-u" :]
    try:
        if words[0] == "-c":
            sys.argv, sys.path[:0] = ["-c", *words[2:]], [""]
            sys.modules["__main__"] = main = ModuleType("__main__")
            exec(words[1], main.__dict__)
        elif words[0] == "-m":
            sys.argv = words[1:]
            runpy.run_module(words[1], run_name="__main__", alter_sys=True)
        else:
            sys.argv, sys.path[:0] = words, [os.path.dirname(os.path.abspath(words[0]))]
            runpy.run_path(words[0], run_name="__main__")
    finally:
        atexit._run_exitfuncs()


def main(path: str) -> None:
    """Serve requests at the socket `path`."""
    sys.path.insert(0, str(MEASURE))
    import server  # pyright: ignore[reportMissingImports]

    del sys.path[0]  # it has a module `statistics`
    # Where the compiler of CuTe DSL keeps files that it is asked to keep, in all forks: it reads this when it is imported. `stop` removes them.
    os.environ.setdefault("CUTE_DSL_DUMP_DIR", str(Path(path).parent))
    server.preload(
        server.OF_CELLS + server.OF_PROGRAMS
    )  # which also decides what torch's modules read when they are imported
    import smart_open  # noqa: F401 - Snakemake imports it when it reads its first file
    from snakemake.cli import get_argument_parser

    get_argument_parser()  # imports Snakemake's plugins
    for name in COLLECTED:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    own = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    elsewhere = [folder for folder in sys.path if folder not in own]

    def program(arguments: list[str], connection: socket.socket) -> int:
        """In the child: run a module as a program."""
        sys.path[:] = [*filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep)), *elsewhere]
        module, caller, *words = arguments
        if module == PYTHON:
            interpret(caller, words, connection)
        elif module == SERVER:
            sys.argv = words
            runpy.run_path(words[0], run_name="__main__")
        else:
            sys.argv, sys.executable = [module, *words], str(Path(path).with_name("python"))
            runpy.run_module(module, run_name="__main__", alter_sys=True)
        return 0

    def reap(children: set[int], _: set[int]) -> None:
        """Collect children that have ended; warm servers that they started live on."""
        with contextlib.suppress(ChildProcessError):
            while ended := os.waitpid(-1, os.WNOHANG)[0]:
                children.discard(ended)

    server.program, server.reap, server.IDLE_SECONDS = program, reap, 600  # `stop` ends it
    server.Harness.renew = lambda self: None  # children find the package elsewhere
    server.main(path)


if __name__ == "__main__":
    main(sys.argv[1])
