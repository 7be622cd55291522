"""The one exception that a user is meant to read: what was wrong, what was got, what is allowed, and a hint."""

import contextlib
import difflib
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path


class UserError(ValueError):
    """Bad input. Its text is one line and is shown without a traceback; the exit status is 2."""


def bad(what: str, got: object, allowed: object = None, hint: str = "") -> UserError:
    """Build a `UserError` in the project's one format: ``what: got X; allowed: Y; hint``."""
    text = f"{what}: got {got!r}"
    if allowed is not None:
        text += f"; allowed: {allowed}"
    if hint:
        text += f"; hint: {hint}"
    return UserError(" ".join(text.split()))


def pick(what: str, got: object, choices: Iterable[str], hint: str = "") -> str:
    """Return `got` when it is one of `choices`; otherwise raise with the closest spelling as the hint."""
    names = list(choices)
    if isinstance(got, str) and got in names:
        return got
    raise bad(what, got, ", ".join(names), hint or near(got, names))


def near(got: object, names: Sequence[str]) -> str:
    """The hint that names the closest spelling; nothing where none is close."""
    found = difflib.get_close_matches(str(got), names, n=1)
    return f"did you mean {found[0]!r}?" if found else ""


@contextlib.contextmanager
def writing(path: Path) -> Iterator[None]:
    """Raise `UserError` in place of the `OSError` of an output that cannot be written."""
    try:
        yield
    except OSError as error:
        raise bad("output", str(path), "a file that can be written", error.strerror or str(error)) from error
