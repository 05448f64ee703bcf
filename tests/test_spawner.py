"""The spawner: starts processes clean of MPI, ignores stop signals, and leaves nobody behind."""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from areal_hpc import processes
from areal_hpc.spawner import Spawner

REPORT = (
    "import json, os, signal, socket, sys\n"
    "s = socket.socket(fileno=int(sys.argv[1]))\n"
    "ignored = [n for n in (signal.SIGUSR1, signal.SIGTERM) if signal.getsignal(n) == signal.SIG_IGN]\n"
    "fds = [int(f) for f in os.listdir('/proc/self/fd')]\n"
    "said = dict(pid=os.getpid(), group=os.getpgid(0), env=dict(os.environ), ignored=ignored, fds=fds)\n"
    "s.sendall(json.dumps(said).encode() + b'\\n'); s.recv(1)\n"
)
COMMAND = [sys.executable, "-S", "-c"]


def gone(pid: int) -> bool:
    found = processes.stat(pid)
    return found is None or found[0] in "ZX"


def eventually(condition: Callable[[], bool], limit_s: float = 10.0) -> bool:
    deadline = time.monotonic() + limit_s
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.01)
    return True


def read_line(channel: socket.socket, limit_s: float = 20.0) -> bytes:
    """A line of the worker, or what there was at the end of its socket."""
    data, deadline = b"", time.monotonic() + limit_s
    while not data.endswith(b"\n"):
        assert select.select([channel], [], [], max(0.0, deadline - time.monotonic()))[0], f"only {data!r}"
        more = channel.recv(1 << 16)
        if not more:
            break
        data += more
    return data


@pytest.fixture
def spawner() -> Iterator[Spawner]:
    started = Spawner()
    yield started
    started.close()
    assert gone(started.pid)


def test_worker_is_clean_of_mpi_and_deaf_to_stop_signals(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("OMPI_COMM_WORLD_RANK", "PMIX_RANK", "PMI_FD", "SLURM_JOB_ID", "SLURMD_NODENAME"):
        monkeypatch.setenv(name, "1")
    monkeypatch.setenv("KEPT", "1")
    spawner = Spawner()
    try:
        _, channel = spawner.worker([*COMMAND, REPORT], {"ADDED": "2"})
        said = json.loads(read_line(channel))
        assert not [name for name in said["env"] if name.startswith(processes.LAUNCHER_PREFIXES)]
        assert (said["env"]["KEPT"], said["env"]["ADDED"]) == ("1", "2")
        assert said["ignored"] == [signal.SIGUSR1, signal.SIGTERM]
        assert said["group"] == said["pid"], "it leads a group of its own"
        assert len(said["fds"]) <= 5, f"0, 1, 2, its socket and the listing: {said['fds']}"
        channel.close()
        assert eventually(lambda: gone(said["pid"]))
    finally:
        spawner.close()


def test_spawner_has_the_standard_library_only(spawner: Spawner) -> None:
    _, channel = spawner.worker([*COMMAND, REPORT], {})
    read_line(channel)
    channel.close()
    mapped = Path(f"/proc/{spawner.pid}/maps").read_text()
    assert "site-packages" not in mapped and "libmpi" not in mapped


def test_spawner_ignores_stop_signals_from_its_first_moment() -> None:
    for _ in range(5):
        spawner = Spawner()
        for number in (signal.SIGUSR1, signal.SIGTERM, signal.SIGINT):
            os.kill(spawner.pid, number)
        _, channel = spawner.worker([*COMMAND, REPORT], {})
        assert read_line(channel)
        spawner.close()


def test_kill_takes_the_whole_group_and_ends_the_socket(spawner: Spawner) -> None:
    code = (
        "import os, socket, subprocess, sys, time\n"
        "s = socket.socket(fileno=int(sys.argv[1])); child = subprocess.Popen(['sleep', '100'])\n"
        "s.sendall(f'{os.getpid()} {child.pid}\\n'.encode()); time.sleep(100)\n"
    )
    number, channel = spawner.worker([*COMMAND, code], {})
    pids = [int(word) for word in read_line(channel).split()]
    spawner.kill(number)
    assert read_line(channel) == b""
    assert eventually(lambda: all(map(gone, pids)))
    spawner.kill(number)  # gone already: nothing happens
    spawner.kill(999)


def test_what_cannot_be_started_ends_at_once(spawner: Spawner, tmp_path: Path) -> None:
    log = tmp_path / "log"
    spawner.log(log)
    _, channel = spawner.worker(["/no/such/program"], {})
    assert read_line(channel) == b""
    assert eventually(lambda: log.exists() and "/no/such/program" in log.read_text())


def test_a_crash_is_in_the_log(spawner: Spawner, tmp_path: Path) -> None:
    log = tmp_path / "log"
    spawner.log(log)
    _, channel = spawner.worker([*COMMAND, "import os, sys; print('last words', flush=True); os.abort()"], {})
    assert read_line(channel) == b""
    assert eventually(lambda: log.exists() and "killed by SIGABRT (6)" in log.read_text())
    assert "last words" in log.read_text()


@pytest.mark.parametrize("end", ["exit", "kill"])
def test_spawner_and_workers_end_with_their_rank(end: str) -> None:
    code = (
        "import os, sys, time; from areal_hpc.spawner import Spawner\n"
        f"spawner = Spawner(); _, channel = spawner.worker({[*COMMAND, REPORT]!r}, {{}})\n"
        "channel.setblocking(True); line = channel.makefile().readline()\n"
        "holder = os.fork()\n"  # keeps the socket open, as a library's forked child would
        "if holder == 0: time.sleep(30); os._exit(0)\n"
        "import json; print(spawner.pid, json.loads(line)['pid'], flush=True)\n"
        "sys.stdin.readline(); os._exit(0)\n"
    )
    rank = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert rank.stdout and rank.stdin
    pids = [int(word) for word in rank.stdout.readline().split()]
    assert len(pids) == 2
    if end == "kill":
        rank.kill()
    rank.stdin.close()
    rank.wait(10)
    assert eventually(lambda: all(map(gone, pids)), 15), "before the forked child lets go of the socket"
    rank.stdout.close()


def test_close_ends_workers(spawner: Spawner) -> None:
    _, channel = spawner.worker([*COMMAND, "import time; time.sleep(100)"], {})
    spawner.close()
    assert read_line(channel) == b""


def test_a_killed_spawner_takes_its_workers_along() -> None:
    spawner = Spawner()
    _, channel = spawner.worker([*COMMAND, REPORT], {})
    pid = json.loads(read_line(channel))["pid"]
    os.kill(spawner.pid, signal.SIGKILL)
    assert eventually(lambda: gone(pid))
    spawner.close()
