"""How long this process has run, as limits count it: not while it was stopped or frozen, nor while the machine slept.

A process that polls knows how far apart its polls should be. A longer gap in which it did not even wait for a CPU is one in which it
was stopped (SIGSTOP, a freezer cgroup, a paused virtual machine). Two clocks of the kernel show whether the machine slept.
"""

import time

_SLACK_SECONDS = 1.0  # that a poll may be late


class RunningTime:
    """A clock that stands still while its process does. It must be looked at every `period` seconds."""

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
