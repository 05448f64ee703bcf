"""run.lock: one owner, found dead or alive in the ways that the design names."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from areal_hpc import processes, runlock
from areal_hpc.runlock import Holder, LockHeld, LockLost, RunLock, free_for

HOST = socket.gethostname()


def lived() -> tuple[int, int]:
    """Pid and start ticks of a process that has ended."""
    process = subprocess.Popen([sys.executable, "-S", "-c", "input()"], stdin=subprocess.PIPE)
    ticks = processes.ticks(process.pid)
    process.communicate(b"\n")
    return process.pid, ticks


def holder(**changes: object) -> Holder:
    """Job 7, restart 0: this very process, a second ago."""
    pid = os.getpid()
    return replace(Holder("7", 0, HOST, pid, processes.ticks(pid), "t", time.time() - 1), **changes)


def write(path: Path, found: Holder) -> None:
    path.write_text(json.dumps(asdict(found)))


def test_acquire_and_release(tmp_path: Path) -> None:
    path = runlock.lock_path(tmp_path)
    lock = RunLock.acquire(path, "7", 0, os.getpid())
    found = runlock.read(path)
    assert found is not None and (found.job, found.restart, found.host, found.pid) == ("7", 0, HOST, os.getpid())
    lock.release()
    assert runlock.read(path) is None
    assert list(tmp_path.iterdir()) == []


def test_held_lock_names_its_holder(tmp_path: Path) -> None:
    path = runlock.lock_path(tmp_path)
    write(path, holder())
    with pytest.raises(LockHeld, match=rf"held by job 7 restart 0 \(host {HOST}, pid {os.getpid()}, heartbeat 1 s"):
        RunLock.acquire(path, "8", 0, os.getpid())
    with pytest.raises(LockHeld):  # the same job again is not a restart of it
        RunLock.acquire(path, "7", 0, os.getpid())


def test_free_for_the_same_job_restarted() -> None:
    other = holder(host="elsewhere")
    assert free_for(other, "7", 1, HOST, time.time())
    assert not free_for(other, "7", 0, HOST, time.time())
    assert not free_for(other, "8", 1, HOST, time.time())


def test_free_when_the_process_is_gone_on_this_host() -> None:
    pid, ticks = lived()
    assert free_for(holder(pid=pid, ticks=ticks), "8", 0, HOST, time.time())
    assert not free_for(holder(pid=pid, ticks=ticks, host="elsewhere"), "8", 0, HOST, time.time())
    assert free_for(holder(ticks=1), "8", 0, HOST, time.time()), "another process has the pid by now"


def test_free_when_the_heartbeat_is_old() -> None:
    now = time.time()
    assert free_for(holder(host="elsewhere", heartbeat=now - 60), "8", 0, HOST, now)
    assert not free_for(holder(host="elsewhere", heartbeat=now - 59), "8", 0, HOST, now)


def test_a_stale_lock_is_taken_over_and_its_owner_notices(tmp_path: Path) -> None:
    path = runlock.lock_path(tmp_path)
    first = RunLock.acquire(path, "7", 0, os.getpid())
    second = RunLock.acquire(path, "7", 1, os.getpid())
    first._next_beat = 0.0
    with pytest.raises(LockLost, match="taken over by job 7 restart 1"):
        first.beat()
    first.release()  # is not its own any more
    assert runlock.read(path) == second.holder


def test_heartbeat_is_renewed_when_due(tmp_path: Path) -> None:
    path = runlock.lock_path(tmp_path)
    lock = RunLock.acquire(path, "7", 0, os.getpid())
    before = runlock.read(path)
    lock.beat()
    assert runlock.read(path) == before, "not due yet"
    lock._next_beat = 0.0
    lock.beat()
    after = runlock.read(path)
    assert after is not None and before is not None and after.heartbeat > before.heartbeat


def test_of_two_contenders_one_gets_it(tmp_path: Path) -> None:
    path = runlock.lock_path(tmp_path)
    pid, ticks = lived()
    write(path, holder(pid=pid, ticks=ticks))
    code = (
        "import os, sys; from areal_hpc.runlock import RunLock, LockHeld; print(flush=True); input()\n"
        "try: RunLock.acquire(sys.argv[1], str(os.getpid()), 0, os.getpid()); print('mine', flush=True); input()\n"
        "except LockHeld: print('held', flush=True)\n"
    )
    argv = [sys.executable, "-c", code, str(path)]
    rivals = [
        subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1) for _ in range(4)
    ]
    for rival in rivals:
        rival.stdout.readline()
    for rival in rivals:
        rival.stdin.write("\n")
    said = [rival.stdout.readline().strip() for rival in rivals]
    for rival in rivals:
        rival.communicate("\n", timeout=10)
    assert sorted(said) == ["held", "held", "held", "mine"]


def test_what_is_no_lock_counts_as_none(tmp_path: Path) -> None:
    path = runlock.lock_path(tmp_path)
    path.write_text("{")
    assert runlock.read(path) is None
    RunLock.acquire(path, "7", 0, os.getpid())
