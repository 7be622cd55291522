"""Forks that answer: what they answer, what they raise, and that they end, whatever ends the block or them."""

import multiprocessing
import os
import signal
import struct
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from moe_routing_bench import children
from moe_routing_kernels.errors import UserError
from signals import runs


@pytest.fixture(autouse=True)
def all_end():
    """Every child has ended, and every thread."""
    threads = threading.active_count()
    yield
    assert not multiprocessing.active_children() and threading.active_count() == threads


def test_another_process_answers_in_the_order_of_questions():
    """Answers are larger than a pipe holds; what is asked first is answered first."""
    here = os.getpid()

    def answer(n: int) -> tuple[int, bytes]:
        return os.getpid(), bytes([n]) * 2**23

    with children.forked(answer, "it") as ask:
        first, second = ask([1, 2]), ask(iter([3]))
        found = [*first.result(), *second.result()]
    assert [data for _, data in found] == [bytes([n]) * 2**23 for n in (1, 2, 3)]
    assert len({pid for pid, _ in found}) == 1 and here not in dict(found)


def test_a_question_is_taken_when_the_one_before_is_answered(tmp_path):
    """What another thread takes meanwhile is not asked."""
    left = iter(range(3))

    def answer(number):
        (tmp_path / f"{number}").touch()
        while number == 0 and not (tmp_path / "taken").exists():
            time.sleep(0.01)
        return number

    with children.forked(answer, "it") as ask:
        answers = ask(left)
        deadline = time.monotonic() + 60
        while not (tmp_path / "0").exists():
            assert time.monotonic() < deadline
            time.sleep(0.01)
        assert next(left) == 1
        (tmp_path / "taken").touch()
        assert answers.result() == [0, 2]


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_child_that_dies_is_one_line_with_its_name(number):
    with children.forked(lambda _: os.kill(os.getpid(), number), "the child of a test") as ask:
        for _ in range(2):
            with pytest.raises(UserError, match=r"^the child of a test: got 'a death'; .*is there memory"):
                ask([0]).result()


def test_a_child_that_dies_within_its_answer_is_one_line(monkeypatch):
    """Of 256 bytes that it announces it sends 4."""
    pipe = multiprocessing.Pipe()
    monkeypatch.setattr(children, "Pipe", lambda: pipe)

    def answer(_):
        os.write(pipe[1].fileno(), struct.pack("!i", 256) + b"four")
        os.kill(os.getpid(), signal.SIGKILL)

    with children.forked(answer, "it") as ask, pytest.raises(UserError, match="a death"):
        ask([0]).result()


class Unsendable(Exception):
    """Its copy would be made of other arguments."""

    def __init__(self, one: int, other: int) -> None:
        super().__init__(f"{one} of {other}")


@pytest.mark.parametrize(
    ("error", "kind", "text"),
    [
        (UserError("bad: got 1"), UserError, "bad: got 1"),
        (BrokenPipeError("of a file"), BrokenPipeError, "of a file"),
        (EOFError("of a file"), EOFError, "of a file"),
        (MemoryError("none"), MemoryError, "none"),
        (Unsendable(1, 2), RuntimeError, "Unsendable: 1 of 2"),
        (ValueError(lambda: 0), RuntimeError, "ValueError: <function"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Exception) else "",
)
def test_what_an_answer_raises_is_raised_here(error, kind, text, capfd):
    """Whether the error can be sent or not; the child goes on."""

    def answer(number):
        if number:
            raise error
        return number

    with children.forked(answer, "it") as ask:
        with pytest.raises(kind) as found:
            ask([0, 1, 0]).result()
        assert text in str(found.value) and type(found.value) is kind
        assert kind is RuntimeError or ", in answer" in found.value.__notes__[0]
        assert ask([0]).result() == [0]
    assert capfd.readouterr().err == ""


def test_an_answer_that_cannot_be_sent_is_an_error():
    with children.forked(lambda _: threading.Lock(), "it") as ask, pytest.raises(TypeError, match="pickle"):
        ask([0]).result()


def test_an_interrupt_leaves_the_child_at_work(capfd):
    """Also one that a thread has started, of which no handler of this process keeps an interrupt away."""

    def answer(number):
        os.kill(os.getpid(), signal.SIGINT)
        return number

    def work():
        with children.forked(answer, "it") as ask:
            found.extend(ask([1, 2]).result())

    found = []
    thread = threading.Thread(target=work)
    work()
    thread.start()
    thread.join(60)
    assert found == [1, 2, 1, 2] and capfd.readouterr().err == ""


@pytest.mark.parametrize("waiting", [False, True])
def test_an_interrupt_of_this_process_ends_the_child(waiting, tmp_path, capfd):
    """While this process works, or waits for the answer. A child that has begun is told by a file."""

    def answer(_):
        (tmp_path / "begun").touch()
        time.sleep(600)

    def interrupt():
        while not (tmp_path / "begun").exists():
            time.sleep(0.01)
        looks = 0
        while looks < 5:  # an interrupt just before the main thread sleeps would not wake it
            time.sleep(0.01)
            stat = Path(f"/proc/self/task/{os.getpid()}/stat").read_text()
            looks = looks + 1 if stat.rpartition(")")[2].split()[0] == "S" else 0
        os.kill(os.getpid(), signal.SIGINT)

    thread, asked = threading.Thread(target=interrupt), []

    def work():
        with children.forked(answer, "it") as ask:
            asked.append(ask([0]))
            thread.start()
            asked[0].result() if waiting else time.sleep(600)

    with pytest.raises(KeyboardInterrupt):
        work()
    thread.join()
    assert isinstance(asked[0].exception(), UserError)
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize("handler", [signal.default_int_handler, signal.SIG_IGN])
def test_an_interrupt_during_the_fork_comes_after_it(handler, monkeypatch, capfd):
    """Both processes have it; the other one's is raised, unless that ignores interrupts."""
    context = multiprocessing.get_context("fork")

    class Process(context.Process):
        def run(self):
            os.kill(os.getpid(), signal.SIGINT)
            super().run()

        def start(self):
            super().start()
            os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(children, "get_context", lambda _: SimpleNamespace(Process=Process))
    before, answers = signal.signal(signal.SIGINT, handler), []
    try:
        with children.forked(abs, "it") as ask:
            answers += ask([-1]).result()
    except KeyboardInterrupt:
        answers.append("interrupted")
    finally:
        assert signal.signal(signal.SIGINT, before) is handler
    assert answers == ["interrupted" if handler is signal.default_int_handler else 1]
    assert capfd.readouterr().err == ""


def test_an_error_of_the_block_ends_the_child():
    asked = []

    def work():
        with children.forked(time.sleep, "it") as ask:
            asked.extend([ask([600]), ask([600])])
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        work()
    assert all(isinstance(one.exception(), UserError) for one in asked)


def test_a_child_ends_after_a_process_that_is_killed():
    code = """
import os, signal
from moe_routing_bench.children import forked
with forked(lambda _: os.getpid(), "it") as ask:
    print(*ask([0]).result(), flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (-signal.SIGKILL, "")
    deadline = time.monotonic() + 60
    while runs(done.stdout.strip()):
        assert time.monotonic() < deadline
        time.sleep(0.01)
