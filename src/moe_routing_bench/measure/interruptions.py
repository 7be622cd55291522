"""A worker that is stopped from outside, alone or with its whole machine, has not hung: what was interrupted is measured again.

A process that polls knows how far apart its polls should be. A longer gap in which it did not even wait for a CPU is one in which it
was stopped (SIGSTOP, a freezer cgroup, a paused virtual machine). Two clocks of the kernel show whether the machine slept.
"""

import contextlib
import os
import time
from collections.abc import Sequence

from moe_routing_kernels.errors import bad

PERIOD = 1.0  # seconds between two looks at a worker
_MOST, _MOST_LASTING = 6, 2
_SLACK_SECONDS = 1.0  # that a poll may be late


class Interrupted(Exception):
    """A worker was stopped while `at` was measured (None: no implementation); `lasting`: and nothing has let it go on for `timeout` seconds."""

    def __init__(self, reason: str, at: str | None, lasting: bool = False) -> None:
        super().__init__(reason)
        self.at, self.lasting = at, lasting


class Watch:
    """How long a worker may still be silent. Its limit counts time in which this process ran and the worker was not stopped."""

    def __init__(self, worker: int, timeout: float) -> None:
        """`timeout` in seconds, from now."""
        self._worker, self._timeout, self._clock = worker, timeout, RunningTime(PERIOD)
        self._heard, self._stopped = 0.0, None

    def hear(self) -> None:
        """The worker has given a sign of life."""
        self._heard = self._clock.seconds

    @property
    def patience(self) -> float:
        """The seconds that are left."""
        return self._heard + self._timeout - self._clock.seconds

    def look(self, at: str | None, working: float = 0.0) -> None:
        """Count the time since the last look. Raises `Interrupted` where this process was stopped meanwhile for a second or more, apart
        from `working` seconds, or the worker was stopped, however briefly."""
        if seconds := self._clock.look(working):
            raise Interrupted(f"everything was stopped for {seconds:.0f} s", at)
        with contextlib.suppress(ChildProcessError):  # it has ended
            while event := os.waitid(os.P_PID, self._worker, os.WSTOPPED | os.WCONTINUED | os.WNOHANG):
                if event.si_code == os.CLD_CONTINUED:
                    raise Interrupted("the worker was stopped for a while", at)
                self._stopped = self._clock.seconds if self._stopped is None else self._stopped
        if self._stopped is not None:
            self.hear()
            if self._clock.seconds - self._stopped > self._timeout:
                raise Interrupted(f"the worker was stopped, and did not go on for {self._timeout:g} s", at, True)


def settled(interruptions: Sequence[Interrupted]) -> dict[str, dict[str, str]]:
    """The outcome of an implementation at which the worker was stopped each time; nothing where the cell is to be measured again.

    Raises `UserError` where that was tried too often.
    """
    last = interruptions[-1]
    lasting = [each for each in interruptions if each.lasting and each.at == last.at]
    if len(interruptions) < _MOST and len(lasting) < _MOST_LASTING:
        return {}
    if last.at is not None and all(each.at == last.at for each in interruptions):
        return {last.at: {"status": "timeout", "reason": f"{last}, {len(interruptions)} times"}}
    raise bad("measurement", f"{len(interruptions)} interruptions, the last: {last}", "none", "run it again")


class RunningTime:
    """How long this process has run, as limits count it: not while it was stopped or frozen, nor while the machine slept.

    It must be looked at every `period` seconds.
    """

    def __init__(self, period: float) -> None:
        """Begin at 0."""
        self.seconds, self.stopped = 0.0, 0.0  # that the process ran; that it did not
        self._period, self._last = period, _clocks()

    def look(self, working: float = 0.0) -> float:
        """Count the time since the last look; returns how much of it the process was stopped for, in seconds.

        `working`: seconds in which it may have waited for other programs instead of polling.
        """
        before, self._last = self._last, _clocks()
        passed, with_sleep, waited = (now - then for now, then in zip(self._last, before, strict=True))
        slept = with_sleep - passed
        late = passed - waited - self._period - working
        stopped = (late if late > _SLACK_SECONDS else 0.0) + (slept if slept > _SLACK_SECONDS else 0.0)
        self.seconds += min(passed, self._period + _SLACK_SECONDS)
        self.stopped += stopped
        return stopped


def _clocks() -> tuple[float, float, float]:
    """Seconds of two clocks, the second of which goes on while the machine sleeps; and how long this thread has waited for a CPU."""
    try:
        with open("/proc/thread-self/schedstat", encoding="ascii") as file:
            waited = int(file.read().split()[1]) / 1e9
    except (OSError, IndexError, ValueError):
        waited = 0.0
    return time.monotonic(), time.clock_gettime(time.CLOCK_BOOTTIME), waited
