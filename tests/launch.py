"""Starts programs under `mpirun` for tests, and leaves nothing behind.

The one place of the tests that knows Open MPI's flags. A launch runs in a session of its own, its output
goes to a file (a pipe would stay open as long as any orphan holds it), and every process of it carries a token
in its environment: ranks and helpers are found by it even after they left the process group or session.

By hand: python tests/launch.py [--tcp] [--timeout S] N COMMAND...
"""

from __future__ import annotations

import argparse
import atexit
import os
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path

from areal_hpc.processes import scrubbed

TIMED_OUT = 124  # what `timeout(1)` returns
FLAGS = ["--oversubscribe", "--bind-to", "none"]
FLAGS_ROOT = ["--allow-run-as-root"]
MCA_TCP = {"pml": "ob1", "btl": "self,tcp"}
TOKEN = "AREAL_HPC_TEST_LAUNCH"

_running: set[Job] = set()  # what a test that fails or is interrupted did not bring to its end


@atexit.register
def _end_all() -> None:
    for job in list(_running):
        job.kill()


def command(n: int, argv: Sequence[str], tcp: bool = False) -> list[str]:
    """The `mpirun` line for `n` ranks; `tcp` keeps every message off shared memory."""
    flags = FLAGS + (FLAGS_ROOT if os.geteuid() == 0 else [])
    if tcp:
        flags += [word for parameter in MCA_TCP.items() for word in ("--mca", *parameter)]
    return ["mpirun", *flags, "-n", str(n), *argv]


def carriers(name: str, value: str) -> list[int]:
    """Every live process with `name=value` in its environment. Zombies do not count."""
    mark, found = f"{name}={value}".encode(), []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            state = (entry / "stat").read_text().rpartition(")")[2].split()[0]
            if state != "Z" and mark in (entry / "environ").read_bytes().split(b"\0"):
                found.append(int(entry.name))
        except OSError:
            continue  # it ended while we looked, or is another user's
    return sorted(found)


def kill_carriers(name: str, value: str) -> None:
    """Kills them, stopped ones too, and those that they start meanwhile; gives up after 10 seconds."""
    deadline = time.monotonic() + 10
    while (pids := carriers(name, value)) and time.monotonic() < deadline:
        for pid in pids:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        time.sleep(0.05)


class Job:
    """A program that runs: its output so far, its processes, its end.

    `env` is added to this process's environment, without what launchers and MPI put there: a test of this process
    that initialised MPI, or an allocation that the tests run in. `capture=False` lets it print to our own stdout.
    """

    def __init__(
        self,
        argv: Sequence[str],
        env: Mapping[str, str] | None = None,
        cwd: str | Path | None = None,
        capture: bool = True,
    ) -> None:
        self.argv = list(argv)
        self.token = uuid.uuid4().hex
        self._output = tempfile.TemporaryFile() if capture else None  # noqa: SIM115 (it lives as long as the job)
        self.process = subprocess.Popen(
            self.argv,
            env={**scrubbed(os.environ), "OMP_NUM_THREADS": "1", **(env or {}), TOKEN: self.token},
            cwd=cwd,
            stdin=subprocess.DEVNULL,
            stdout=self._output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        _running.add(self)

    def pids(self) -> list[int]:
        """Every live process of this launch: launcher, ranks, helpers."""
        return carriers(TOKEN, self.token)

    def text(self) -> str:
        """What it has printed so far, stdout and stderr in one; empty where it is not captured."""
        if self._output is None:
            return ""
        fd = self._output.fileno()
        return os.pread(fd, os.fstat(fd).st_size, 0).decode(errors="replace")

    def signal(self, number: int) -> None:
        """To the launcher; `mpirun` hands USR1 on to the ranks."""
        self.process.send_signal(number)

    def kill(self) -> None:
        """Ends every process of the launch."""
        kill_carriers(TOKEN, self.token)
        self.process.wait(10)
        _running.discard(self)

    def finish(self, timeout: float) -> subprocess.CompletedProcess[str]:
        """Waits for the end. Past `timeout` seconds everything is killed and the return code is 124."""
        note = ""
        try:
            code = self.process.wait(timeout)
            if left := self.pids():
                note = f"\nlaunch: {len(left)} processes outlived their launcher and were killed\n"
        except subprocess.TimeoutExpired:
            code, note = TIMED_OUT, f"\nlaunch: killed after {timeout:g} s: {' '.join(self.argv)}\n"
        finally:
            self.kill()
        return subprocess.CompletedProcess(self.argv, code, self.text() + note)


def mpirun(
    n: int,
    argv: Sequence[str],
    tcp: bool = False,
    env: Mapping[str, str] | None = None,
    timeout: float = 120,
    cwd: str | Path | None = None,
) -> subprocess.CompletedProcess[str]:
    """Runs `argv` on `n` ranks; `stdout` of the result holds stdout and stderr of all of them."""
    return Job(command(n, argv, tcp), env, cwd).finish(timeout)


def main() -> int:
    parser = argparse.ArgumentParser(description="Run a command on N ranks under mpirun.")
    parser.add_argument("--tcp", action="store_true", help="no shared memory between the ranks")
    parser.add_argument("--timeout", type=float, default=600, help="seconds after which all is killed")
    parser.add_argument("n", type=int, metavar="N")
    parser.add_argument("argv", nargs=argparse.REMAINDER, metavar="COMMAND")
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # the ranks are not left behind
    result = Job(command(args.n, args.argv, args.tcp), capture=False).finish(args.timeout)
    sys.stdout.write(result.stdout)
    return result.returncode


if __name__ == "__main__":
    sys.exit(main())
