"""Runs the worker of a cell as a child process, and makes a complete file of whatever becomes of it.

When an implementation crashes, hangs or corrupts the CUDA context, its status is recorded, a fresh worker is started and
the others are measured again. Every requested implementation ends with a row.
"""

import contextlib
import functools
import os
import pickle
import signal
import struct
import sys
import time
import traceback
from dataclasses import replace
from datetime import UTC, datetime
from multiprocessing.connection import Connection, Pipe, wait
from pathlib import Path
from typing import Any

from moe_routing_bench import files
from moe_routing_bench.benches.bench import find
from moe_routing_bench.errors import UserError, one_line, writing
from moe_routing_bench.formats import FORMATS
from moe_routing_bench.grid.job import Job
from moe_routing_bench.measure import gpus, processes
from moe_routing_bench.store import platforms
from moe_routing_bench.workload.rows import row_layout

_BANDWIDTHS = ("copy_gb_per_s", "read_gb_per_s", "write_gb_per_s", "stream_gb_per_s", "short_stream_gb_per_s")
_GRACE_SECONDS = 2.0  # for a worker to end by itself
DERIVED_SLACK = 1.05  # a time this much below the roofline is still believed: ceilings vary as much between processes


def measure(job: Job, out: Path | None = None, mode: str = "cold", watch: Any = None) -> list[dict[str, Any]]:
    """Measure a job and return its rows in table order; write them to `out` when it is given.

    `mode` ("cold" or "warm") is recorded. `watch` is a socket whose closing means that nobody waits any more.
    """
    if out is not None:
        files.check_writable(out)
    processes.adopt()
    platform = platforms.current()
    device = "cpu" if platform == platforms.CPU else "cuda"
    started = datetime.now(UTC)
    outcomes: dict[str, dict[str, Any]] = {}
    for name in job.implementations:
        one = find(job.cell.bench)[name]
        reason = platforms.missing(one.requires, platform, one.peer)
        if reason:
            outcomes[name] = {"status": "unsupported", "reason": reason}
    caller = _Caller(watch)
    with gpus.reserved(alone=True, family=job.cell.family, waiting=caller.told):
        while pending := [n for n in job.implementations if n not in outcomes]:
            outcomes |= _attempt(job, device, pending, caller)
    rows = [_complete(job, platform, name, outcomes[name], started) for name in job.implementations]
    for row in rows:
        row |= {"worker_mode": mode, "restarts": max(caller.workers - 1, 0)}
    if out is not None:
        from moe_routing_bench.store import rows as stored

        with writing(out):
            stored.write(out, rows, job.spec)
    return rows


class _Caller:
    """Who waits for a job at the other end of a socket, if anybody does; is told every second that the job goes on.

    `workers` counts how many there were.
    """

    def __init__(self, watch: Any) -> None:
        self.watch, self.workers = watch, 0
        self._last = time.monotonic()

    def told(self) -> None:
        """Give a sign of life if it is time; SystemExit when nobody waits any more."""
        if self.watch and time.monotonic() - self._last >= 1:
            self._last = time.monotonic()
            try:
                self.watch.sendall(b".")
            except OSError:
                raise SystemExit(130) from None


def _attempt(
    job: Job, device: str, pending: list[str], caller: _Caller, audit: bool = False
) -> dict[str, dict[str, Any]]:
    """One worker's life: the outcomes that it settled, at least one. Where somebody has harmed the others, the next one, which
    finds out who it was, belongs to it."""
    receive, send = Pipe(duplex=False)
    supervisor, others = os.getpid(), processes.offspring()
    child = os.fork()
    if child == 0:
        receive.close()
        _child(job, device, pending, send, supervisor, audit)
    send.close()
    caller.workers += 1
    _code(job.cell.bench)  # takes a while, which the worker does too
    found: dict[str, dict[str, Any]] = {}
    at, step, ends, tainted, heard = None, "starting", False, False, time.monotonic()
    try:
        while not ends:
            patience = heard + job.settings.timeout - time.monotonic()
            ready = wait([receive, *([caller.watch] if caller.watch else [])], timeout=max(0, min(1, patience)))
            if caller.watch in ready and receive not in ready:
                raise SystemExit(130)  # the caller is gone
            caller.told()
            if not ready:
                ends = _ended(child)  # though somebody whom it has started holds its end of the pipe
                if not ends and patience <= 1:
                    break
                continue
            heard = time.monotonic()
            message = _next(receive)
            if message is None:
                ends = True
            elif message[0] == "at":
                at, step = message[1], message[2]
            elif message[0] == "failed":
                found[message[1]] = {"status": message[2], "reason": message[3]}
                at = None
            elif message[0] == "tainted":
                tainted = True
            else:
                found |= message[1]
                ends = True
    finally:
        status = _end(child, _GRACE_SECONDS if ends else 0)
        processes.sweep(others, _GRACE_SECONDS)
        receive.close()
    left = [n for n in pending if n not in found]
    if tainted and not audit:
        return found | _attempt(job, device, left, caller, audit=True)
    if left and (not ends or not found or at is not None):
        blamed = [at] if at in left else left if not found else []
        if not ends:
            fault = {"status": "timeout", "reason": f"{step}: no word for {job.settings.timeout:g} s"}
        else:
            fault = {"status": "crashed", "reason": f"{step}: worker {_manner(status)}"}
        found |= {name: dict(fault) for name in blamed}
    return found


def _next(receive: Connection) -> tuple | None:
    """The worker's next message, or None when it has ended or sent half a message."""
    try:
        return receive.recv()
    except (EOFError, OSError, pickle.UnpicklingError, struct.error):
        return None


def _child(job: Job, device: str, pending: list[str], send: Connection, supervisor: int, audit: bool) -> None:
    """The forked worker; never returns, whatever an implementation raises."""
    code = 1
    try:
        os.setpgid(0, 0)
        processes.end_with(supervisor)
        processes.adopt()  # so that it sees what an implementation starts
        os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")  # no pool of processes that would outlive a kill
        from moe_routing_bench.measure import worker

        worker.run(job, device, pending, send.send, audit)
        code = 0
    except SystemExit as error:
        code = processes.status(error.code)
    except BaseException:
        traceback.print_exc()
    finally:
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError):  # nobody reads it any more
                stream.flush()
        os._exit(code)


def _ended(child: int) -> bool:
    """Whether a child has ended; it stays to be waited for."""
    return os.waitid(os.P_PID, child, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None


def _end(child: int, seconds: float) -> int:
    """Wait so long for the worker to end, then kill it and its group; returns its wait status."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            return status
        time.sleep(0.002)
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(child, signal.SIGKILL)
    with contextlib.suppress(ProcessLookupError):
        os.kill(child, signal.SIGKILL)
    return os.waitpid(child, 0)[1]


def _manner(status: int) -> str:
    if os.WIFSIGNALED(status):
        return f"was killed by signal {signal.Signals(os.WTERMSIG(status)).name}"
    return f"exited with status {os.WEXITSTATUS(status)}"


@functools.cache
def _code(bench: str) -> dict[str, Any]:
    """Row fields that say which code measures a bench."""
    from moe_routing_bench.measure import provenance

    one = find(bench)
    return {"code_fingerprint": one.code_fingerprint()} | provenance.git_state(tuple(one.code_files()))


def _complete(job: Job, platform: str, name: str, outcome: dict[str, Any], started: datetime) -> dict[str, Any]:
    """A whole row: identity, outcome, what follows from both, provenance."""
    from moe_routing_bench.measure import provenance
    from moe_routing_bench.store.rows import SCHEMA_VERSION

    bench = find(job.cell.bench)
    row = dict(job.cell.values) | {
        "schema_version": SCHEMA_VERSION, "bench": bench.name, "implementation": name, "platform": platform, "cell": job.cell.key,
        "cell_hash": job.hash, "host": os.uname().nodename, "slurm_job_id": os.environ.get("SLURM_JOB_ID"),
        "started_at": started.isoformat(timespec="milliseconds"), "ended_at": datetime.now(UTC).isoformat(timespec="milliseconds"),
    }  # fmt: skip
    row |= _code(bench.name) | outcome
    if peer := bench[name].peer:
        row["implementation_version"] = provenance.version(peer.distribution)
    if row["status"] == "ok":
        row |= _derived(job, row)
    return row


def _derived(job: Job, row: dict[str, Any]) -> dict[str, Any]:
    """Rates, shares of the measured ceilings, and the plausibility check."""
    cell, seconds = job.cell, row["median_us"] / 1e6
    gb_per_s, tflops = row["compulsory_bytes"] / seconds / 1e9, row["flops"] / seconds / 1e12
    roofline_us = max(row["compulsory_bytes"] / row["copy_gb_per_s"] / 1e3, row["flops"] / row["peak_tflops"] / 1e6)
    found = {
        "tokens_per_s": cell.tokens / seconds, "gb_per_s": gb_per_s,
        "share_of_copy": gb_per_s / row["copy_gb_per_s"], "roofline_us": roofline_us, "share_of_roofline": roofline_us / row["median_us"],
    }  # fmt: skip
    for stream in ("stream", "short_stream"):
        if row.get(f"{stream}_gb_per_s"):
            found[f"share_of_{stream}"] = gb_per_s / row[f"{stream}_gb_per_s"]
    if row["flops"]:
        found |= {"tflops": tflops, "share_of_peak": tflops / row["peak_tflops"]}
        if row.get("sustained_tflops"):
            found["share_of_sustained"] = tflops / row["sustained_tflops"]
        if row.get("dense_us"):
            found["over_dense"] = row["median_us"] / row["dense_us"]
    if passes := find(cell.bench).row_passes:
        one, packed = FORMATS[cell.dtype], FORMATS[cell.get("packed") or cell.dtype]
        strict = passes * (one.bits + cell.top_k * packed.bits) // 8 * cell.hidden
        found |= {"bytes_per_token_strict": strict, "bw_gibps_strict": strict * cell.tokens / seconds / 2**30}
    if row.get("energy_mj"):
        found["energy_mj_per_token"] = row["energy_mj"] / cell.tokens
    found |= _waste(job, row)
    doubts = []
    if row.get("calibration_drift", 0) > 0.02:
        doubts.append(f"ceilings drifted {row['calibration_drift']:.1%} during the cell")
    if others := row.get("other_gpu_processes"):
        doubts.append(f"other processes on the GPU: {others}")
    if doubts:
        found |= {"suspect": True, "suspect_reason": "; ".join(doubts)}
    ceiling = max(row.get(n) or 0 for n in _BANDWIDTHS)
    floor = max(row["compulsory_bytes"] / ceiling / 1e3, row["flops"] / row["peak_tflops"] / 1e6)
    if row["device"] != "cpu" and row["median_us"] * DERIVED_SLACK < floor and row["cold_sets"] > 1:
        found |= {
            "status": "below_roofline",
            "reason": f"{row['median_us']:.2f} us is below the roofline of {floor:.2f} us",
        }
    return found


def _waste(job: Job, row: dict[str, Any]) -> dict[str, Any]:
    """Rows of the layout in use over kept assignments, minus one; a composite's layout is the implementation's."""
    if row.get("layout") is None:
        return {}
    layout, loads = replace(row_layout(job.cell), layout=row["layout"]), row["expert_load"]
    kept = sum(min(load, layout.limit) for load in loads)
    return {"rows": layout.used(loads), "padding_waste": layout.used(loads) / kept - 1}


def main(arguments: list[str], mode: str = "cold", watch: Any = None) -> int:
    """``OUT SPEC [PLATFORM]``: measure the spec's job and write its file, on this platform alone. Returns the exit status."""
    out, spec, *asked = arguments
    try:
        for platform in asked:
            platforms.verify(platform)
        rows = measure(Job.from_spec(spec), Path(out), mode, watch)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    with contextlib.suppress(OSError):  # the file is complete, whoever reads this
        for row in rows:
            time_text = f"{row['median_us']:.2f} us" if row.get("median_us") else row.get("reason")
            print(one_line(f"{row['bench']} {row['implementation']}: {row['status']} {time_text}"), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
