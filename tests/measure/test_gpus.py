"""Jobs share out the GPUs of a machine among themselves: processes of their own, on GPUs that nobody needs to have."""

import contextlib
import errno
import fcntl
import os
import select
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from moe_routing_bench.config.expand import cell_of
from moe_routing_bench.measure import gpus
from moe_routing_kernels.errors import UserError

HOLD = """
import os, pathlib, sys
from moe_routing_bench.measure import gpus
gpus.FOLDER = pathlib.Path(os.environ["TMPDIR"])
cards = 2 if sys.argv[1] == "both" else 1
with gpus.reserved(sys.argv[1] != "shared", sys.argv[2:], identify=lambda gpu: "card" + gpu.removeprefix("GPU-"), cards=cards) as gpu:
    assert gpu == os.environ["CUDA_VISIBLE_DEVICES"]
    print(gpu, flush=True)
    sys.stdin.read()
"""
Job = subprocess.Popen


@pytest.fixture
def start(tmp_path, monkeypatch) -> Iterator[Callable[..., Job]]:
    """Start a job that holds what it gets until `end`; lock files are the test's own."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    with contextlib.ExitStack() as stack:

        def job(how: str, *names: str) -> Job:
            process = Job([sys.executable, "-c", HOLD, how, *names], stdin=-1, stdout=-1, text=True)
            stack.callback(process.wait)
            stack.callback(process.kill)
            return process

        yield job


def got(job: Job) -> str:
    """The GPU of a job, when it has one."""
    assert job.stdout is not None
    return job.stdout.readline().strip()


def waits(job: Job) -> bool:
    """Whether a job still has no GPU after a while."""
    return not select.select([job.stdout], [], [], 10 * gpus.POLL_SECONDS)[0]


def end(job: Job) -> None:
    job.communicate("")
    assert job.returncode == 0


def test_sharers_spread_over_the_gpus(start) -> None:
    """The fifth of five goes where one has left."""
    jobs = [start("shared", "0", "1")]
    first = got(jobs[0])
    for expected in ({"0": "1", "1": "0"}[first], "0", "1"):
        jobs.append(start("shared", "0", "1"))
        assert got(jobs[-1]) == expected
    end(jobs[1])
    assert got(start("shared", "0", "1")) == {"0": "1", "1": "0"}[first]


def test_who_is_alone_waits_for_a_gpu_without_others_and_keeps_them_off(start) -> None:
    """Also when the one before it is killed; sharers go to the GPU that is left."""
    sharer = start("shared", "0")
    assert got(sharer) == "0"
    alone = start("alone", "0", "1")
    assert got(alone) == "1"
    second, third = start("alone", "0", "1"), start("shared", "1")
    assert waits(second) and waits(third)
    end(sharer)
    assert got(second) == "0" and waits(third)
    alone.kill()
    assert got(third) == "1"


def test_ranks_get_a_card_each_or_hold_none(start) -> None:
    """While one of two cards is taken, the other stays free for those that one is enough for."""
    first = start("alone", "0", "1")
    held = got(first)
    ranks = start("both", "0", "1")
    assert waits(ranks)
    second = start("alone", "0", "1")
    assert got(second) == {"0": "1", "1": "0"}[held]
    end(first)
    assert waits(ranks)
    end(second)
    assert got(ranks) == "0,1"
    assert waits(start("shared", "1"))


def test_without_gpus_nobody_waits() -> None:
    """On a CPU, twice at a time."""
    with gpus.reserved(True, []) as one, gpus.reserved(True, []) as other:
        assert one is other is None


def test_a_family_of_cells_stays_on_its_card():
    """Whatever the cards' order and numbers; a card that goes moves its own families alone, and comes back to them."""
    families = [f"pack-H{hidden}-E{experts}-k2" for hidden in range(1024, 9216, 512) for experts in (8, 64, 128, 256)]
    cards = ["a", "b", "c", "d"]

    def places(some):
        return {family: gpus.card_of(family, some, identify=str) for family in families}

    every = places(cards)
    assert places(cards[::-1]) == every and set(every.values()) == set(cards)
    without = places(["a", "b", "d"])
    assert all(without[family] == card for family, card in every.items() if card != "c")
    renumbered = {"0": "d", "1": "c", "2": "b", "3": "a"}
    assert all(
        renumbered[gpus.card_of(family, list(renumbered), identify=renumbered.__getitem__)] == card
        for family, card in every.items()
    )


def test_cells_that_are_compared_are_of_one_family():
    """Of other tokens, skew or capacity, one bench and one model or shape: one card."""
    sweep = [
        cell_of("pack", hidden=64, experts=8, top_k=2, tokens=tokens, skew=skew, capacity_factor=factor)
        for tokens in (64, 128)
        for skew in (0, 0.5)
        for factor in (None, 1.25)
    ]
    assert {cell.family for cell in sweep} == {"pack-H64-E8-k2"}
    assert cell_of("pack", hidden=128, experts=8, top_k=2, tokens=64).family == "pack-H128-E8-k2"
    assert cell_of("gate", experts=8, top_k=2, tokens=64).family == "gate-E8-k2"


def test_a_job_waits_for_its_family_s_card(start, monkeypatch):
    """Though another card is free."""
    first = gpus.card_of("f", ["GPU-x", "GPU-y"], identify=str)
    monkeypatch.setattr(gpus, "FOLDER", Path(os.environ["TMPDIR"]))
    holder = start("alone", first)
    assert got(holder) == first
    taken, waited = [], []
    monkeypatch.setattr(
        gpus.time, "sleep", lambda seconds: (taken.append(seconds), end(holder) if len(taken) == 3 else None)
    )
    identify = {"GPU-x": "cardx", "GPU-y": "cardy"}.__getitem__
    with gpus.reserved(True, [first], waiting=lambda: waited.append(1), identify=identify) as gpu:
        assert gpu == first and len(taken) == len(waited) >= 3
    monkeypatch.setattr(gpus, "card_of", lambda family, names, known: first if known == identify else None)
    with gpus.reserved(True, ["GPU-x", "GPU-y"], family="f", identify=identify) as gpu:
        assert gpu == first


def test_a_family_on_several_cards_has_all_of_them(tmp_path, monkeypatch):
    monkeypatch.setattr(gpus, "FOLDER", tmp_path)
    how = {"family": "f", "identify": str, "cards": 2, "waiting": lambda: pytest.fail("both are free")}
    with gpus.reserved(True, ["GPU-x", "GPU-y"], **how) as taken:
        assert taken == "GPU-x,GPU-y"


@pytest.mark.fault("GPU lock")
def test_all_users_lock_the_same_file_of_a_card(tmp_path, monkeypatch, start) -> None:
    """Whatever the name by which they call it; in a sticky folder nobody may open another's file as if to make it."""
    tmp_path.chmod(0o1777)
    for parent in tmp_path.parents:
        if parent.stat().st_mode & 0o777 == 0o700:
            parent.chmod(0o755)
    monkeypatch.setattr(gpus, "FOLDER", tmp_path)
    old = os.umask(0o077)
    path = gpus.lock_file("card0")
    mine = gpus.opened(path)
    assert os.umask(old) == 0o077 and path.stat().st_mode & 0o777 == 0o666
    os.close(mine)
    if os.getuid():
        pytest.skip("needs rights to become another user")
    holder = start("alone", "0")
    assert got(holder) == "0"
    if (child := os.fork()) == 0:
        try:
            os.setuid(12345)
            os._exit(7 if gpus._take({"0": gpus.opened(path)}, False, 1) is None else 8)
        finally:
            os._exit(9)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    assert waits(start("shared", "GPU-0")) and got(start("alone", "GPU-1")) == "GPU-1"


@pytest.mark.fault("GPU lock")
@pytest.mark.parametrize(
    ("make", "hint"),
    [
        (lambda path: path.symlink_to("precious"), os.strerror(errno.ELOOP)),
        (Path.mkdir, os.strerror(errno.EISDIR)),
        (os.mkfifo, "remove it"),
    ],
    ids=["link", "folder", "pipe"],
)
def test_a_lock_that_is_no_file_is_refused(make, hint, tmp_path, monkeypatch) -> None:
    """And nothing is written to where a link leads."""
    (tmp_path / "precious").write_text("text")
    monkeypatch.setattr(gpus, "FOLDER", tmp_path)
    make(gpus.lock_file("card0"))
    with (
        pytest.raises(UserError, match=rf"lock of a GPU: got .*card0.lock'; allowed: a file .*; hint: {hint}"),
        gpus.reserved(True, ["0"], identify=lambda gpu: "card0"),
    ):
        pass
    assert (tmp_path / "precious").read_text() == "text"


def test_a_lock_file_that_another_makes_first_is_taken(tmp_path, monkeypatch) -> None:
    """Between the look and the making."""
    path, opens, made = tmp_path / "lock", os.open, []

    def slow(name, flags, *mode):
        if flags & os.O_EXCL:
            made.append(name)
            os.close(opens(name, flags, *mode))
        return opens(name, flags, *mode)

    monkeypatch.setattr(os, "open", slow)
    os.close(gpus.opened(path))
    assert made == [path]


def locked(path) -> set[int]:
    """The bytes of a lock file that others cannot have, as another process sees them."""
    receive, send = os.pipe()
    child = os.fork()
    if child == 0:
        with open(path, "a") as file:
            for place in range(gpus.MOST_SHARERS + 2):
                try:
                    fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, place)
                except OSError:
                    os.write(send, bytes([place]))
        os._exit(0)
    os.close(send)
    with os.fdopen(receive, "rb") as found:
        seen = set(found.read())
    os.waitpid(child, 0)
    return seen


@pytest.fixture
def files(tmp_path):
    with contextlib.ExitStack() as stack:
        yield {name: stack.enter_context(open(tmp_path / name, "a")).fileno() for name in "ab"}


@pytest.fixture
def others(files, tmp_path):
    """Have another process lock bytes of a file."""
    with contextlib.ExitStack() as stack:

        def lock(name: str, *places: int) -> None:
            (ready, done), (wait, release) = os.pipe(), os.pipe()
            child = os.fork()
            if child == 0:
                os.close(release)
                with open(tmp_path / name, "a") as file:
                    for place in places:
                        fcntl.lockf(file, fcntl.LOCK_EX, 1, place)
                    os.write(done, b"x")
                    os.read(wait, 1)
                os._exit(0)
            os.read(ready, 1)
            stack.callback(os.waitpid, child, 0)
            stack.callback(os.close, release)
            stack.callback(os.close, wait)

        yield lock


@pytest.mark.parametrize(
    ("held", "alone", "gpu", "bytes_"),
    [
        ({}, True, "a", range(64)),
        ({}, False, "a", [0]),
        ({"a": [0]}, False, "b", [0]),  # the fewest sharers
        ({"a": [0], "b": [0]}, False, "a", [0, 1]),
        ({"a": [0, 1], "b": [0]}, False, "b", [0, 1]),
        ({"a": [63]}, True, "b", range(64)),
        ({"a": [0], "b": [63]}, True, None, []),
        ({"a": [64]}, True, "a", range(65)),
    ],
)
def test_bytes_of_a_lock_file(held, alone, gpu, bytes_, files, others, tmp_path) -> None:
    """Whoever shares holds one, whoever is alone all of them."""
    for name, places in held.items():
        others(name, *places)
    assert gpus._take(files, alone, 1) == gpu
    assert gpu is None or locked(tmp_path / gpu) == set(bytes_)


def test_a_lock_that_is_refused_is_another_s(files, monkeypatch, tmp_path) -> None:
    """Systems say so with either error."""
    errors, lockf = iter([PermissionError, BlockingIOError]), fcntl.lockf

    def refuse(*given):
        if error := next(errors, None):
            raise error
        lockf(*given)

    monkeypatch.setattr(gpus.fcntl, "lockf", refuse)
    assert gpus._take(files, False, 1) == "a" and locked(tmp_path / "a") == {1}
