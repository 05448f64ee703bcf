"""run.lock: one run folder has one owner.

The file names job, restart, host, process and a heartbeat that the owner's spawner renews
every 10 s. It is free for another when the same job returns with a higher restart, when the
process is gone on the same host, or when the heartbeat is 60 s old (clocks of the nodes are
taken to agree within seconds). Taking it is a rename, then a second look: of two that saw it
free, the later keeps it. An owner that finds another's token in its lock
has lost the folder and must end. Standard library only.
"""

from __future__ import annotations

import json
import os
import socket
import time
import uuid
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from areal_hpc import processes

HEARTBEAT_S = 10.0
STALE_S = 60.0
SECOND_LOOK_S = 0.5  # longer than a contender takes from reading a free lock to renaming its own


class LockHeld(RuntimeError):
    """The run folder belongs to another job; says which, and when it would be free."""


class LockLost(RuntimeError):
    """Another job has taken this run folder over."""


@dataclass(frozen=True, slots=True)
class Holder:
    """What the file holds. `heartbeat` in seconds since the epoch, `ticks` the process's start."""

    job: str
    restart: int
    host: str
    pid: int
    ticks: int
    token: str
    heartbeat: float

    def __str__(self) -> str:
        age = time.time() - self.heartbeat
        return f"job {self.job} restart {self.restart} (host {self.host}, pid {self.pid}, heartbeat {age:.0f} s ago)"


def lock_path(run_dir: str | Path) -> Path:
    return Path(run_dir) / "run.lock"


def read(path: str | Path) -> Holder | None:
    """Who holds the lock file, or None. A file that is no lock counts as none: nobody renews it."""
    try:
        return Holder(**json.loads(Path(path).read_text()))
    except (FileNotFoundError, json.JSONDecodeError, TypeError):
        return None


def free_for(holder: Holder, job: str, restart: int, host: str, now: float) -> bool:
    """Whether `holder` no longer owns the folder, seen by (job, restart) on `host`."""
    if holder.job == job and restart > holder.restart:
        return True
    if holder.host == host and not processes.alive(holder.pid, holder.ticks):
        return True
    return now - holder.heartbeat >= STALE_S


class RunLock:
    """A held lock: `beat` now and then, `release` at an orderly end."""

    def __init__(self, path: str | Path, holder: Holder) -> None:
        self.path = Path(path)
        self.holder = holder
        self._next_beat = time.monotonic() + HEARTBEAT_S

    @classmethod
    def acquire(cls, path: str | Path, job: str, restart: int, pid: int) -> RunLock:
        """Take the lock for process `pid` of this host. Raises LockHeld."""
        host = socket.gethostname()
        holder = Holder(job, restart, host, pid, processes.ticks(pid), uuid.uuid4().hex, time.time())
        lock = cls(path, holder)
        other = read(path)
        if other is not None and not free_for(other, job, restart, host, time.time()):
            wait = max(0.0, other.heartbeat + STALE_S - time.time())
            raise LockHeld(f"{path}: held by {other}; free at its end, or {wait:.0f} s from now if it is dead")
        lock._write()
        time.sleep(SECOND_LOOK_S)
        try:
            lock._still_mine()
        except LockLost as error:
            raise LockHeld(f"{error} at the same moment") from None
        return lock

    def _still_mine(self) -> None:
        found = read(self.path)
        if found is None or found.token != self.holder.token:
            raise LockLost(f"{self.path}: taken over by {found or 'nobody: the file is gone'}")

    def _write(self) -> None:
        fresh = self.path.with_name(f"{self.path.name}.{self.holder.token[:8]}")
        fresh.write_text(json.dumps(asdict(self.holder)))
        os.replace(fresh, self.path)

    def beat(self) -> None:
        """Renew the heartbeat if it is due. Raises LockLost; OSError when the disk refuses."""
        if time.monotonic() < self._next_beat:
            return
        self._next_beat = time.monotonic() + HEARTBEAT_S
        self._still_mine()
        self.holder = replace(self.holder, heartbeat=time.time())
        self._write()

    def release(self) -> None:
        """Remove the file if it is still ours."""
        found = read(self.path)
        if found is not None and found.token == self.holder.token:
            self.path.unlink(missing_ok=True)
