"""Signals of processes that tests start."""

import signal


def interruptible() -> None:
    """Before a program starts: what a shell starts in the background ignores SIGINT, and so would its children."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
