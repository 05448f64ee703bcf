"""The spawner: one small process per rank, started before MPI, that alone starts others.

Forking after MPI_Init hangs or crashes on some fabrics, so whatever must be started later
(reward workers and their replacements) is started by this child, which has the standard
library only and no trace of MPI in its environment. That of local rank 0 also watches the
node's ranks (watch.py), that of rank 0 keeps run.lock alive (runlock.py): neither needs a
thread in a rank.

It lives in a session of its own, ignores the signals that launchers and `scancel` send to
helpers too, and ends when its rank does: at the end of its socket, or when it has another
parent (a forked child may keep the socket open). Its workers get SIGKILL at its death.
Messages are JSON, one per packet of an AF_UNIX socket; they go one way. A worker talks to the
rank over a socket of its own, and its death is the end of that.
"""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from areal_hpc import processes
from areal_hpc.runlock import Holder, LockLost, RunLock
from areal_hpc.watch import Watcher, WatchFiles

IGNORED = (signal.SIGUSR1, signal.SIGUSR2, signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
TURN_S = 0.5  # between two looks at ranks, children and the lock
PACKET_BYTES = 1 << 16
SEND_LIMIT_S = 10.0  # the spawner reads at once unless its file system has stopped
REPORT_S = 1.0  # a rank's socket closes a moment before its process counts as gone
BOOTSTRAP = (
    "import sys; sys.path.insert(0, sys.argv[1]); from areal_hpc.spawner import main; main(*map(int, sys.argv[2:]))"
)


class Spawner:
    """A rank's handle on its spawner; starts it. Only before MPI is initialised."""

    def __init__(self) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        ours.settimeout(SEND_LIMIT_S)
        source = str(Path(__file__).resolve().parents[1])
        arguments = [source, str(theirs.fileno()), str(os.getpid())]
        # Blocked until the child ignores them: between exec and its first lines they would end it.
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, IGNORED)
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-I", "-S", "-c", BOOTSTRAP, *arguments],
                env=processes.scrubbed(os.environ),
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                start_new_session=True,
            )
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
            theirs.close()
        self._socket = ours
        self._workers = 0
        self.pid = self._process.pid

    def worker(self, argv: Sequence[str], env: Mapping[str, str]) -> tuple[int, socket.socket]:
        """Start a process; returns its number and our end of a stream socket to it.

        Its own end is a descriptor whose number is appended to `argv`; `env` is added to the
        scrubbed environment. It leads a process group, which `kill` ends. If it cannot be
        started the socket is at its end at once and the spawner's log line says why.
        """
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        self._workers += 1
        with theirs:
            self._send({"do": "worker", "number": self._workers, "argv": list(argv), "env": dict(env)}, theirs)
        return self._workers, ours

    def kill(self, number: int) -> None:
        """SIGKILL to the worker's process group; nothing if it has ended."""
        self._send({"do": "kill", "number": number})

    def log(self, path: str | Path) -> None:
        """Append what spawner and workers print from now on to this file."""
        self._send({"do": "log", "path": str(path)})

    def watch(self, files: WatchFiles) -> None:
        """Watch the node's ranks from now on (local rank 0)."""
        self._send({"do": "watch", **asdict(files)})

    def hold(self, lock: RunLock) -> None:
        """Keep the heartbeat of run.lock, and release it at `close` (rank 0)."""
        self._send({"do": "hold", "path": str(lock.path), **asdict(lock.holder)})

    def close(self, timeout_s: float = 5.0) -> None:
        """End the spawner and its workers, release the lock, and wait until it is gone."""
        self._socket.close()
        try:
            self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait(timeout_s)

    def _send(self, message: dict[str, Any], *sockets: socket.socket) -> None:
        packet = json.dumps(message).encode()
        if len(packet) > PACKET_BYTES:
            raise ValueError(f"message to the spawner of {len(packet)} bytes, at most {PACKET_BYTES}")
        socket.send_fds(self._socket, [packet], [s.fileno() for s in sockets])


class Service:
    """The child's side: one turn after the other until its rank is gone."""

    def __init__(self, channel: socket.socket, parent: int) -> None:
        self._channel = channel
        self._parent = parent
        self._workers: dict[int, subprocess.Popen[bytes]] = {}
        self._watcher: Watcher | None = None
        self._lock: RunLock | None = None

    def run(self) -> None:
        """Serve until the socket's end or the parent's death; then end all that was started."""
        next_turn = 0.0
        while os.getppid() == self._parent:
            deaths = self._watcher.deaths() if self._watcher else []
            ready, _, _ = select.select([self._channel, *deaths], [], [], max(0.0, next_turn - time.monotonic()))
            if self._channel in ready and not self._receive():
                break
            if time.monotonic() >= next_turn or any(death in ready for death in deaths):
                next_turn = time.monotonic() + TURN_S
                self._turn()
        self._end()

    def _receive(self) -> bool:
        packet, descriptors, _, _ = socket.recv_fds(self._channel, PACKET_BYTES, 1)
        if not packet:
            return False
        message = json.loads(packet)
        verb = message.pop("do")
        if verb == "worker":
            self._start(**message, descriptor=descriptors[0])
        elif verb == "kill":
            self._kill(message["number"])
        elif verb == "log":
            descriptor = os.open(message["path"], os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
            os.dup2(descriptor, 1)
            os.dup2(descriptor, 2)
            os.close(descriptor)
        elif verb == "watch":
            self._watcher = Watcher(WatchFiles(**message))
            self._look()
        elif verb == "hold":
            self._lock = RunLock(message.pop("path"), Holder(**message))
        return True

    def _start(self, number: int, argv: list[str], env: dict[str, str], descriptor: int) -> None:
        spawner = os.getpid()

        def die_with_spawner() -> None:
            processes.signal_when_parent_dies(signal.SIGKILL)
            if os.getppid() != spawner:
                os._exit(1)

        try:
            self._workers[number] = subprocess.Popen(
                [*argv, str(descriptor)],
                env={**os.environ, **env},
                stdin=subprocess.DEVNULL,
                pass_fds=[descriptor],
                start_new_session=True,
                preexec_fn=die_with_spawner,  # safe: this process has one thread
            )
        except (OSError, subprocess.SubprocessError) as error:
            _say(f"worker {number} ({' '.join(argv)}): cannot be started: {error}")
        finally:
            os.close(descriptor)

    def _kill(self, number: int) -> None:
        worker = self._workers.get(number)
        if worker is not None:
            _kill_group(worker.pid)

    def _turn(self) -> None:
        for number, worker in list(self._workers.items()):
            if worker.poll() is not None:
                _kill_group(worker.pid)  # whatever it has started
                del self._workers[number]
                if worker.returncode != 0:
                    _say(f"worker {number} (pid {worker.pid}): {processes.ended_by(worker.returncode)}")
        self._look()
        if self._lock is not None:
            self._keep(self._lock)

    def _look(self) -> None:
        if self._watcher is not None and self._watcher.look():
            self._watcher = None

    def _keep(self, lock: RunLock) -> None:
        try:
            lock.beat()
        except LockLost as error:
            self._lock = None
            if self._watcher is not None:
                self._watcher.end(str(error), None)
        except OSError as error:  # the lock ages; another may take it, and the next beat that works sees that
            _say(f"{lock.path}: heartbeat not written: {error}")

    def _end(self) -> None:
        for worker in self._workers.values():
            _kill_group(worker.pid)
            worker.wait()
        deadline = time.monotonic() + REPORT_S  # for a rank that died: its end is reported before ours
        while self._watcher is not None and self._watcher.running(self._parent) and time.monotonic() < deadline:
            self._look()
            time.sleep(0.05)
        if self._lock is not None and processes.alive(self._parent, processes.ticks(self._parent)):
            self._lock.release()


def _kill_group(pid: int) -> None:
    with suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)


def _say(text: str) -> None:
    os.write(2, f"areal-hpc spawner: {text}\n".encode())


def main(descriptor: int, parent: int) -> None:
    """Entry of the child; `descriptor` is its end of the socket."""
    for number in IGNORED:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, IGNORED)
    Service(socket.socket(fileno=descriptor), parent).run()
    os._exit(0)
