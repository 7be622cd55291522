"""Where the seconds of a cell go: by implementation and step, as the messages of its worker tell."""

from collections.abc import Mapping
from time import monotonic

_LEAST_SECONDS = 0.005  # of a step that is named


class Phases:
    """Seconds by implementation (None: of all) and step, those of all workers of a cell together."""

    def __init__(self) -> None:
        """Nothing has begun."""
        self._seconds: dict[tuple[str | None, str], float] = {}
        self._now: tuple[str | None, str] | None = None
        self._since = 0.0

    def enter(self, name: str | None, step: str) -> None:
        """A step begins, and with it the one before ends."""
        self.end()
        self._now = name, step

    def end(self) -> None:
        """The last step ends."""
        now = monotonic()
        if self._now:
            self._seconds[self._now] = self._seconds.get(self._now, 0.0) + now - self._since
        self._now, self._since = None, now

    def seconds(self) -> Mapping[tuple[str | None, str], float]:
        """The seconds of each step so far."""
        return self._seconds

    def text(self) -> str:
        """One line: the steps of all, then those of each implementation, in the order in which they began."""
        by_name: dict[str | None, list[str]] = {None: []}
        for (name, step), seconds in self._seconds.items():
            if seconds >= _LEAST_SECONDS:
                by_name.setdefault(name, []).append(f"{step} {seconds:.2f}")
        parts = (
            f"{name}: {', '.join(steps)}" if name else ", ".join(steps) for name, steps in by_name.items() if steps
        )
        return f"seconds: {'; '.join(parts)}"
