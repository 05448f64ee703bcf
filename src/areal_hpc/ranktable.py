"""The rank table: what every rank of a node is doing, in one small mapped file.

`log/ranks.<node>` has a header and one slot per local rank. A rank writes its own slot with
plain stores (about 1 us, no system call), the watcher in the spawner of local rank 0 reads
all of them; there is no lock. A reader can catch a slot half-written, so nobody acts on one
look: the watcher wants the same beat twice. Times are CLOCK_MONOTONIC in seconds, which
processes of one node share. Standard library only.
"""

from __future__ import annotations

import mmap
import os
import struct
import time
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path

from areal_hpc import processes

MAGIC = b"AHRANKS1"
HEADER = struct.Struct("<8sI")  # magic, slots
IDENTITY = struct.Struct("<BiqqQ12s")  # state, rank, pid, start ticks, pid namespace, role
DOING = struct.Struct("<24sdiiqddQ")  # phase, limit_s, peer, version, ordinal, started, last beat, beats
BEAT = struct.Struct("<dQ")  # the last two of DOING
DOING_AT = 64
BEAT_AT = DOING_AT + DOING.size - BEAT.size
SLOT_BYTES = 192


class State(IntEnum):
    """Whether a rank that is gone may be gone."""

    EMPTY = 0
    RUNNING = 1
    ENDED = 2  # in good order, with all others
    FAILED = 3  # it has written the exit file and spoken for itself


@dataclass(frozen=True, slots=True)
class Row:
    """One rank's slot; `last` and `started` are CLOCK_MONOTONIC seconds, -1 is "none"."""

    state: State
    rank: int
    pid: int
    ticks: int
    namespace: int
    role: str
    phase: str
    limit_s: float
    peer: int
    version: int
    ordinal: int
    started: float
    last: float
    beats: int

    def silent_s(self, now: float) -> float:
        """Seconds since the last sign of life."""
        return max(0.0, now - self.last)


def table_path(run_dir: str | Path, node: str) -> Path:
    return Path(run_dir) / "log" / f"ranks.{node}"


def create_table(path: str | Path, slots: int) -> None:
    """An empty table under its name, whatever an earlier attempt left there (its pids are others' by now)."""
    path = Path(path)
    fresh = path.with_name(f"{path.name}.new")
    fresh.write_bytes(HEADER.pack(MAGIC, slots).ljust(SLOT_BYTES, b"\0") + bytes(slots * SLOT_BYTES))
    os.replace(fresh, path)


def _map(path: str | Path, access: int) -> mmap.mmap:
    with open(path, "r+b" if access == mmap.ACCESS_WRITE else "rb") as file:
        mapped = mmap.mmap(file.fileno(), 0, access=access)
    magic, slots = HEADER.unpack_from(mapped)
    if magic != MAGIC or len(mapped) != (slots + 1) * SLOT_BYTES:
        raise ValueError(f"{path}: not a rank table ({len(mapped)} bytes, magic {magic!r}, expected {MAGIC!r})")
    return mapped


class Slot:
    """This process's slot in the table; `local_rank` says which. Written by its owner only."""

    def __init__(self, path: str | Path, local_rank: int, rank: int, role: str) -> None:
        pid = os.getpid()
        self._mapped = _map(path, mmap.ACCESS_WRITE)
        self._at = (local_rank + 1) * SLOT_BYTES
        self._identity = (rank, pid, processes.ticks(pid), processes.pid_namespace(), role.encode()[:12])
        self._beats = 0
        self.write("start", float("inf"), -1, -1, -1)
        self.mark(State.RUNNING)

    def mark(self, state: State) -> None:
        IDENTITY.pack_into(self._mapped, self._at, state, *self._identity)

    def write(self, phase: str, limit_s: float, peer: int, version: int, ordinal: int) -> float:
        """A new phase, which is a sign of life too. Returns the time."""
        now = time.monotonic()
        self._beats += 1
        name = phase.encode()[:24]
        DOING.pack_into(self._mapped, self._at + DOING_AT, name, limit_s, peer, version, ordinal, now, now, self._beats)
        return now

    def beat(self) -> float:
        """A sign of life inside the phase. Returns the time."""
        now = time.monotonic()
        self._beats += 1
        BEAT.pack_into(self._mapped, self._at + BEAT_AT, now, self._beats)
        return now


class Table:
    """All slots, for reading. Map it once: a renamed table is another run's."""

    def __init__(self, path: str | Path) -> None:
        self._mapped = _map(path, mmap.ACCESS_READ)
        self._slots = HEADER.unpack_from(self._mapped)[1]

    def rows(self) -> list[Row]:
        """The slots that a rank has taken, in local rank order."""
        rows = [self._row((slot + 1) * SLOT_BYTES) for slot in range(self._slots)]
        return [row for row in rows if row.state is not State.EMPTY]

    def _row(self, at: int) -> Row:
        state, rank, pid, ticks, namespace, role = IDENTITY.unpack_from(self._mapped, at)
        doing = DOING.unpack_from(self._mapped, at + DOING_AT)
        phase, limit_s, peer, version, ordinal, started, last, beats = doing
        return Row(
            State(state), rank, pid, ticks, namespace, _text(role), _text(phase), limit_s, peer, version, ordinal,
            started, last, beats,
        )  # fmt: skip


def _text(padded: bytes) -> str:
    return padded.rstrip(b"\0").decode(errors="replace")


def read_table(path: str | Path) -> list[Row]:
    """The rows of a table once, for a look from outside. Raises FileNotFoundError, ValueError."""
    return Table(path).rows()
