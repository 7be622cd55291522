"""What becomes of every implementation, whatever its worker does: workers that follow a script, in processes of their own."""

import contextlib
import gc
import inspect
import os
import re
import signal
import socket
import subprocess
import sys
import time
from datetime import datetime
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from types import SimpleNamespace

import pytest

from moe_routing_bench.config.expand import cell_of
from moe_routing_bench.grid.cell import Job, Settings
from moe_routing_bench.measure import (
    completion,
    gpus,
    interruptions,
    processes,
    provenance,
    server,
    supervisor,
    worker,
    worker_process,
)
from moe_routing_bench.store import platforms
from moe_routing_kernels.errors import UserError

CELL = cell_of("pack", tokens=8, hidden=8, experts=4, top_k=2, dtype="fp32")
NAMES = ("torch", "torch_compile", "triton")


def job(*names: str, timeout: float = 20) -> Job:
    return Job(CELL, names or NAMES, Settings(timeout=timeout))


def row(name: str) -> dict[str, object]:
    return {"status": "incorrect", "reason": f"{name} ran"}


@pytest.fixture
def scripted(monkeypatch):
    """Workers do what `script(names, send)` does; nothing is unsupported, and a worker has long to end."""
    monkeypatch.setattr(platforms, "missing", lambda *_: None)
    monkeypatch.setattr(platforms, "current", lambda: platforms.CPU)
    monkeypatch.setattr(supervisor, "_GRACE_SECONDS", 20.0)

    def set_script(script) -> None:
        def run(known, device, names, send, audit, kept):
            assert isinstance(known, Job) and device == "cpu"
            script(names, send, *[audit] * (len(inspect.signature(script).parameters) > 2))

        monkeypatch.setattr(worker, "run", run)

    return set_script


def outcomes(scripted, script, *names: str, timeout: float = 20, **given) -> dict[str, tuple[str, str, int]]:
    """Status, reason and restarts of every row."""
    scripted(script)
    rows = supervisor.measure(job(*names, timeout=timeout), **given)
    assert [one["implementation"] for one in rows] == list(names or NAMES)
    return {one["implementation"]: (one["status"], one["reason"], one["restarts"]) for one in rows}


def test_the_log_of_a_cell_says_where_its_seconds_went(scripted, tmp_path, capfd) -> None:
    """Each step and part of a step has its seconds, in one line, where there is a file; on a terminal not."""

    def script(names, send):
        send(("at", None, "inputs"))
        send(("at", "torch", "preparing"))
        send(("within", "torch", "binding"))
        time.sleep(0.05)
        send(("rows", {"torch": row("torch")}))

    scripted(script)
    supervisor.measure(job("torch"))
    assert "seconds" not in capfd.readouterr().err
    supervisor.measure(job("torch"), tmp_path / "a.parquet")
    (line,) = capfd.readouterr().err.splitlines()
    assert line.startswith("seconds: ") and float(line.rpartition("torch: binding ")[2]) >= 0.05


def test_ceilings_are_kept_for_later_cells_before_an_implementation_begins(scripted) -> None:
    """Later ones could be an implementation's, as could what it wrote to the memory itself."""
    memory = server.Memory()

    def script(names, send):
        send(("at", None, "calibration"))
        send(("ceilings", {"at": "now"}))
        send(("at", "torch", "preparing"))
        send(("ceilings", {"at": "never"}))
        memory.keep("ceilings of 1 CPU threads", {"at": "never"})
        send(("rows", {"torch": row("torch")}))

    scripted(script)
    supervisor.measure(job("torch"), memory=memory)
    memory.learn()
    assert memory.get("ceilings of 1 CPU threads") == {"at": "now"}
    assert memory.get("ceilings of 2 CPU threads") is None


def test_one_worker_measures_all(scripted) -> None:
    """Rows in the order that was asked for, with who measured them and when; nothing was restarted."""

    def script(names, send):
        assert names == list(NAMES)
        send(("at", None, "inputs"))
        send(("failed", "torch_compile", "unsupported", "no compiler"))
        send(("rows", {name: row(name) for name in ("triton", "torch")}))

    assert outcomes(scripted, script) == {
        "torch": ("incorrect", "torch ran", 0),
        "torch_compile": ("unsupported", "no compiler", 0),
        "triton": ("incorrect", "triton ran", 0),
    }
    scripted(lambda names, send: send(("rows", {"torch": row("torch")})))
    (one,) = supervisor.measure(job("torch"), mode="warm")
    assert (one["worker_mode"], one["platform"], one["bench"]) == ("warm", "cpu", "pack")
    assert supervisor.measure(job("torch"))[0]["worker_mode"] == "cold"
    started, ended = (datetime.fromisoformat(one[name]) for name in ("started_at", "ended_at"))
    assert started.utcoffset().total_seconds() == ended.utcoffset().total_seconds() == 0 and started <= ended


def test_what_is_missing_is_not_measured(scripted, monkeypatch) -> None:
    """It is not asked of the worker, and without any other there is no worker and no GPU waited for in vain."""
    scripted(lambda names, send: send(("rows", {name: row(",".join(names)) for name in names})))
    asked = []

    def missing(requires, platform, peer):
        asked.append((requires, platform, peer))
        return "needs more" if "triton" in requires else None

    monkeypatch.setattr(platforms, "missing", missing)
    rows = {one["implementation"]: one for one in supervisor.measure(job())}
    assert (rows["triton"]["status"], rows["triton"]["reason"]) == ("unsupported", "needs more")
    assert rows["torch"]["reason"] == "torch,torch_compile ran" and rows["torch"]["restarts"] == 0
    bench = supervisor.bench_of(job())
    assert asked == [(bench[name].requires, "cpu", bench[name].peer) for name in NAMES]
    scripted(lambda names, send: os._exit(1))
    assert [one["restarts"] for one in supervisor.measure(job("triton"))] == [0]


def test_what_needs_somebody_else_s_package_is_asked_for_it(scripted, monkeypatch) -> None:
    monkeypatch.setattr(platforms, "missing", lambda requires, platform, peer: f"no {peer.distribution}")
    cell = cell_of("gate", tokens=8, experts=4, top_k=2, dtype="fp32")
    (one,) = supervisor.measure(Job(cell, ("quack",), Settings()))
    assert (one["status"], one["reason"]) == ("unsupported", "no quack-kernels")


def test_a_gpu_of_its_family_is_reserved_alone(scripted, monkeypatch) -> None:
    """While its workers run."""
    seen = []

    @contextlib.contextmanager
    def reserved(**given):
        seen.append(given)
        yield
        seen.append("given back")

    monkeypatch.setattr(gpus, "reserved", reserved)
    monkeypatch.setattr(supervisor, "_attempt", lambda *given: seen.append(given) or {"torch": row("torch")})
    monkeypatch.setattr(platforms, "current", lambda: "nvidia-h200")
    one = job("torch")
    assert supervisor.measure(one, watch="watch")[0]["platform"] == "nvidia-h200"
    caller = seen[1][-1]
    assert caller.watch == "watch"
    assert seen == [
        {"alone": True, "family": "pack-H8-E4-k2", "waiting": caller.told, "cards": 1},
        (one, "cuda", ["torch"], caller),
        "given back",
    ]
    assert CELL.family == "pack-H8-E4-k2"


def dies(signal_number: int):
    """A worker that is killed while it is at the second of its names, in every life; the first has failed before."""

    def script(names, send):
        send(("at", names[0], "binding"))
        if len(names) > 1:
            send(("failed", names[0], "incorrect", "wrong"))
            send(("at", names[1], "sampling"))
        os.kill(os.getpid(), signal_number)

    return script


def test_who_was_at_work_is_blamed_for_a_crash(scripted) -> None:
    """The others start again: two more lives, the last of which dies at its only one."""
    assert outcomes(scripted, dies(signal.SIGTERM)) == {
        "torch": ("incorrect", "wrong", 1),
        "torch_compile": ("crashed", "sampling: worker was killed by signal SIGTERM", 1),
        "triton": ("crashed", "binding: worker was killed by signal SIGTERM", 1),
    }


def throw(error: BaseException):
    raise error


@pytest.mark.parametrize(
    ("end", "manner"),
    [
        (lambda: os._exit(4), "exited with status 4"),
        (
            lambda: throw(RuntimeError("boom")),
            r"exited with status 1: RuntimeError: boom \(.*test_supervisor\.py:\d+\)",
        ),
        (lambda: throw(SystemExit(3)), "exited with status 3"),
        (lambda: throw(SystemExit()), "exited with status 0"),
        (lambda: throw(SystemExit("a text \udcff")), "exited with status 1"),
        (lambda: throw(SystemExit(256 + 5)), "exited with status 5"),
        (
            lambda: throw(RuntimeError("\udcff")),
            r"exited with status 1: RuntimeError: \\udcff \(.*test_supervisor\.py:\d+\)",
        ),
        (lambda: os.kill(os.getpid(), signal.SIGKILL), "was killed by signal SIGKILL"),
    ],
)
def test_without_a_word_all_are_blamed(end, manner, scripted) -> None:
    """Otherwise it would start again for ever."""
    found = outcomes(scripted, lambda names, send: end())
    assert list(found) == list(NAMES)
    for status, reason, restarts in found.values():
        assert (status, restarts) == ("crashed", 0) and re.fullmatch(f"starting: worker {manner}", reason)


def test_what_a_worker_has_started_ends_with_it(scripted, tmp_path) -> None:
    """Also in a session of its own, where a signal to the worker's group does not reach it, and though the worker could not end it."""
    told = tmp_path / "pid"

    def script(names, send) -> None:
        other = subprocess.Popen(["sleep", "60"], start_new_session=True)
        told.write_text(str(other.pid))
        send(("at", "torch", "timing"))
        os._exit(3)

    assert outcomes(scripted, script, "torch")["torch"][0] == "crashed"
    assert not processes.running({int(told.read_text())})


def test_a_crash_between_implementations_is_nobody_s_fault(scripted) -> None:
    """As long as something was settled; the next worker goes on with what is left."""

    def script(names, send):
        send(("at", names[0], "binding"))
        send(("failed", names[0], "incorrect", f"{len(names)} left"))
        send(("at", None, "calibration"))
        raise SystemExit(3)

    assert outcomes(scripted, script) == {
        "torch": ("incorrect", "3 left", 2),
        "torch_compile": ("incorrect", "2 left", 2),
        "triton": ("incorrect", "1 left", 2),
    }


@pytest.mark.parametrize("found_out", [True, False])
def test_who_harms_others_is_looked_for(found_out, scripted) -> None:
    """By the next worker, which looks after every step; where it cannot tell either, who is at work then is out."""

    def script(names, send, audit):
        send(("at", "torch", "sampling"))
        if audit and found_out:
            send(("failed", "triton", "incorrect", "inputs were changed"))
            return send(("rows", {name: row(name) for name in names if name != "triton"}))
        if "torch" not in names:
            return send(("rows", {name: row(name) for name in names}))
        send(("tainted", "inputs were changed"))
        raise SystemExit(3)

    found = outcomes(scripted, script)
    if found_out:
        assert found["triton"] == ("incorrect", "inputs were changed", 1) and found["torch"][1] == "torch ran"
    else:
        assert found["torch"] == ("crashed", "sampling: worker exited with status 3", 2)
        assert found["triton"] == ("incorrect", "triton ran", 2)


def test_who_has_failed_is_not_blamed_again(scripted) -> None:
    """A broken context ends the worker right after the report."""

    def script(names, send):
        send(("at", "torch", "sampling"))
        if "torch" in names:
            send(("failed", "torch", "crashed", "sampling: CUDA error"))
            os._exit(3)
        send(("rows", {name: row(name) for name in names}))

    found = outcomes(scripted, script)
    assert found["torch"] == ("crashed", "sampling: CUDA error", 1)
    assert found["triton"] == ("incorrect", "triton ran", 1)


def test_half_a_message_is_a_crash(scripted) -> None:
    def script(names, send):
        send(("at", "triton", "checking"))
        os.write(send.__self__.fileno(), b"\x00\x00\x00\x20half")
        os._exit(0)

    found = outcomes(scripted, script, "triton")
    assert found == {"triton": ("crashed", "checking: worker exited with status 0", 0)}


@pytest.fixture
def since_a_word(scripted, monkeypatch):
    """A clock that stands still until a worker has said where it is, and then passes a second at each look: on a busy machine a worker
    may begin late."""
    heard, now, following, attempt = [], [0.0], supervisor._next, supervisor._attempt

    def hear(receive):
        message = following(receive)
        heard.extend([message] if message and message[0] == "at" else [])
        return message

    def clocks() -> tuple[float, float, float]:
        now[0] += bool(heard)
        return now[0], now[0], 0.0

    monkeypatch.setattr(supervisor, "_next", hear)
    monkeypatch.setattr(supervisor, "_attempt", lambda *given, **named: heard.clear() or attempt(*given, **named))
    monkeypatch.setattr(interruptions, "_clocks", clocks)
    return scripted


@pytest.mark.parametrize(
    ("at", "blamed"), [("torch_compile", {"torch_compile"}), (None, set(NAMES)), ("nobody", set(NAMES))]
)
def test_a_worker_that_is_silent_is_killed(at, blamed, since_a_word, tmp_path) -> None:
    """And what it started with it; who it was at is blamed, or all where nothing is settled."""
    alive, gone = os.pipe()

    def script(names, send):
        if at == "torch_compile" and at not in names:
            return send(("rows", {name: row(name) for name in names}))
        send(("at", at, "warming up"))
        os.close(alive)
        if os.fork() == 0:
            time.sleep(60)
        time.sleep(60)

    found = outcomes(since_a_word, script, timeout=0.3)
    assert {name for name, (status, *_) in found.items() if status == "timeout"} == blamed
    assert all(found[name][1].startswith("warming up: no word for 0.3 s; `measure --timeout`") for name in blamed)
    os.close(gone)
    assert os.read(alive, 1) == b"", "nobody is left who holds the other end"
    os.close(alive)


def test_a_second_without_a_word_is_none_too_long(scripted, monkeypatch) -> None:
    """The worker is looked after, and goes on, though one more would be."""
    asked, wait = [], supervisor.wait
    monkeypatch.setattr(interruptions, "_clocks", lambda: (0.0, 0.0, 0.0))

    def quiet(on, timeout):
        asked.append(timeout)
        return wait(on, timeout=timeout) if len(asked) > 1 else []

    monkeypatch.setattr(supervisor, "wait", quiet)
    monkeypatch.setattr(supervisor, "_ended", lambda child: asked.append("looked after") or False)
    found = outcomes(scripted, lambda names, send: send(("rows", {name: row(name) for name in names})), timeout=2)
    assert set(found.values()) == {("incorrect", f"{name} ran", 0) for name in NAMES}
    assert asked == [1, "looked after", 1]


def test_what_a_worker_sends_last_counts(scripted, monkeypatch) -> None:
    """Also when it sends its rows and ends after nothing was heard for a second, before the supervisor looks after it."""
    quiet, wait, ended = [[]], supervisor.wait, supervisor._ended

    def after_it_has_ended(child: int) -> bool:
        os.waitid(os.P_PID, child, os.WEXITED | os.WNOWAIT)
        return ended(child)

    monkeypatch.setattr(supervisor, "wait", lambda on, timeout: quiet.pop() if quiet else wait(on, timeout=timeout))
    monkeypatch.setattr(supervisor, "_ended", after_it_has_ended)
    found = outcomes(scripted, lambda names, send: send(("rows", {name: row(name) for name in names})))
    assert set(found.values()) == {("incorrect", f"{name} ran", 0) for name in NAMES}


def test_a_silent_worker_may_have_settled_some(since_a_word, monkeypatch) -> None:
    """Then nobody is blamed for a step that is nobody's; the others are measured again. It has no moment to end by itself."""
    graces, end = [], supervisor._end
    monkeypatch.setattr(supervisor, "_end", lambda child, seconds: graces.append(seconds) or end(child, seconds))

    def script(names, send):
        if len(names) == 3:
            send(("failed", "torch", "incorrect", "wrong"))
            send(("at", None, "calibration"))
            time.sleep(60)
        send(("rows", {name: row(name) for name in names}))

    found = outcomes(since_a_word, script, timeout=0.3)
    assert found == {
        "torch": ("incorrect", "wrong", 1),
        "torch_compile": ("incorrect", "torch_compile ran", 1),
        "triton": ("incorrect", "triton ran", 1),
    }
    assert graces == [0, 20.0]


def test_nobody_waits_any_more(scripted) -> None:
    """When the caller is gone the worker is killed, and the job ends as one that was interrupted."""
    alive, gone = os.pipe()

    def script(names, send):
        os.close(alive)
        send(("at", "torch", "sampling"))
        time.sleep(60)

    scripted(script)
    here, there = socket.socketpair()
    there.close()
    with here, pytest.raises(SystemExit) as end:
        supervisor.measure(job(), watch=here)
    assert end.value.code == 130
    os.close(gone)
    assert os.read(alive, 1) == b""
    os.close(alive)


def test_a_caller_has_a_sign_of_life_every_second(monkeypatch) -> None:
    """Also while the job waits for its GPU; when nobody is there to take it, the job ends."""
    now = [0.0]
    monkeypatch.setattr(supervisor, "time", SimpleNamespace(monotonic=lambda: now[0]))
    here, there = socket.socketpair()
    with here, there:
        caller = supervisor._Caller(here)
        for now[0] in (0.5, 1.0, 1.9, 2.0):
            caller.told()
        assert there.recv(9) == b".."
        there.close()
        now[0] = 3.0
        with pytest.raises(SystemExit) as end:
            caller.told()
        assert end.value.code == 130
    supervisor._Caller(None).told()


def test_a_caller_that_still_waits_changes_nothing(scripted) -> None:
    here, there = socket.socketpair()
    with here, there:
        found = outcomes(scripted, lambda names, send: send(("rows", {name: row(name) for name in names})), watch=here)
    assert {status for status, *_ in found.values()} == {"incorrect"}


def test_a_worker_has_a_moment_to_end(monkeypatch) -> None:
    """Two seconds, and its own status."""
    child = os.fork()
    if child == 0:
        time.sleep(0.1)
        os._exit(5)
    assert os.WEXITSTATUS(supervisor._end(child, 2.0)) == 5
    now, slept = [0.0], []
    monkeypatch.setattr(supervisor, "time", SimpleNamespace(monotonic=lambda: now[0], sleep=slept.append))
    child = os.fork()
    if child == 0:
        time.sleep(60)
    asked, waitpid = [], os.waitpid

    def wait(pid, options):
        asked.append((pid, options))
        now[0] += 0.5
        return waitpid(pid, options)

    monkeypatch.setattr(os, "waitpid", wait)
    assert os.WTERMSIG(supervisor._end(child, 2.0)) == signal.SIGKILL
    assert asked == [(child, os.WNOHANG)] * 4 + [(child, 0)] and slept == [0.002] * 4


@pytest.mark.parametrize("refusal", [ProcessLookupError, PermissionError])
def test_a_worker_that_is_gone_before_it_is_killed(refusal, monkeypatch) -> None:
    """It leads no group yet, or no more; and it may end between the two signals."""
    kill, sent = os.kill, []

    def refuse(group, number):
        sent.append(("group", group, number))
        raise refusal

    def late(pid, number):
        sent.append(("process", pid, number))
        kill(pid, number)
        raise ProcessLookupError

    monkeypatch.setattr(supervisor, "time", SimpleNamespace(monotonic=iter([0.0, 3.0]).__next__, sleep=None))
    child = os.fork()
    if child == 0:
        time.sleep(60)
    with monkeypatch.context() as one:
        one.setattr(os, "killpg", refuse)
        one.setattr(os, "kill", late)
        try:
            status = supervisor._end(child, 2.0)
        finally:
            with contextlib.suppress(ProcessLookupError, ChildProcessError):
                kill(child, signal.SIGKILL)
                os.waitpid(child, 0)
    assert os.WTERMSIG(status) == signal.SIGKILL
    assert sent == [("group", child, signal.SIGKILL), ("process", child, signal.SIGKILL)]


def given(environment: dict[str, str]) -> Connection:
    """What a worker is asked."""
    asked, ask = Pipe(duplex=False)
    with ask:
        ask.send((environment, "job", "device", ["torch"], False))
    return asked


@pytest.mark.parametrize(
    ("end", "code"),
    [
        (None, 0),
        (SystemExit(3), 3),
        (SystemExit(), 0),
        (SystemExit("text"), 1),
        (RuntimeError("boom"), 1),
        (KeyboardInterrupt(), 1),
    ],
)
def test_a_worker_never_returns(end, code, monkeypatch, capsys) -> None:
    """It leads a group of its own, starts no pool of processes, collects no garbage of what it has imported, and says what it died of."""
    said = []

    def run(*given):
        said.append((*given, gc.isenabled(), gc.get_freeze_count() > 0))
        if end:
            raise end

    class Exited(BaseException):
        pass

    def leave(status):
        said.append(status)
        raise Exited

    monkeypatch.setattr(worker, "run", run)
    monkeypatch.setattr(os, "setpgid", lambda *given: said.append(given))
    monkeypatch.setattr(processes, "end_with", lambda parent: said.append(("ends with", parent)))
    monkeypatch.setenv("TORCHINDUCTOR_COMPILE_THREADS", "x")
    monkeypatch.delenv("TORCHINDUCTOR_COMPILE_THREADS")
    monkeypatch.delenv("LATER", raising=False)
    with monkeypatch.context() as one:
        one.setattr(os, "_exit", leave)
        with pytest.raises(Exited):
            worker_process._child(given({"LATER": "set"}), SimpleNamespace(send="send"), 17)
    gc.unfreeze()
    assert said == [(0, 0), ("ends with", 17), ("job", "device", ["torch"], "send", False, True, True), code]
    assert (os.environ["TORCHINDUCTOR_COMPILE_THREADS"], os.environ["LATER"]) == ("1", "set")
    assert ("boom" in capsys.readouterr().err) == isinstance(end, RuntimeError)


@pytest.mark.parametrize("error", [OSError, ValueError])
def test_a_worker_ends_though_nobody_reads_what_it_says(error, monkeypatch) -> None:
    class Exited(BaseException):
        pass

    def leave(status):
        raise Exited(status)

    def flush():
        raise error

    monkeypatch.setattr(worker, "run", lambda *_: None)
    monkeypatch.setattr(os, "setpgid", lambda *_: None)
    monkeypatch.setattr(processes, "end_with", lambda parent: None)
    with monkeypatch.context() as one:
        for name in ("stdout", "stderr"):
            one.setattr(sys, name, SimpleNamespace(flush=flush))
        one.setattr(os, "_exit", leave)
        with pytest.raises(Exited, match="0"):
            worker_process._child(given({}), SimpleNamespace(send="send"), 17)


def test_a_worker_that_is_started_beforehand_measures_first(scripted, monkeypatch) -> None:
    """In the environment of its supervisor as it is by then; the next job has another worker."""
    scripted(lambda names, send: send(("rows", {"torch": row(f"{os.getpid()} {os.environ.get('LATER')}")})))
    monkeypatch.delenv("LATER", raising=False)
    others = processes.offspring()
    with worker_process.beforehand():
        (early,) = processes.offspring() - others
        monkeypatch.setenv("LATER", "set")
        first, second = (supervisor.measure(job("torch"))[0]["reason"] for _ in range(2))
        assert first == f"{early} set ran" != second and second.endswith(" set ran")
    assert processes.offspring() <= others


@pytest.mark.parametrize("early", [False, True])
def test_a_harness_that_cannot_be_imported_is_a_reason(early, monkeypatch, capfd) -> None:
    """Whenever the worker imports it; where there is no job nothing is said."""
    others = processes.offspring()
    monkeypatch.setattr(platforms, "missing", lambda *_: None)
    monkeypatch.setattr(platforms, "current", lambda: platforms.CPU)
    monkeypatch.delattr("moe_routing_bench.measure.worker")
    monkeypatch.setitem(sys.modules, "moe_routing_bench.measure.worker", None)
    with worker_process.beforehand() if early else contextlib.nullcontext():
        (measured,) = supervisor.measure(job("torch"))
    assert measured["status"] == "crashed" and "\n" not in measured["reason"]
    start = "starting: worker exited with status 1: ModuleNotFoundError: import of moe_routing_bench.measure.worker"
    assert measured["reason"].startswith(start)
    capfd.readouterr()
    told, tell = os.pipe()
    monkeypatch.setattr(gc, "freeze", lambda: os.write(tell, b"."))  # after the import
    with worker_process.beforehand():
        assert os.read(told, 1) == b"."
        time.sleep(0.05)
    os.close(told)
    os.close(tell)
    assert capfd.readouterr() == ("", "") and processes.offspring() <= others


@pytest.mark.parametrize("when", ["while it is forked", "later"])
def test_an_interrupt_ends_the_worker_that_was_started_beforehand(when, monkeypatch) -> None:
    fork, others = os.fork, processes.offspring()

    def interrupted() -> int:
        if pid := fork():
            signal.raise_signal(signal.SIGINT)
        return pid

    if when != "later":
        monkeypatch.setattr(os, "fork", interrupted)
    begun = []

    def block() -> None:
        begun.append(when)
        signal.raise_signal(signal.SIGINT)

    with pytest.raises(KeyboardInterrupt), worker_process.beforehand():
        block()
    assert begun == ["later"] * (when == "later")
    assert processes.offspring() <= others


def test_rows_are_written_where_they_are_asked_for(scripted, monkeypatch, tmp_path, capsys) -> None:
    """With the job's spec; each is a line of output with its time or its reason."""
    from moe_routing_bench.store import rows as stored

    written = []
    monkeypatch.setattr(stored, "write", lambda *given: written.append(given))
    scripted(lambda names, send: send(("rows", {name: row(name) for name in names})))
    spec = job("torch", "triton").spec
    watch = socket.socketpair()
    with watch[0], watch[1]:
        assert supervisor.main([str(tmp_path / "out"), spec], "warm", watch[0]) == 0
    ((path, rows, of),) = written
    assert (path, of) == (Path(tmp_path / "out"), spec) and {one["worker_mode"] for one in rows} == {"warm"}
    assert capsys.readouterr().out == "pack torch: incorrect torch ran\npack triton: incorrect triton ran\n"
    timed = [{"bench": "pack", "implementation": "torch", "status": "ok", "median_us": 1.234, "reason": None}]
    given = []
    monkeypatch.setattr(supervisor, "measure", lambda *all_: given.append(all_) or timed)
    assert supervisor.main(["out", spec], watch="watch") == 0
    assert given == [(job("torch", "triton"), Path("out"), "cold", "watch", None)]
    assert capsys.readouterr().out == "pack torch: ok 1.23 us\n"


def test_a_row_with_a_time_has_what_follows_from_it(monkeypatch) -> None:
    """And that of somebody else's package the version of that."""
    monkeypatch.setattr(completion, "derived", lambda of, row: {"derived": (of.cell.bench, row["median_us"])})
    monkeypatch.setattr(provenance, "version", {"quack-kernels": "9.1"}.get)
    monkeypatch.setenv("SLURM_JOB_ID", "77")
    cell = cell_of("gate", tokens=8, experts=4, top_k=2, dtype="fp32")
    found = completion.complete(
        Job(cell, ("quack",), Settings()), "cpu", "quack", {"status": "ok", "median_us": 3.0}, *[datetime.now()] * 2
    )
    assert found["derived"] == ("gate", 3.0) and found["implementation_version"] == "9.1"
    assert found["slurm_job_id"] == "77"


def test_a_row_that_contradicts_itself_has_no_time(monkeypatch) -> None:
    """Whatever shared the worker's process: the samples say what the median is."""
    monkeypatch.setattr(completion, "derived", lambda of, row: {})
    cell = cell_of("gate", tokens=8, experts=4, top_k=2, dtype="fp32")
    said = {"status": "ok", "median_us": 1.0, "samples_us": [2.0, 3.0, 4.0]}
    found = completion.complete(Job(cell, ("torch",), Settings()), "cpu", "torch", said, *[datetime.now()] * 2)
    assert found["status"] == "incorrect" and "median_us" not in found
    assert "median_us is 1, that of the samples 3" in found["reason"]


def test_a_user_s_error_is_a_line(monkeypatch, capsys) -> None:
    def measure(*_):
        raise UserError("no such thing")

    monkeypatch.setattr(supervisor, "measure", measure)
    assert supervisor.main(["out", job("torch").spec]) == 2
    assert capsys.readouterr().err == "error: no such thing\n"


def test_a_job_for_another_platform_is_refused_before_anything_is_measured(monkeypatch, capsys, tmp_path) -> None:
    """In one line, for a named run of that platform too; on its own platform it runs."""
    monkeypatch.setattr(supervisor, "measure", lambda *_: [])
    monkeypatch.setattr(platforms, "gpu_name", lambda: "NVIDIA H100 PCIe")
    for asked in ("nvidia-h200", "nvidia-h200.layers", "cpu"):
        assert supervisor.main([str(tmp_path / "out"), job("torch").spec, asked]) == 2
        start = f"error: platform: got 'nvidia-h100-pcie'; allowed: {asked.partition('.')[0]}; hint: ask for that GPU"
        assert capsys.readouterr().err.startswith(start)
    assert supervisor.main([str(tmp_path / "out"), job("torch").spec, "nvidia-h100-pcie.layers"]) == 0
