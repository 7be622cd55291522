"""A worker that is stopped from outside, alone or with its whole machine, has not hung: what was interrupted is measured again."""

import contextlib
import os
from collections.abc import Sequence

from moe_routing_bench.measure.running_time import RunningTime
from moe_routing_kernels.errors import bad

PERIOD = 1.0  # seconds between two looks at a worker
_MOST, _MOST_LASTING = 6, 2


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
