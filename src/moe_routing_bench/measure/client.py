"""``python -I -S client.py [--cold] OUT SPEC [PLATFORM]``: run a job on the warm server, starting it when there is none.
``client.py [--cold] --cli COMMAND ...`` does the same for a command of ``moe-routing-bench``, and with ``--running`` only
where a server runs already: it would take longer to start than a command that needs no torch.

Only small modules of the standard library: this is started for every cell. ``--cold`` (or MOE_ROUTING_BENCH_WORKER=cold)
runs the job in a process of its own instead.
"""

import fcntl
import hashlib
import json
import os
import socket
import subprocess
import sys
import tempfile
import time

HERE = os.path.dirname(os.path.abspath(__file__))
SERVER = os.path.join(HERE, "server.py")
START_SECONDS = 120
LONGEST_FOLDER = 107 - len("/0123456789abcdef.sock")  # of 108 bytes that Linux has for a socket's path, one ends it


def socket_path() -> str:
    """A socket of this user, interpreter, source tree and device, in a folder that only the user may enter."""
    name = f"moe-routing-bench-{os.getuid()}"
    folder = asked = os.path.join(tempfile.gettempdir(), name)
    if len(os.fsencode(folder)) > LONGEST_FOLDER:
        folder = os.path.join("/tmp", name)
    os.makedirs(folder, mode=0o700, exist_ok=True)
    server = os.stat(SERVER)
    key = [
        sys.executable,
        SERVER,
        asked,
        server.st_mtime_ns,
        os.environ.get("CUDA_VISIBLE_DEVICES"),
        os.environ.get("PYTHONPATH"),
    ]
    key.append(os.environ.get("OMP_NUM_THREADS"))
    return os.path.join(folder, hashlib.sha256(repr(key).encode()).hexdigest()[:16] + ".sock")


def connect(path: str) -> "socket.socket | None":
    """A connection to the server, or None when none listens."""
    connection = socket.socket(socket.AF_UNIX)
    try:
        connection.connect(path)
    except (FileNotFoundError, ConnectionRefusedError):
        connection.close()
        return None
    return connection


def connected(path: str) -> socket.socket:
    """A connection; under a lock, the server is started first when there is none."""
    if connection := connect(path):
        return connection
    with open(path + ".lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if connection := connect(path):
            return connection
        with open(path + ".log", "w") as log:
            server = subprocess.Popen(
                [sys.executable, "-P", SERVER, path],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        for _ in range(START_SECONDS * 50):
            time.sleep(0.02)
            if connection := connect(path):
                return connection
            if server.poll() is not None:
                break
    sys.exit(
        f"error: the warm server did not start: see {path}.log; hint: MOE_ROUTING_BENCH_WORKER=cold measures without it"
    )


def main(arguments: list) -> int:
    """Run the job and return its exit status."""
    cold = "--cold" in arguments or os.environ.get("MOE_ROUTING_BENCH_WORKER") == "cold"
    running = "--running" in arguments
    arguments = [a for a in arguments if a not in ("--cold", "--running")]
    connection = None if cold else connect(socket_path()) if running else connected(socket_path())
    if connection is None:
        command = arguments[:1] == ["--cli"]
        module = "moe_routing_bench.cli" if command else "moe_routing_bench.measure.supervisor"
        os.execv(sys.executable, [sys.executable, "-m", module, *arguments[command:]])
    request = {"arguments": arguments, "cwd": os.getcwd(), "env": dict(os.environ)}
    socket.send_fds(connection, [b"{"], [1, 2])
    connection.sendall(json.dumps(request)[1:].encode() + b"\n")
    reply = b""
    while part := connection.recv(64):
        reply += part
    if not reply.strip():
        print("error: the job was killed before it could answer", file=sys.stderr)
        return 1
    return int(reply)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
