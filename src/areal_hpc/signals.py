"""SIGUSR1 and SIGTERM ask for an orderly stop: they set a flag, once, and nothing else.

The loops read the flag and agree on it over MPI. Limits: a signal that arrives before
`install` (the first milliseconds of Python) ends the process as the system pleases; a
handler runs between two Python instructions, so a rank inside a long C call or a collective
sees its flag later, and one that never returns is the hang report's (watch.py), not ours.
"""

from __future__ import annotations

import signal
from types import FrameType

STOP_SIGNALS = (signal.SIGUSR1, signal.SIGTERM)
_first = ""  # the signal that asked first; later ones change nothing


def _ask(number: int, frame: FrameType | None) -> None:
    global _first
    _first = _first or signal.Signals(number).name


def install() -> None:
    """Install the handlers; again after a library that may have installed its own."""
    for number in STOP_SIGNALS:
        signal.signal(number, _ask)


def stop_requested() -> bool:
    """Whether this process was asked to stop."""
    return bool(_first)


def stop_signal() -> str:
    """The name of the signal that asked first, or nothing."""
    return _first
