"""The watcher: finds the rank that fell silent, or is gone, and ends the node with a report.

Runs in the spawner of local rank 0, twice a second, over the rank table (ranktable.py). Two
findings: a rank that gave no sign of life for longer than its phase allows, and a rank that
is gone without having said so (killed, crashed in C). Either way the exit file names it and
the node's ranks are killed; the launcher ends the other nodes. For a hang `hang.<node>.txt`
holds the table, the one to blame on top, and the stacks that SIGUSR2 makes faulthandler
write. It cannot see other nodes: a rank that waits for a silent peer elsewhere is reported
with that peer's rank. Standard library only.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from areal_hpc import processes
from areal_hpc.exits import Exit, Outcome, write_exit
from areal_hpc.ranktable import Row, State, Table

STOPPED = "Tt"
UNSEEN = "?"  # a rank in a container with pids of its own: it can only be timed
STACK_WAIT_S = 1.0  # for one rank's stacks; a rank inside a system call that cannot be left never answers
STACK_QUIET_S = 0.1  # stacks are written in many pieces; this long without another one ends them


@dataclass(frozen=True, slots=True)
class WatchFiles:
    """Where the watcher reads and writes; `log` is what the ranks' descriptor 2 leads to."""

    node: str
    table: str
    log: str
    hang: str
    exit: str


def helpless(state: str) -> bool:
    """Whether a process in this state (empty: gone) can do nothing by itself."""
    return not state or state in "ZX" or state in STOPPED


def blame(rows: Sequence[Row], states: dict[int, str], now: float) -> list[Row]:
    """The rows, the one that most likely caused the silence first.

    A stopped or dead process comes first. Else the rank past its limit that has been silent
    longest, unless it waits for a peer of this node: then that peer (and so on), for it was
    the peer's turn. The rest by silence, longest first.
    """
    order = sorted(rows, key=lambda row: (not helpless(states[row.rank]), -row.silent_s(now)))
    late = [row for row in order if row.silent_s(now) > row.limit_s]
    if helpless(states[order[0].rank]) or not late:
        return order
    by_rank = {row.rank: row for row in rows}
    first, asked = late[0], set()
    while first.peer in by_rank and first.rank not in asked:
        asked.add(first.rank)
        first = by_rank[first.peer]
    if first.rank in asked:  # they wait for each other
        first = late[0]
    return [first, *(row for row in order if row.rank != first.rank)]


def describe(row: Row, state: str, now: float) -> str:
    """`rank 2 (trainer): phase exchange, silent for 5.2 s (limit 5 s), ...` in words."""
    process = f"process state {state}" if state else "process gone"
    if state and state in STOPPED:
        process = f"process stopped ({state})"
    parts = [f"phase {row.phase}", f"silent for {row.silent_s(now):.1f} s (limit {row.limit_s:g} s)", process]
    for name in ("peer", "version", "ordinal"):
        if getattr(row, name) >= 0:
            parts.append(f"{name} {getattr(row, name)}")
    return f"rank {row.rank} ({row.role}): " + ", ".join(parts)


def table_text(rows: Sequence[Row], states: dict[int, str], now: float) -> str:
    """The rows as aligned columns with a heading."""
    heads = ["rank", "role", "phase", "phase_s", "silent_s", "limit_s"]
    heads += ["beats", "peer", "version", "ordinal", "pid", "state"]
    cells = [
        [str(row.rank), row.role, row.phase, f"{now - row.started:.1f}", f"{row.silent_s(now):.1f}",
         f"{row.limit_s:g}", str(row.beats), str(row.peer), str(row.version), str(row.ordinal), str(row.pid),
         states.get(row.rank, "") or "gone"]
        for row in rows
    ]  # fmt: skip
    widths = [max(map(len, column)) for column in zip(heads, *cells)]
    return "\n".join("  ".join(map(str.ljust, line, widths)).rstrip() for line in [heads, *cells])


class Watcher:
    """`look` twice a second; True means that it has ended the node."""

    def __init__(self, files: WatchFiles) -> None:
        self._files = files
        self._table = Table(files.table)
        self._late: dict[int, int] = {}  # rank -> its beats when it was last seen late
        self._namespace = processes.pid_namespace()
        self._pidfds: dict[int, int] = {}  # rank -> a descriptor of its process

    def deaths(self) -> list[int]:
        """Descriptors that become readable when a rank dies: look then, before the launcher kills the others."""
        return list(self._pidfds.values())

    def look(self) -> bool:
        """Check every rank of the node once."""
        now = time.monotonic()
        rows = [row for row in self._table.rows() if row.state is State.RUNNING]
        states = {row.rank: self._state(row) for row in rows}
        gone = [row for row in rows if states[row.rank] in ("", "Z", "X") and self.running(row.pid)]
        self._follow([row for row in rows if row not in gone and row.namespace == self._namespace])
        if gone:
            self._report_gone(gone, rows, now)
            return True
        late = {row.rank: row.beats for row in rows if row.silent_s(now) > row.limit_s}
        sure = any(self._late.get(rank) == beats for rank, beats in late.items())
        self._late = late
        if sure:
            self._report_hang(blame(rows, states, now), states, now)
        return sure

    def running(self, pid: int) -> bool:
        """Whether the rank with this pid has, by now, neither ended nor failed in its own words."""
        return any(row.pid == pid and row.state is State.RUNNING for row in self._table.rows())

    def _state(self, row: Row) -> str:
        if row.namespace != self._namespace:
            return UNSEEN
        found = processes.stat(row.pid)
        return found[0] if found and found[1] == row.ticks else ""

    def _follow(self, rows: Sequence[Row]) -> None:
        """Keep a descriptor of each running rank, and of nobody else."""
        for rank in self._pidfds.keys() - {row.rank for row in rows}:
            os.close(self._pidfds.pop(rank))
        for row in rows:
            if row.rank not in self._pidfds:
                with suppress(OSError):  # a kernel before 5.3 has none; the next look must do
                    self._pidfds[row.rank] = os.pidfd_open(row.pid)

    def _report_gone(self, gone: list[Row], rows: list[Row], now: float) -> None:
        names = "; ".join(f"rank {row.rank} ({row.role}) in phase {row.phase}" for row in gone)
        message = f"{self._files.node}: gone without a word (killed, or a crash in native code): {names}"
        self.end(message, gone[0] if len(gone) == 1 else None, rows)  # of several nobody knows the first

    def _report_hang(self, rows: list[Row], states: dict[int, str], now: float) -> None:
        message = f"{self._files.node}: hang: {describe(rows[0], states[rows[0].rank], now)}"
        late = [row for row in rows[1:] if row.silent_s(now) > row.limit_s]
        lines = [message, *(f"past its limit too: {describe(row, states[row.rank], now)}" for row in late)]
        lines += [f"report: {self._files.hang}", "", table_text(rows, states, now), ""]
        try:
            with open(self._files.hang, "w") as file:
                file.write("\n".join(lines))
                for row in rows:
                    file.write(f"\n--- stacks of rank {row.rank} (pid {row.pid})\n{self._stacks(row)}")
                    file.flush()
        except OSError as error:  # a full disk does not keep a hung job alive
            message += f" (report not written: {error})"
        self.end(message, rows[0], rows)

    def _stacks(self, row: Row) -> str:
        """What the rank's faulthandler appends to the node's log after SIGUSR2."""
        if helpless(state := self._state(row)) or state == UNSEEN:
            return "stopped, gone or in another container: it cannot answer\n"
        log = Path(self._files.log)
        before = size = _size(log)
        with suppress(ProcessLookupError):
            os.kill(row.pid, signal.SIGUSR2)
        deadline = quiet = time.monotonic() + STACK_WAIT_S
        while time.monotonic() < min(deadline, quiet):
            time.sleep(0.02)
            if (grown := _size(log)) > size:
                size, quiet = grown, time.monotonic() + STACK_QUIET_S
        if size == before:
            return f"no answer in {STACK_WAIT_S:g} s\n"
        with log.open("rb") as file:
            file.seek(before)
            return file.read(size - before).decode(errors="replace")

    def end(self, message: str, first: Row | None, rows: Sequence[Row] = ()) -> None:
        """Write the exit file, say it on stderr, kill the node's ranks."""
        ordinals = [first.ordinal] if first and first.ordinal >= 0 else []
        rank, role, version = (first.rank, first.role, first.version) if first else (-1, "", -1)
        with suppress(OSError):  # the log and the exit file may be on a full disk
            os.write(2, f"areal-hpc: {message}\n".encode())
        with suppress(OSError):
            write_exit(self._files.exit, Outcome(Exit.CRASH, message, rank, role, version, ordinals))
        for row in rows or self._table.rows():
            if row.namespace == self._namespace and processes.alive(row.pid, row.ticks):
                with suppress(ProcessLookupError):
                    os.kill(row.pid, signal.SIGKILL)  # a stopped process takes it too


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0
