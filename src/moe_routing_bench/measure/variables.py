"""The environment variables of the process that all implementations of a cell share: what became of them, and as they were."""

import os

_COMPILERS = (
    "_TORCHINDUCTOR_",
    "TORCHINDUCTOR_",
    "TRITON_",
    "CUTE_DSL_",
    "TVM_",
)  # note in the environment where their caches are
_LONGEST = 20  # letters of a value that is shown: a longer one may be a password


def variables() -> dict[str, str]:
    """All but those of compilers."""
    return {name: text for name, text in os.environ.items() if not name.startswith(_COMPILERS)}


def put_back(was: dict[str, str]) -> None:
    """Make `variables` what they were."""
    for name in variables().keys() - was.keys():
        del os.environ[name]
    os.environ.update(was)


def harm(now: dict[str, str], was: dict[str, str]) -> str | None:
    """Which variables were changed and removed, in words, and which added; None where some were added and that is all.

    What is added is gone again before another implementation can read it, and honest libraries add some when they are imported.
    """
    removed, added = sorted(was.keys() - now.keys()), sorted(now.keys() - was.keys())
    changed = [name for name in sorted(was.keys() & now.keys()) if was[name] != now[name]]
    if not removed and not changed:
        return None
    words = [f"{name} is {_shown(now[name])}, no longer {_shown(was[name])}" for name in changed]
    words += [f"{name} was removed" for name in removed] + [f"{name} was added" for name in added]
    return f"os.environ: {', '.join(words)}"


def _shown(text: str) -> str:
    return repr(text) if len(text) <= _LONGEST else "another"
