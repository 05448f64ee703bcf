"""What this rank is doing, said often and cheaply, so that a wait without end is seen.

MPI, gloo, HDF5 and vLLM calls have no deadline of their own. A rank names the phase it is in
and how many seconds it may be silent in it; past that the watcher ends the node's ranks with
a report (watch.py). The second line, `faulthandler.dump_traceback_later` with exit, is due
`SECOND_LINE_S` later, in case the watcher is gone or blocked by the same file system: it
writes this rank's stacks and leaves, and the launcher ends the rest. The timer of a stopped
process is stopped too.
"""

from __future__ import annotations

import faulthandler
import math
import time
from types import TracebackType

from areal_hpc.ranktable import Slot, State

SECOND_LINE_S = 10.0  # after the limit
SLACK_S = 10.0  # the timer may be armed this much later than that: arming costs 33 us, loops have ms
STDERR = 2  # the descriptor, not sys.stderr: the log replaces what lies behind it

_Doing = tuple[str, float, int, int, int]  # phase, limit_s, peer, version, ordinal


class SecondLine:
    """The timer, re-armed only when what it is set to no longer fits."""

    def __init__(self) -> None:
        self._due = math.inf  # when it fires, monotonic seconds

    def want(self, due: float) -> None:
        """Fire at `due` (monotonic seconds) or up to SLACK_S later; never for inf."""
        if due <= self._due <= due + 2 * SLACK_S or due == self._due:
            return
        if due == math.inf:
            faulthandler.cancel_dump_traceback_later()
            self._due = math.inf
            return
        now = time.monotonic()
        self._due = due + SLACK_S
        faulthandler.dump_traceback_later(max(self._due - now, 0.1), exit=True, file=STDERR)


class Phases:
    """`phase` and `beat` of one rank: its slot in the table and its second line."""

    def __init__(self, slot: Slot, second_line: SecondLine) -> None:
        self._slot = slot
        self._second_line = second_line
        self.doing: _Doing = ("start", math.inf, -1, -1, -1)

    def phase(self, name: str, limit_s: float, peer: int = -1, version: int = -1, ordinal: int = -1) -> Phase:
        """Enter a phase; `limit_s` counts from the last sign of life in it (inf: no limit).

        A plain call lasts until the next one; as a context manager it gives way to the
        phase before it. About 2 us. `peer` is the world rank it waits for: when both are
        silent the report puts the peer first.
        """
        before, self.doing = self.doing, (name, limit_s, peer, version, ordinal)
        self._write()
        return Phase(self, before)

    def beat(self) -> None:
        """A sign of life inside the phase, about 1 us. Never in a wait for a silent peer."""
        self._second_line.want(self._slot.beat() + self.doing[1] + SECOND_LINE_S)

    def _write(self) -> None:
        self._second_line.want(self._slot.write(*self.doing) + self.doing[1] + SECOND_LINE_S)

    def leave(self, before: _Doing) -> None:
        self.doing = before
        self._write()

    def mark(self, state: State) -> None:
        """Say how this rank ends, so that nobody reports it missing."""
        self._slot.mark(state)


class Phase:
    """A phase that can be left for the one before it."""

    __slots__ = ("_before", "_phases")

    def __init__(self, phases: Phases, before: _Doing) -> None:
        self._phases = phases
        self._before = before

    def __enter__(self) -> Phase:
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if error is None:  # the message of an error names the phase it came from
            self._phases.leave(self._before)
