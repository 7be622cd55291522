"""``python -I -S client.py [--cold] OUT SPEC [PLATFORM]``: run a job on the warm server, starting it when there is none.
``client.py [--cold] --module MODULE ...`` does the same for a module that is a program, such as the command line, and with
``--running`` only where a server runs already: it would take longer to start than a command that needs no torch.

``--cold`` (or MOE_ROUTING_BENCH_WORKER=cold) runs the job in a process of its own instead.

This is started for every cell, so it imports only small modules: `socket` (which wraps `_socket`), `json`, `contextlib`, `subprocess` and
`tempfile` together take twice as long as Python takes to start, and `hashlib` (which wraps `_blake2`) loads OpenSSL.
"""

import _socket
import fcntl
import os
import stat
import struct
import sys
import time
from _blake2 import blake2b
from _socket import socket

TYPE_CHECKING = False  # but for type checkers; `typing` is none of the small modules
if TYPE_CHECKING:
    import subprocess

HERE = os.path.dirname(os.path.abspath(__file__))
SERVER = os.path.join(HERE, "server.py")
START_SECONDS = 120
SILENT_SECONDS = 120  # a job that is at work, or waits for its GPU, gives a sign of life every second
LONGEST_FOLDER = 107 - len("/0123456789abcdef.sock")  # of 108 bytes that Linux has for a socket's path, one ends it
COLD = "hint: MOE_ROUTING_BENCH_WORKER=cold measures without it"
_VARIABLES = ("CUDA_VISIBLE_DEVICES", "PYTHONPATH", "OMP_NUM_THREADS", "SLURM_JOB_ID", "SLURM_STEP_ID")
_STATUS = ("Umask", "Uid", "Gid", "Groups", "NoNewPrivs", "CapEff", "Seccomp:", "Cpus_allowed:", "Mems_allowed:")
_NAMESPACES = ("cgroup", "ipc", "mnt", "net", "pid", "user", "uts")


def command(*arguments: str) -> list:
    """The command that runs this file."""
    return [sys.executable, "-I", "-S", os.path.abspath(__file__), *arguments]


def inherited() -> list:
    """What a process has from its parent and cannot be given from outside, or only in part: the pool of torch's
    threads is as large as the CPUs that were allowed when it was loaded."""
    texts = {}
    for name in ("status", "limits", "cgroup"):
        with open(f"/proc/self/{name}", encoding="utf-8", errors="replace") as file:
            texts[name] = file.read().splitlines()
    status = [line for line in texts["status"] if line.startswith(_STATUS)]
    namespaces = [os.readlink(f"/proc/self/ns/{name}") for name in _NAMESPACES]
    return [status, texts["limits"], texts["cgroup"], namespaces, os.getpriority(os.PRIO_PROCESS, 0)]


def temporary_folder() -> str:
    """What `tempfile.gettempdir` returns, without importing it where the first folder that it tries is one to write in."""
    first = os.path.abspath(next(filter(None, map(os.environ.get, ("TMPDIR", "TEMP", "TMP"))), "/tmp"))
    if "tempfile" not in sys.modules and os.path.isdir(first) and os.access(first, os.W_OK | os.X_OK):
        return first
    import tempfile

    return tempfile.gettempdir()


def own_folder() -> str:
    """The folder of the sockets, which no other user may enter; exits where it belongs to another user, or is a link."""
    name = f"moe-routing-bench-{os.getuid()}"
    folder = os.path.join(temporary_folder(), name)
    if len(os.fsencode(folder)) > LONGEST_FOLDER:
        folder = os.path.join("/tmp", name)
    try:
        os.mkdir(folder, 0o700)
    except FileExistsError:
        pass
    folder_stat = os.lstat(folder)
    if (folder_stat.st_mode, folder_stat.st_uid) != (stat.S_IFDIR | 0o700, os.getuid()):
        got = f"{stat.filemode(folder_stat.st_mode)} of user {folder_stat.st_uid}"
        sys.exit(f"error: {folder}: got {got}; allowed: a folder of mode 700 of user {os.getuid()}; {COLD}")
    return folder


def socket_path() -> str:
    """A socket of this user, interpreter, source tree, device and SLURM job, and of all that a server inherits."""
    key = [
        sys.executable,
        SERVER,
        os.stat(SERVER).st_mtime_ns,
        temporary_folder(),
        *map(os.environ.get, _VARIABLES),
        inherited(),
    ]
    return os.path.join(own_folder(), blake2b(repr(key).encode(), digest_size=8).hexdigest() + ".sock")


def connect(path: str) -> "socket | None":
    """A connection to the server, or None when none listens; exits where the server is another user's."""
    connection = socket(_socket.AF_UNIX)
    connection.setsockopt(_socket.SOL_SOCKET, _socket.SO_SNDTIMEO, struct.pack("ll", SILENT_SECONDS, 0))
    try:
        connection.connect(path)
    except (FileNotFoundError, ConnectionRefusedError):
        connection.close()
        return None
    _, user, _ = struct.unpack("3i", connection.getsockopt(_socket.SOL_SOCKET, _socket.SO_PEERCRED, 12))
    if user != os.getuid():
        sys.exit(f"error: {path}: got a server of user {user}; allowed: one of user {os.getuid()}; {COLD}")
    return connection


def private(path: str) -> int:
    """A file descriptor to write a file with that is no link."""
    return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)


def connected(path: str) -> socket:
    """A connection; where no server listens, the process that has the lock starts it first."""
    if connection := connect(path):
        return connection
    server, lock = None, private(path + ".lock")
    try:
        for _ in range(START_SECONDS * 50):
            if server is None and locked(lock) and not (connection := connect(path)):
                server = started(path)
            time.sleep(0 if connection else 0.02)
            if connection := connection or connect(path):
                return connection
            if server and server.poll() is not None:
                break
    finally:
        os.close(lock)
    sys.exit(f"error: the warm server did not start: see {path}.log; {COLD}")


def locked(lock: int) -> bool:
    """Whether this process has the lock now."""
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def started(path: str) -> "subprocess.Popen":
    """A server that will listen, in a session of its own; its output lies next to the socket."""
    import subprocess

    log = private(path + ".log")
    try:
        return subprocess.Popen(
            [sys.executable, "-P", SERVER, path],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
    finally:
        os.close(log)


def asked(connection: socket, arguments: list) -> int:
    """The exit status of the job, which ends the reply; what comes before it are signs of life."""
    connection.settimeout(SILENT_SECONDS)
    request = {"arguments": arguments, "cwd": os.getcwd(), "env": dict(os.environ)}
    # One line of Python's literals. The server looks at its first byte, with which go stdout and stderr.
    text = b" " * (arguments[:1] == ["--module"]) + ascii(request).encode() + b"\n"
    connection.sendmsg([text[:1]], [(_socket.SOL_SOCKET, _socket.SCM_RIGHTS, struct.pack("2i", 1, 2))])
    connection.sendall(text[1:])
    connection.settimeout(1)
    reply, silent = b"", 0
    while b"\n" not in reply:
        try:
            part = connection.recv(64)
        except TimeoutError:
            silent += 1  # in seconds that this process ran: it may have been stopped with its server
            if silent >= SILENT_SECONDS:
                raise
            continue
        if not part:
            break
        reply, silent = (reply + part).lstrip(b"."), 0
    answer, ended, _ = reply.partition(b"\n")  # a sign of life may come after it, from another thread
    if not ended:
        sys.exit("error: the job was killed before it could answer")
    return int(answer)


def main(arguments: list) -> int:
    """Run the job and return its exit status."""
    cold = "--cold" in arguments or os.environ.get("MOE_ROUTING_BENCH_WORKER") == "cold"
    running = "--running" in arguments
    arguments = [a for a in arguments if a not in ("--cold", "--running")]
    try:
        connection = None if cold else connect(socket_path()) if running else connected(socket_path())
        if connection is not None:
            return asked(connection, arguments)
    except (TimeoutError, BlockingIOError):
        sys.exit(f"error: the warm server has given no sign of life for {SILENT_SECONDS} s: is it stopped? {COLD}")
    except OSError as error:
        sys.exit(f"error: the warm server: {error}; {COLD}")
    program = arguments[1:] if arguments[:1] == ["--module"] else ["moe_routing_bench.measure.supervisor", *arguments]
    os.execv(sys.executable, [sys.executable, "-m", *program])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
