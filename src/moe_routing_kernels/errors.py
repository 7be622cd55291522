"""The one exception that a user is meant to read: what was wrong, what was got, what is allowed, and a hint."""

import contextlib
import difflib
import math
import numbers
import reprlib
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

MOST_LETTERS = 480  # of a message, and of a reason in a row
_VALUES = reprlib.Repr()
_VALUES.maxstring = _VALUES.maxother = _VALUES.maxlong = 100


class UserError(ValueError):
    """Bad input. Its text is one line and is shown without a traceback; the exit status is 2."""


class NoForm(UserError):
    """A kernel that is written for other architectures than the one that was asked for."""


def one_line(text: object, most: int = MOST_LETTERS) -> str:
    """A text as one line that any file can hold and no terminal obeys, with only both ends of what is longer.

    Control characters, also those that change the direction of letters, are escaped: names may come from any file.
    """
    line = "".join(letter if letter.isprintable() else ascii(letter)[1:-1] for letter in " ".join(str(text).split()))
    return line if len(line) <= most else f"{line[: most // 2 - 3]} … {line[-(most // 2) :]}"


def shown(value: object) -> str:
    """A value as messages show it: not all of a long one."""
    return one_line(repr(value), 300) if isinstance(value, str) else one_line(_VALUES.repr(value), 300)


def bad(what: str, got: object, allowed: object = None, hint: str = "") -> UserError:
    """Build a `UserError` in the project's one format: ``what: got X; allowed: Y; hint``, however long a value is."""
    text = f"{what}: got {shown(got)}"
    if allowed is not None:
        text += f"; allowed: {allowed}"
    if hint:
        text += f"; hint: {hint}"
    return UserError(one_line(text))


def pick(what: str, got: object, choices: Iterable[str], hint: str = "") -> str:
    """Return `got` when it is one of `choices`; otherwise raise with the closest spelling as the hint."""
    names = list(choices)
    if isinstance(got, str) and got in names:
        return got
    raise bad(what, got, ", ".join(names), hint or near(got, names))


def near(got: object, names: Sequence[str]) -> str:
    """The hint that names the closest spelling; nothing where none is close."""
    found = difflib.get_close_matches(str(got)[:100], names, n=1)
    return f"did you mean {found[0]!r}?" if found else ""


def positive(value: object) -> bool:
    """Whether a value is a finite number above 0: Python's or numpy's, and no truth value."""
    if isinstance(value, int):
        return not isinstance(value, bool) and 0 < value <= sys.float_info.max
    return isinstance(value, (float, numbers.Real)) and 0 < float(value) < math.inf


def whole(value: object) -> bool:
    """Whether a value is a whole number: Python's or numpy's, and no truth value."""
    return isinstance(value, (int, numbers.Integral)) and not isinstance(value, bool)


@contextlib.contextmanager
def writing(path: Path) -> Iterator[None]:
    """Raise `UserError` in place of the `OSError` of an output that cannot be written."""
    try:
        yield
    except OSError as error:
        raise bad("output", str(path), "a file that can be written", error.strerror or str(error)) from error
