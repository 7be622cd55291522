"""Two users of one machine with one GPU, as real processes of two user ids; the GPU is one in name alone."""

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from moe_routing_bench.config.expand import cell_of
from moe_routing_bench.grid.cell import Job, Settings
from moe_routing_bench.measure import client
from moe_routing_bench.store import cell_files, platforms
from signals import commands

ONE, OTHER = 12345, 12346
PACKAGE = Path(client.HERE).parent
QUICK = Settings(max_seconds=0.05, min_blocks=3, max_blocks=3, warmup_ms=1, interval_us=200)
JOB = Job(cell_of("permute", tokens=64, experts=8, top_k=2), ("torch",), QUICK)
# What is added to modules of the packages: a GPU, and an implementation that says whose it is and waits for the file `gate`.
ADDED = {
    "moe_routing_bench/store/platforms.py": "def uuid_of(gpu):\n    return 'card'\n",
    "moe_routing_bench/measure/gpus.py": "FOLDER = Path({folder!r})\n\n\ndef visible():\n    return ['0']\n",
    "moe_routing_kernels/permute/torch_permute.py": "import os\nimport time\nfrom pathlib import Path\n\nPath({folder!r}, f'at-work-{{os.getuid()}}').touch()\n"
    "while not Path({folder!r}, 'gate').exists():\n    time.sleep(0.02)\n",
}


def become(user: int) -> list[str]:
    """What precedes a command of another user; it may look into the folders that lead to this interpreter, such as root's own."""
    rights = ("--inh-caps", "+dac_read_search", "--ambient-caps", "+dac_read_search")
    return ["setpriv", "--reuid", str(user), "--regid", str(user), "--clear-groups", *rights]


@pytest.fixture
def shared() -> Iterator[Path]:
    """A folder like /tmp, with the package to run."""
    if os.getuid():
        pytest.skip("needs rights to become other users")
    if (
        not shutil.which("setpriv")
        or subprocess.run([*become(ONE), sys.executable, "-c", ""], capture_output=True).returncode
    ):
        pytest.skip("other users cannot run this Python here")
    with tempfile.TemporaryDirectory(prefix="mrb-", dir="/tmp", ignore_cleanup_errors=True) as name:
        folder = Path(name)
        folder.chmod(0o1777)
        shutil.copytree(PACKAGE.parent, folder / "src")  # compiled: neither user may write there
        for module, text in ADDED.items():
            with (folder / "src" / module).open("a") as file:
                file.write("\n\n" + text.format(folder=name))
        yield folder
        for process in processes(name):
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)


def processes(folder: str) -> list[int]:
    """Those whose command line names the folder: the clients, and the servers with their children."""
    return [pid for pid, command in commands() if folder in command]


def has_open(user: int, path: Path) -> bool:
    """Whether a process of a user has a file open."""
    for process in processes(str(path.parent)):
        with contextlib.suppress(OSError):
            entry = Path(f"/proc/{process}")
            if entry.stat().st_uid == user and str(path) in map(os.readlink, (entry / "fd").iterdir()):
                return True
    return False


def until(done: Callable[[], bool]) -> None:
    end = time.monotonic() + client.START_SECONDS
    while not done():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.05)


def start(user: int, folder: Path) -> subprocess.Popen:
    """A client of a user that measures a cell into the user's own folder."""
    home = folder / f"home-{user}"
    home.mkdir(mode=0o700)
    os.chown(home, user, user)
    measure = folder / "src" / PACKAGE.name / "measure/client.py"
    words = [*become(user), sys.executable, "-I", "-S", str(measure), str(home / "cell.parquet"), JOB.spec]
    environment = os.environ | {"TMPDIR": str(folder), "HOME": str(home), "PYTHONPATH": str(folder / "src")}
    return subprocess.Popen(words, cwd="/", env=environment, stdout=-1, stderr=-1, text=True)


def refused(user: int, action: Callable[[], object]) -> bool:
    """Whether a user, who has no more rights than users have, may not do something."""
    if (child := os.fork()) == 0:
        try:
            os.setgroups([])
            os.setgid(user)
            os.setuid(user)
            action()
        except PermissionError:
            os._exit(7)
        finally:
            os._exit(8)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7


@pytest.mark.slow
def test_two_users_share_one_gpu(shared: Path) -> None:
    """The second waits for as long as the first measures, and no longer; nobody enters, calls or reads the other's."""
    lock, gate = shared / "moe-routing-bench-card.lock", shared / "gate"
    at_work = {user: shared / f"at-work-{user}" for user in (ONE, OTHER)}
    first = start(ONE, shared)
    until(at_work[ONE].exists)
    second = start(OTHER, shared)
    until(lambda: has_open(OTHER, lock))
    time.sleep(2)  # forty times as long as it waits between two tries
    assert not at_work[OTHER].exists() and first.poll() is second.poll() is None

    for user, owner in ((OTHER, ONE), (ONE, OTHER)):
        folder = shared / f"moe-routing-bench-{owner}"
        (path,) = folder.glob("*.sock")
        for action in (folder.iterdir, lambda path=path: socket.socket(socket.AF_UNIX).connect(str(path))):
            assert refused(user, lambda action=action: list(action() or ()))
            assert not refused(owner, lambda action=action: list(action() or ()))

    gate.touch()
    for user, process in ((ONE, first), (OTHER, second)):
        out, error = process.communicate(timeout=client.START_SECONDS)
        assert process.returncode == 0, out + error
        file = shared / f"home-{user}" / "cell.parquet"
        assert file.stat().st_uid == user
        (row,) = cell_files.collect({file: JOB}, platforms.current()).to_pylist()
        assert (row["status"], row["worker_mode"], row["restarts"]) == ("ok", "warm", 0), row["reason"]
