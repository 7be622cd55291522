"""Forks of this process that answer questions while it does other work, and end with the block that they were started for.

A child has all that this process had, so a question is small; its answer travels through a pipe. A thread in its place would wait for Python's lock.
"""

import contextlib
import pickle
import signal
import threading
import traceback
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from multiprocessing import Pipe, get_context
from multiprocessing.connection import Connection
from typing import Any, TypeVar

from moe_routing_kernels.errors import bad

Question = TypeVar("Question")
Answer = TypeVar("Answer")


@contextlib.contextmanager
def forked(
    answer: Callable[[Question], Answer], what: str
) -> Iterator[Callable[[Iterable[Question]], Future[list[Answer]]]]:
    """Start a child; yield a function that has it answer questions, each taken when the one before is answered.

    The future raises what `answer` raises, and `UserError` where the child dies, which `what` names. The end of the block kills the
    child, and with it what is still asked. Ctrl-C interrupts this process alone.
    """
    ours, theirs = Pipe()
    child = get_context("fork").Process(target=_serve, args=(answer, ours, theirs), daemon=True)
    with uninterrupted() as interrupts:
        child.start()
    with ours, ThreadPoolExecutor(1) as pool:
        try:
            theirs.close()
            for number in interrupts:
                signal.raise_signal(number)
            yield lambda questions: pool.submit(_answers, ours, what, questions)
        finally:
            child.kill()  # so that the thread reads the end of the pipe
            child.join()


def _answers(child: Connection, what: str, questions: Iterable[Any]) -> list[Any]:
    answers = []
    for question in questions:
        try:
            child.send(question)
            answer, error = child.recv()
        except (EOFError, OSError) as error:  # before the child's answer, or within it
            raise bad(what, "a death", "an answer", "is there memory?") from error
        if error is not None:
            raise error
        answers.append(answer)
    return answers


def _serve(answer: Callable[[Any], Any], theirs: Connection, ours: Connection) -> None:
    """In the child: answer until it is killed or the other process has ended."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    theirs.close()
    with contextlib.suppress(EOFError, OSError):
        while True:
            question = ours.recv()
            try:
                ours.send((answer(question), None))
            except Exception as error:
                ours.send((None, _sendable(error)))


def _sendable(error: Exception) -> Exception:
    """The error with its traceback as a note; one of its text where it cannot be copied to another process."""
    error.add_note(f"In a child:\n{traceback.format_exc()}")
    try:
        return pickle.loads(pickle.dumps(error))
    except Exception:  # an exception's own `__reduce__` and `__init__` run here, and may raise anything
        return RuntimeError(f"{type(error).__name__}: {error}")


@contextlib.contextmanager
def uninterrupted() -> Iterator[list[int]]:
    """Collect interrupts in place of raising them: Python swallows one that comes in what it runs around a fork, as `logging` has it do."""
    interrupts: list[int] = []
    if threading.current_thread() is not threading.main_thread():  # which alone is interrupted
        yield interrupts
        return
    before = signal.signal(signal.SIGINT, lambda number, _: interrupts.append(number))
    try:
        yield interrupts
    finally:
        signal.signal(signal.SIGINT, before)
